"""The methods whose runs are disturbed."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from comm_hooks import (
    SRHT,
    CountSketch,
    Differences,
    ErrorFeedback,
    Exchange,
    GaussianSketch,
    Identity,
    PermK,
    Quantize,
    RandomK,
    Sign,
    TopK,
)
from comm_hooks.compressors.cocktail import Cocktail
from comm_hooks.compressors.dct import DCTTopK
from comm_hooks.memory import MomentumCorrection
from comm_hooks.optim import (
    DGC,
    EF21,
    SAFL,
    CDAdam,
    CocktailSGD,
    CompressedAdam,
    DeMo,
    DiLoCo,
    FedAvg,
    FedLAMB,
    FetchSGD,
    LocalRounds,
    LocalVarianceAdam,
    Marina,
    MicroAdam,
    MuLoCo,
    MuonAdamW,
    OneBitAdam,
    Participation,
    SparseLoCo,
    ZeroOneAdam,
)
from comm_hooks.optim.laprop import LaProp
from tests.faults.training import (
    HookTraining,
    OptimizerTraining,
    RoundsTraining,
    Settings,
    ShardedTraining,
    SparseHookTraining,
    Training,
)


@dataclass(frozen=True)
class Method:
    """One way to train.

    Args:
        name: what it is called.
        group: the column of the table.
        make: makes one rank of a run.
        settings: with which.
        other: of the exchange, another compressor that could be meant as well.
        ranks: how many.
        steps: how many; all faults come before the last :data:`LATEST` of them.
        traits: which faults it can have, beside those that all can; see
            :mod:`tests.faults.kinds`.
    """

    name: str
    group: str
    make: Callable[[Settings], Training]
    settings: Settings
    other: Any
    ranks: int = 2
    steps: int = 14
    traits: frozenset[str] = frozenset()


HOOKS, OPTIMIZERS, ROUNDS, SHARDED = "hooks", "optimizers", "rounds", "sharded models"

_TOP_K = {"compressor": TopK(1 / 8), "memory": ErrorFeedback()}
_SIGN = {"compressor": Sign(), "memory": ErrorFeedback()}
_OTHER_TOP_K = TopK(1 / 4)


def _hook(name: str, exchange: dict[str, Any], other: Any, **options: Any) -> Method:
    make = options.pop("make", HookTraining)
    traits = {"exact skip", *options.pop("traits", ())}
    return Method(name, HOOKS, make, Settings(exchange), other, traits=frozenset(traits), **options)


def _optimizer(
    kind: Any,
    exchange: dict[str, Any],
    other: Any,
    options: dict[str, Any],
    *,
    name: str = "",
    closure: bool = False,
    traits: tuple[str, ...] = ("exact skip",),
    **rest: Any,
) -> Method:
    return Method(
        name or kind.__name__,
        OPTIMIZERS,
        partial(OptimizerTraining, kind=kind, closure=closure),
        Settings(exchange, options),
        other,
        traits=frozenset(traits),
        **rest,
    )


def _local_rounds(params: Any, exchange: Exchange, *, lr: float, **options: Any) -> LocalRounds:
    return LocalRounds(torch.optim.AdamW(params, lr=lr), exchange, **options)


def _low_communication(
    params: Any, exchange: Exchange, *, lr: float, muon: bool = False, **options: Any
) -> LocalRounds:
    """Return what ``low_communication`` makes, with an exchange that can be exchanged."""
    named = list(params)
    inner = MuonAdamW(named, lr=lr, rest=LaProp) if muon else LaProp(named, lr=lr)
    server = torch.optim.SGD([p for _, p in named], lr=2.0)
    return LocalRounds(
        inner, exchange, server, look_ahead=0.3, shared_decay=True, fragments=2, **options
    )


def _rounds(
    name: str,
    kind: Any,
    exchange: dict[str, Any],
    other: Any,
    options: dict[str, Any],
    *,
    clients: int = 0,
    traits: tuple[str, ...] = (),
) -> Method:
    if clients:
        options = {**options, "participation": Participation(clients=clients, fraction=0.75)}
    else:
        options = {**options, "local_steps": 2}
    return Method(
        name,
        ROUNDS,
        partial(RoundsTraining, kind=kind, clients=clients),
        Settings(exchange, options),
        other,
        steps=12 if clients else 24,
        traits=frozenset({*traits, "clients" if clients else "local steps"}),
    )


def _sharded(
    name: str,
    kind: Any,
    exchange: dict[str, Any],
    other: Any,
    options: dict[str, Any],
    *traits: str,
) -> Method:
    return Method(
        f"{name}, FSDP",
        SHARDED,
        partial(ShardedTraining, kind=kind),
        Settings(exchange, options),
        other,
        ranks=4,
        steps=24 if "local steps" in traits else 14,
        traits=frozenset(traits),
    )


def _methods() -> Iterator[Method]:
    yield _hook("count_sketch", {"compressor": CountSketch(0.25)}, CountSketch(0.5))
    yield _hook("srht", {"compressor": SRHT(0.25)}, SRHT(0.5))
    yield _hook("gaussian_sketch", {"compressor": GaussianSketch(0.25)}, GaussianSketch(0.5))
    yield _hook("topk", _TOP_K, _OTHER_TOP_K)
    yield _hook("sign", _SIGN, TopK(1 / 4), make=partial(HookTraining, by_register=True))
    yield _hook("quantize", {"compressor": Quantize(bits=4)}, Quantize(bits=8))
    yield _hook("random_k", {"compressor": RandomK(0.25)}, RandomK(0.5))
    yield _hook("perm_k", {"compressor": PermK()}, RandomK(0.5), ranks=3)
    yield _hook("identity, 16 bits", {"compressor": Identity(16)}, Identity(32))
    yield _hook("topk, sharded", {**_TOP_K, "collective": "sharded"}, _OTHER_TOP_K, ranks=3)
    nodes = {"collective": "hierarchical", "ranks_per_node": 2}
    yield _hook("topk, hierarchical", {**_TOP_K, **nodes}, _OTHER_TOP_K, ranks=4)
    yield _hook("topk, bucket", {**_TOP_K, "granularity": "bucket"}, _OTHER_TOP_K)
    yield _hook(
        "topk, sparse gradients", _TOP_K, _OTHER_TOP_K, make=SparseHookTraining, traits=["sparse"]
    )

    adam = {"lr": 0.01}
    sharded_sign = {**_SIGN, "collective": "sharded"}
    yield _optimizer(LocalVarianceAdam, _TOP_K, _OTHER_TOP_K, adam)
    frozen = {**adam, "freeze_step": 3}
    yield _optimizer(CompressedAdam, _TOP_K, _OTHER_TOP_K, {**frozen, "scaled": True}, ranks=3)
    yield _optimizer(
        CompressedAdam,
        {**_TOP_K, **nodes},
        _OTHER_TOP_K,
        frozen,
        name="CompressedAdam, hierarchical",
        ranks=4,
    )
    yield _optimizer(OneBitAdam, sharded_sign, _OTHER_TOP_K, frozen)
    local = {"var_freeze_step": 3, "local_step_scaler": 4, "local_step_clipper": 2}
    yield _optimizer(
        ZeroOneAdam,
        sharded_sign,
        _OTHER_TOP_K,
        {**adam, **local},
        steps=20,
        traits=("local steps",),
    )
    differences = {"compressor": Sign(), "memory": Differences(), "collective": "sharded"}
    yield _optimizer(CDAdam, differences, _OTHER_TOP_K, adam)
    top_k_differences = {"compressor": TopK(1 / 8), "memory": Differences()}
    yield _optimizer(EF21, top_k_differences, _OTHER_TOP_K, {"lr": 0.05, "momentum": 0.9})
    micro = {"compressor": TopK(1 / 8, value_bits=4), "collective": "sharded"}
    micro["memory"] = ErrorFeedback(bits=4, stochastic=True)
    yield _optimizer(MicroAdam, micro, _OTHER_TOP_K, adam)
    yield _optimizer(
        FetchSGD,
        {"compressor": CountSketch(0.5)},
        CountSketch(0.25),
        {"lr": 0.01, "rows": 3, "density": 0.1},
    )
    yield _optimizer(
        Marina,
        {"compressor": PermK()},
        RandomK(0.25),
        {"lr": 0.02, "p": 0.3},
        closure=True,
        traits=("closure",),
    )
    momentum = {"compressor": TopK(1 / 8), "memory": MomentumCorrection(0.9)}
    yield _optimizer(DGC, momentum, _OTHER_TOP_K, {"lr": 0.02, "clip_norm": 1.0}, ranks=3)
    dct = {"compressor": DCTTopK(chunk=16, density=1 / 8), "memory": ErrorFeedback(decay=0.999)}
    yield _optimizer(DeMo, dct, DCTTopK(chunk=16, density=1 / 4), {"lr": 0.002})
    cocktail = {"compressor": Cocktail(mask=0.5, density=0.25), "collective": "sharded"}
    yield _optimizer(
        CocktailSGD,
        {**cocktail, "memory": ErrorFeedback()},
        Cocktail(mask=0.5, density=0.5),
        {"lr": 0.02, "momentum": 0.9},
    )

    yield _rounds("LocalRounds", _local_rounds, _TOP_K, _OTHER_TOP_K, adam)
    fragments = {**adam, "fragments": 2}
    yield _rounds("LocalRounds, fragments", _local_rounds, _TOP_K, _OTHER_TOP_K, fragments)
    sketch = {"compressor": CountSketch(0.5), "granularity": "bucket"}
    yield _rounds("SAFL", SAFL, sketch, CountSketch(0.25), {"lr": 0.01, "local_lr": 0.1})
    plain = {"compressor": Identity()}
    yield _rounds("FedAvg", FedAvg, plain, Quantize(bits=8), {"lr": 0.05}, clients=6)
    yield _rounds("FedLAMB", FedLAMB, plain, Quantize(bits=8), adam)
    quantized = {"compressor": Quantize(bits=4), "memory": ErrorFeedback()}
    yield _rounds("DiLoCo", DiLoCo, quantized, Quantize(bits=8), adam)
    sparse = {"compressor": TopK(1 / 8, value_bits=2), "memory": ErrorFeedback(decay=0.95)}
    yield _rounds("SparseLoCo", SparseLoCo, sparse, _OTHER_TOP_K, adam)
    yield _rounds("MuLoCo", MuLoCo, quantized, Quantize(bits=8), adam)
    signs = TopK(1 / 8, value_bits=1, index_code="rice", overlap=0.5)
    recommended = {
        "compressor": signs,
        "memory": ErrorFeedback(decay=0.5),
        "granularity": "bucket",
        "min_numel": 1,
    }
    yield _rounds("low_communication", _low_communication, recommended, _OTHER_TOP_K, adam)
    shards = {**recommended, "collective": "sharded", "downlink": replace(signs, density=1 / 4)}
    yield _rounds("low_communication, shards", _low_communication, shards, _OTHER_TOP_K, adam)
    muon = {**adam, "muon": True}
    yield _rounds("low_communication, Muon", _low_communication, recommended, _OTHER_TOP_K, muon)
    yield _rounds("LocalRounds, clients", _local_rounds, _TOP_K, _OTHER_TOP_K, adam, clients=6)

    yield _sharded("LocalVarianceAdam", LocalVarianceAdam, _SIGN, _OTHER_TOP_K, adam, "exact skip")
    two = {**adam, "local_steps": 2}
    shards = "local steps"
    yield _sharded("low_communication", _low_communication, recommended, _OTHER_TOP_K, two, shards)
    yield _sharded("LocalRounds", _local_rounds, _TOP_K, _OTHER_TOP_K, two, shards)


METHODS = {method.name: method for method in _methods()}

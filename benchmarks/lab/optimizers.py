"""The optimizers that can be compared, and the published exchange of each.

To add one, add an entry to :data:`OPTIMIZERS`: a function that builds it, and the names of its
options. One that owns the exchange says through which compressor it was published.
"""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from benchmarks.lab.communication import Options
from benchmarks.lab.runs import Settings
from comm_hooks import Exchange
from comm_hooks.collectives import Transport
from comm_hooks.config import build_compressor
from comm_hooks.optim import (
    DGC,
    EF21,
    SAFL,
    Adam,
    AMSGrad,
    CDAdam,
    CocktailSGD,
    CompressedAdam,
    DeMo,
    DiLoCo,
    FedAMS,
    FedAvg,
    FedLAMB,
    FetchSGD,
    LaProp,
    LocalRounds,
    LocalVarianceAdam,
    Marina,
    MicroAdam,
    MuLoCo,
    MuonAdamW,
    OneBitAdam,
    OneBitLamb,
    SparseLoCo,
    ZeroOneAdam,
    low_communication,
)
from comm_hooks.optim.moments import halve_ema_horizon

Kind = type[bool] | type[int] | type[float]
"""What an option's value may be: a truth value, or a positive number."""
Named = Iterable[tuple[str, nn.Parameter]]
Build = Callable[[Named, Any, Settings, Options], Any]


@dataclass(frozen=True)
class OptimizerEntry:
    """One optimizer, and how it gets at the gradients of other ranks."""

    build: Build
    options: Mapping[str, Kind]
    note: str = ""
    communication: str = ""
    """The compressor it exchanges through unless told otherwise; empty: gradients cross before."""
    communication_options: Options = field(default_factory=dict)
    """Of that compressor."""
    needs: Options = field(default_factory=dict)
    """Of the exchange, whatever the compressor."""
    makes_exchange: bool = False
    """Whether it makes an exchange of its own, on the transport that it is built with."""

    @property
    def exchanges(self) -> bool:
        """Whether it exchanges by itself; otherwise gradients cross before its steps."""
        return bool(self.communication) or self.makes_exchange


def _adam_like(settings: Settings, options: Options) -> Options:
    return {
        "lr": settings.learning_rate,
        "betas": settings.betas,
        "weight_decay": settings.weight_decay,
        **options,
    }


def _alone(kind: Callable[..., Optimizer], **options: Kind) -> OptimizerEntry:
    """Return the entry of an optimizer that takes steps along gradients that have crossed."""

    def build(named: Named, exchange: None, settings: Settings, options: Options) -> Optimizer:
        return kind(named, **_adam_like(settings, options))

    return OptimizerEntry(build, {"lr": float, **options})


def _adaptive(kind: type[Any], **defaults: Any) -> Build:
    """Build an optimizer with the settings of AdamW."""

    def build(named: Named, exchange: Exchange, settings: Settings, options: Options) -> Any:
        return kind(named, exchange, **_adam_like(settings, {**defaults, **options}))

    return build


def _build_local_variance_adam(
    named: Named, exchange: Exchange, settings: Settings, options: Options
) -> LocalVarianceAdam:
    beta1, beta2 = settings.betas
    options = {"beta1": halve_ema_horizon(beta1), **options}
    betas = options.pop("beta1"), beta2
    return LocalVarianceAdam(named, exchange, **_adam_like(settings, {"betas": betas, **options}))


def _plain(kind: type[Any], **defaults: Any) -> Build:
    """Build an optimizer of the SGD family, whose learning rate is another."""

    def build(named: Named, exchange: Exchange, settings: Settings, options: Options) -> Any:
        return kind(named, exchange, **{**defaults, **options})

    return build


def _freezing(kind: type[Any]) -> Build:
    def build(named: Named, exchange: Exchange, settings: Settings, options: Options) -> Any:
        frozen = {"freeze_step": settings.warmup, "total_steps": settings.steps}
        return kind(named, exchange, **_adam_like(settings, {**frozen, **options}))

    return build


def _build_zero_one_adam(
    named: Named, exchange: Exchange, settings: Settings, options: Options
) -> ZeroOneAdam:
    frozen = {"var_freeze_step": max(1, settings.steps // 2)}
    return ZeroOneAdam(named, exchange, **_adam_like(settings, {**frozen, **options}))


def _build_safl(named: Named, exchange: Exchange, settings: Settings, options: Options) -> SAFL:
    defaults = {"local_steps": 1, "local_lr": 0.1, "amsgrad": False}
    return SAFL(named, exchange, **_adam_like(settings, {**defaults, **options}))


def _local(kind: Callable[..., Optimizer], **settled: Any) -> Build:
    """Build rounds of local steps with an optimizer that has the settings of AdamW."""

    def build(
        named: Named, exchange: Exchange, settings: Settings, options: Options
    ) -> LocalRounds:
        options = {"local_steps": 8, "fragments": 1, "outer_lr": 1.0, **options}
        members = list(named)
        inner = kind(
            members,
            lr=options.get("lr", settings.learning_rate),
            betas=(options.get("beta1", settings.betas[0]), settings.betas[1]),
            weight_decay=settings.weight_decay,
            **settled,
        )
        momentum = options.get("outer_momentum", 0.0)
        return LocalRounds(
            inner,
            exchange,
            SGD(members, lr=options["outer_lr"], momentum=momentum),
            local_steps=options["local_steps"],
            fragments=options["fragments"],
            look_ahead=options.get("look_ahead", 0.0),
        )

    return build


def _build_low_communication(
    named: Named, transport: Transport | None, settings: Settings, options: Options
) -> LocalRounds:
    options = dict(options)
    chosen = {"bits_per_parameter": options.pop("bits")} if "bits" in options else {}
    chosen["inner"] = "muon" if options.pop("muon", False) else "adamw"
    total_steps = options.pop("total_steps", settings.steps)
    return low_communication(
        named,
        **_adam_like(settings, {**options, **chosen}),
        total_steps=total_steps,
        transport=transport,
    )


def _published(
    kind: type[Any],
    build: Build,
    options: Mapping[str, Kind],
    note: str = "",
    **measured: Any,
) -> OptimizerEntry:
    """Return the entry of an optimizer with the exchange that it was published with.

    Args:
        kind, build, options, note: see :class:`OptimizerEntry`.
        measured: settings of compressor and exchange in place of the published ones, so that
            methods are compared at similar bytes.
    """
    block = {**kind.published, **measured}
    communication, memory = block.pop("compressor"), block.pop("memory", "error_feedback")
    memory = {"type": memory} if isinstance(memory, str) else memory
    collective = block.pop("collective", None)
    needs = {"collective": collective} if collective else {}
    needs |= {f"memory_{key}": memory[key] for key in ("bits", "decay") if key in memory}
    if memory != {"type": "error_feedback"}:  # which compressors get that need it
        needs["memory"] = memory["type"]
    # A compressor's own defaults go without saying.
    usual = build_compressor(communication)
    chosen = {key: value for key, value in block.items() if getattr(usual, key, None) != value}
    return OptimizerEntry(build, options, note, communication, chosen, needs)


_ADAM: Mapping[str, Kind] = {"lr": float}
_FREEZE: Mapping[str, Kind] = {"lr": float, "freeze_step": int}
_ROUNDS: Mapping[str, Kind] = {"lr": float, "local_steps": int}
_LOCAL: Mapping[str, Kind] = {
    **_ROUNDS,
    "beta1": float,
    "fragments": int,
    "outer_lr": float,
    "outer_momentum": float,
    "look_ahead": float,
}
_DELTAS = {"density": 1 / 16, "value_bits": 1, "index_code": "rice", "exempt_bits": 16}

OPTIMIZERS: Mapping[str, OptimizerEntry] = {
    # fused: a sixth of the step's time on a CPU
    "adamw": _alone(functools.partial(AdamW, fused=True)),
    "adam": _alone(Adam, bias_correction=bool),
    "amsgrad": _alone(AMSGrad, bias_correction=bool),
    "laprop": _alone(LaProp),
    "muon_adamw": _alone(MuonAdamW),
    "local_variance_adam": _published(
        LocalVarianceAdam,
        _build_local_variance_adam,
        {**_ADAM, "beta1": float},
        "normalizes on each rank before it exchanges",
        density=1 / 112,
        index_code="rice",
        exempt_bits=16,
    ),
    "low_communication": OptimizerEntry(
        _build_low_communication,
        {"lr": float, "bits": float, "muon": bool},
        note="rounds for a budget of bits per parameter and step",
        makes_exchange=True,
    ),
    "local_adamw": OptimizerEntry(
        _local(AdamW, fused=True),
        _LOCAL,
        note="LocalRounds: local AdamW, compressed deltas",
        communication="topk",
        communication_options=_DELTAS,
    ),
    "local_laprop": OptimizerEntry(
        _local(LaProp),
        _LOCAL,
        note="LocalRounds: local LaProp, compressed deltas",
        communication="topk",
        communication_options=_DELTAS,
    ),
    "compressed_adam": _published(
        CompressedAdam,
        _freezing(CompressedAdam),
        {**_FREEZE, "scaled": bool},
        "compresses the momentum, after a warm-up without compression",
        value_bits=16,
    ),
    "one_bit_adam": _published(
        OneBitAdam, _freezing(OneBitAdam), _FREEZE, block_size=4096, scale="mean"
    ),
    "one_bit_lamb": _published(OneBitLamb, _freezing(OneBitLamb), _FREEZE),
    "zero_one_adam": _published(
        ZeroOneAdam,
        _build_zero_one_adam,
        {
            "lr": float,
            "var_freeze_step": int,
            "var_update_scaler": int,
            "local_step_scaler": int,
            "local_step_clipper": int,
        },
        block_size=4096,
        scale="mean",
    ),
    "cd_adam": _published(CDAdam, _adaptive(CDAdam), _ADAM, collective=None),
    "micro_adam": _published(
        MicroAdam, _adaptive(MicroAdam), {"lr": float, "window": int}, value_bits=16
    ),
    "fetch_sgd": _published(
        FetchSGD,
        _plain(FetchSGD, lr=0.05, density=0.01, rows=5, masking=True),
        {"lr": float, "density": float, "rows": int, "momentum": float, "masking": bool},
        ratio=0.004,  # of each of the five rows
    ),
    "marina": _published(Marina, _plain(Marina, lr=0.01, p=0.05), {"lr": float, "p": float}),
    "ef21": _published(
        EF21, _plain(EF21, lr=0.003, momentum=0.9), {"lr": float, "momentum": float}
    ),
    "dgc": _published(
        DGC,
        _plain(DGC, lr=0.03, clip_norm=1.0),
        {"lr": float, "warmup_steps": int, "clip_norm": float},
        density=1 / 64,
    ),
    "demo": _published(DeMo, _plain(DeMo, lr=1e-3), {"lr": float}),
    "cocktail_sgd": _published(
        CocktailSGD,
        _plain(CocktailSGD, lr=0.003, momentum=0.9),
        {"lr": float, "momentum": float, "delayed": bool},
    ),
    "safl": _published(
        SAFL,
        _build_safl,
        {**_ROUNDS, "local_lr": float, "amsgrad": bool},
        "sketched deltas of local SGD, Adam on the server",
    ),
    "fed_avg": _published(
        FedAvg,
        _plain(FedAvg, lr=0.03, local_steps=8),
        {**_ROUNDS, "momentum": float, "server_lr": float, "server_momentum": float},
    ),
    # As the paper has it, its first round has nothing but eps to divide by.
    "fed_ams": _published(
        FedAMS, _plain(FedAMS, bias_correction=True, bound="client", local_steps=8), _ROUNDS
    ),
    "fed_lamb": _published(FedLAMB, _plain(FedLAMB, lr=1e-2, local_steps=8), _ROUNDS),
    "diloco": _published(
        DiLoCo,
        _adaptive(DiLoCo, local_steps=30),
        {**_ROUNDS, "outer_lr": float, "outer_momentum": float, "fragments": int},
    ),
    "mu_lo_co": _published(
        MuLoCo,
        _adaptive(MuLoCo, local_steps=30),
        {**_ROUNDS, "momentum": float, "outer_lr": float, "outer_momentum": float},
        exempt_bits=16,
    ),
    "sparse_loco": _published(
        SparseLoCo,
        _adaptive(SparseLoCo, local_steps=15),
        {**_ROUNDS, "outer_lr": float},
        exempt_bits=16,
    ),
}

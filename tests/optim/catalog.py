"""Optimizers that own their exchange, as tests of all of them make them."""

from collections.abc import Callable
from functools import partial
from typing import Any

from comm_hooks import CountSketch, Differences, ErrorFeedback, Exchange, Sign, TopK
from comm_hooks.collectives import Transport
from comm_hooks.compressors import Compressor
from comm_hooks.compressors.cocktail import Cocktail
from comm_hooks.compressors.dct import DCTTopK
from comm_hooks.memory import MomentumCorrection
from comm_hooks.optim import (
    DGC,
    EF21,
    CDAdam,
    CocktailSGD,
    DeMo,
    FetchSGD,
    LocalVarianceAdam,
    MicroAdam,
    OneBitAdam,
    OneBitLamb,
    ZeroOneAdam,
)
from comm_hooks.optim.exchanging import ExchangingOptimizer
from tests.optim.replicas import MIN_NUMEL
from tests.optim.scenarios import rarely

RATES: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.1}
HYPER: dict[str, Any] = {**RATES, "betas": (0.9, 0.95), "eps": 1e-8}
SIGN = Sign(block_size=64)
TOP_K = TopK(density=0.05, block_size=200, value_bits=32)
SCHEDULE = {
    "var_freeze_step": 8,
    "var_update_scaler": 3,
    "local_step_scaler": 4,
    "local_step_clipper": 4,
}


def build(
    kind: type[ExchangingOptimizer],
    usual: Compressor,
    memory: Callable[[], Any] | None,
    params: Any,
    *,
    compressor: Compressor | None = None,
    collective: str = "sharded",
    transport: Transport | None = None,
    **hyper: Any,
) -> ExchangingOptimizer:
    own = memory() if memory else None
    settings: dict[str, Any] = {"collective": collective, "min_numel": MIN_NUMEL}
    exchange = Exchange(compressor or usual, own, **settings, transport=transport)
    return kind(params, exchange, **hyper)  # type: ignore[call-arg]


MICRO = partial(ErrorFeedback, bits=4, stochastic=True)
MAKE: dict[str, Callable[..., ExchangingOptimizer]] = {
    "lva": partial(build, LocalVarianceAdam, TOP_K, ErrorFeedback, **HYPER),
    "one_bit": partial(build, OneBitAdam, SIGN, ErrorFeedback, **{"freeze_step": 6, **HYPER}),
    "lamb": partial(build, OneBitLamb, SIGN, ErrorFeedback, **{"freeze_step": 6, **HYPER}),
    "zero_one": partial(build, ZeroOneAdam, SIGN, ErrorFeedback, **{**HYPER, **SCHEDULE}),
    "cd": partial(build, CDAdam, SIGN, Differences, **HYPER),
    "ef21": partial(build, EF21, TOP_K, Differences, momentum=0.9, **RATES),
    "micro_4": partial(build, MicroAdam, TopK(0.05, 64, 4), MICRO, window=4, **HYPER),
    "micro_32": partial(build, MicroAdam, TopK(0.05, 64, 32), ErrorFeedback, window=4, **HYPER),
    "cocktail": partial(build, CocktailSGD, Cocktail(0.5, 0.2, 4, 32), ErrorFeedback, **RATES),
    "demo": partial(build, DeMo, DCTTopK(8, 0.1), partial(ErrorFeedback, decay=0.99), **RATES),
    "dgc": partial(build, DGC, TopK(0.03, 64, 32), partial(MomentumCorrection, 0.9), **RATES),
    "fetch": partial(
        build, FetchSGD, CountSketch(0.3), None, rows=3, momentum=0.9, density=0.02, **RATES
    ),
}
GATHER = {"collective": "all_gather"}
# One optimizer for each way to keep a state: on each rank, frozen, as differences, as codes.
TRAITS = ("lva", "one_bit", "ef21", "micro_4")


def by_trait(*cases: Any) -> list[Any]:
    """Return cases, the kind of optimizer first; all but one a trait are for the slow tests."""
    seen: set[str] = set()
    result = []
    for case in cases:
        kind = case[0] if isinstance(case, tuple) else case
        result += [case] if kind in TRAITS and kind not in seen else rarely(case)
        seen.add(kind)
    return result

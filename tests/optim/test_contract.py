"""What every optimizer that owns its exchange promises, whatever it sends."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from comm_hooks import (
    SRHT,
    ConfigMismatchError,
    CountSketch,
    Differences,
    ErrorFeedback,
    Exchange,
    Identity,
    Quantize,
    Sign,
    TopK,
)
from comm_hooks.compressors import RandomK
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
    Marina,
    MicroAdam,
    OneBitAdam,
    OneBitLamb,
    ZeroOneAdam,
)
from tests.optim.catalog import GATHER, MAKE, SCHEDULE, SIGN, TRAITS, by_trait
from tests.optim.replicas import advance, fresh, resume, skip
from tests.optim.scenarios import RanksOf, collectives, history, overflow, rarely, same

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("poison", [NAN, *rarely(INF)])
@pytest.mark.parametrize(
    ("kind", "options"),
    by_trait(
        ("lva", {}),
        ("one_bit", {"freeze_step": 2}),
        ("one_bit", {"freeze_step": 6}),
        ("lamb", {"freeze_step": 2}),
        ("lamb", {"freeze_step": 6}),
        # The bad step is the fourth: a variance step in one case, a synchronization in the other.
        ("zero_one", {"var_freeze_step": 2, "var_update_scaler": 4}),
        ("zero_one", {"var_freeze_step": 8, "var_update_scaler": 4}),
        ("cd", {}),
        ("cd", GATHER),
        ("ef21", {"momentum": 0.0, **GATHER}),
        ("ef21", {"momentum": 0.9, **GATHER}),
        ("micro_4", {}),
        ("micro_32", {}),
        ("cocktail", {"momentum": 0.5}),
        ("demo", GATHER),
        ("dgc", {"clip_norm": None, **GATHER}),
        ("dgc", {"clip_norm": 1.0, **GATHER}),
        ("fetch", {"masking": False, "density": 1.0, "collective": "auto"}),
        ("fetch", {"masking": True, "density": 1.0, "collective": "auto"}),
    ),
    ids=str,
)
def test_a_gradient_that_is_not_finite_on_one_rank_changes_nothing(
    ranks_of: RanksOf, kind: str, options: dict[str, Any], poison: float
) -> None:
    outcomes = ranks_of(2).run(skip, MAKE[kind], options, poison)
    unchanged, moved, total = outcomes[0]
    assert unchanged
    assert moved
    assert outcomes[0] == outcomes[1]
    assert np.isfinite(total)


@pytest.mark.parametrize(
    ("kind", "bad", "steps"),
    by_trait(
        ("lva", [1, 6, 7], 9),
        ("cd", [1, 6, 7], 9),
        ("ef21", [1, 6, 7], 9),
        ("one_bit", [2, 8, 9], 12),  # before and after freeze_step, and twice in a row
    ),
    ids=str,
)
def test_an_overflow_under_a_scaler_skips_the_step_on_all(
    ranks_of: RanksOf, kind: str, bad: list[int], steps: int
) -> None:
    clean = ranks_of(2).run(history, MAKE[kind], {}, steps)
    spoiled = ranks_of(2).run(overflow, MAKE[kind], {}, steps + len(bad), bad)
    for values, expected in zip(spoiled, clean, strict=True):
        assert all(same(values[b], values[b - 1]) for b in bad)
        assert same(values[-1], expected[-1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, *rarely(torch.float32)], ids=str)
@pytest.mark.parametrize(
    ("kind", "options"),
    by_trait(
        ("lva", {}),
        *[("one_bit", {"freeze_step": step}) for step in (2, 5, 7)],
        # Interrupted after step 5: among variance steps, while synchronized, and between.
        ("zero_one", {"var_freeze_step": 8}),
        ("zero_one", {"var_freeze_step": 3}),
        ("zero_one", {"var_freeze_step": 2, "local_step_scaler": 1}),
        ("cd", {}),
        ("ef21", {}),
        ("ef21", GATHER),
        ("micro_4", {}),
        ("micro_4", GATHER),
        ("cocktail", {"momentum": 0.5}),
        ("demo", GATHER),
        ("dgc", {"warmup_steps": 24, **GATHER}),  # saved between two densities
        ("fetch", {"masking": True, "collective": "auto"}),
    ),
    ids=str,
)
def test_a_resumed_run_ends_as_one_that_was_not_interrupted(
    ranks_of: RanksOf, kind: str, options: dict[str, Any], dtype: torch.dtype
) -> None:
    assert all(ranks_of(2).run(resume, MAKE[kind], options, dtype))


def load_and_go_on(kinds: list[str]) -> list[str]:
    """Return the optimizers whose steps have changed a state that was loaded before them."""
    changed = []
    for kind in kinds:
        parameter = nn.Parameter(torch.ones(40, 50))
        optimizer = MAKE[kind]([parameter])
        state: dict[str, Any] = {}
        for step in range(4):
            if step == 2:
                state = copy.deepcopy(optimizer.state_dict())
                kept = copy.deepcopy(state)
                optimizer.load_state_dict(state)
            parameter.grad = torch.full_like(parameter, 1.0 + step)
            optimizer.step()
        for number, values in kept["state"].items():
            for name, value in values.items():
                if isinstance(value, torch.Tensor) and not torch.equal(
                    value, state["state"][number][name]
                ):
                    changed.append(f"{kind}: {name}")
    return changed


@pytest.mark.parametrize("kinds", [TRAITS, *rarely([*MAKE])], ids=len)
def test_a_state_may_be_loaded_again_and_again(ranks_of: RanksOf, kinds: list[str]) -> None:
    """Torch's own optimizers go on with the tensors that they are given."""
    assert ranks_of(2).run(load_and_go_on, kinds) == [[], []]


@pytest.mark.parametrize(
    ("kind", "exact"),
    by_trait(("cd", 0), ("ef21", 0), ("lva", 0), ("one_bit", 6)),
)
@pytest.mark.parametrize(
    ("collective", "compressed"),
    [("sharded", ["AllToAll", "AllGather"]), ("all_gather", ["AllGather"])],
)
def test_one_exchange_per_step(
    ranks_of: RanksOf, kind: str, exact: int, collective: str, compressed: list[str]
) -> None:
    options = {"collective": collective}
    for asked in ranks_of(2).run(collectives, MAKE[kind], options, exact + 3):
        assert asked == [["AllReduce"]] * exact + [compressed] * 3


def rest_a_group(kind: str) -> tuple[bool, bool]:
    """Return whether a parameter of learning rate zero stays, and whether all others move."""
    parameters = fresh()
    (first, resting), *others = parameters.items()
    optimizer = MAKE[kind]([{"params": [(first, resting)], "lr": 0.0}, {"params": others}])
    advance(optimizer, parameters, range(3))
    start = fresh()
    moved = [not torch.equal(p, start[name]) for name, p in others]
    return torch.equal(resting, start[first]), all(moved)


@pytest.mark.parametrize("kind", [*TRAITS, *rarely("cd", "cocktail", "demo", "dgc", "lamb")])
def test_groups_have_their_own_learning_rates(ranks_of: RanksOf, kind: str) -> None:
    assert ranks_of(2).run(rest_a_group, kind) == [(True, True)] * 2


def configure_differently(kind: str, option: str, values: list[Any]) -> None:
    parameter = nn.Parameter(torch.ones(4, 4))
    parameter.grad = torch.ones(4, 4)
    MAKE[kind]([parameter], **{option: values[dist.get_rank()]}).step()


@pytest.mark.parametrize(
    ("kind", "option", "values"),
    [
        ("cd", "bias_correction", [True, False]),
        ("one_bit", "freeze_step", [5, 6]),
        ("zero_one", "local_step_clipper", [4, 5]),
    ],
)
def test_ranks_that_are_configured_differently_fail_together(
    ranks_of: RanksOf, kind: str, option: str, values: list[Any]
) -> None:
    for outcome in ranks_of(2).outcomes(configure_differently, kind, option, values):
        assert isinstance(outcome.error, ConfigMismatchError)
        assert f"{option} is {values[0]} on rank 0, {values[1]} on rank 1" in str(outcome.error)


@pytest.mark.parametrize("kind", MAKE)
def test_sparse_gradients_are_refused(kind: str) -> None:
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    optimizer = MAKE[kind](table.parameters())
    with pytest.raises(ValueError, match="does not support sparse gradients"):
        optimizer.step()


FREEZE = {"freeze_step": 1}
REFUSED: list[tuple[type, dict[str, Any], str]] = [
    *(
        (kind, {"eps": NAN}, r"eps must lie in \[0, inf\)")
        for kind in (LocalVarianceAdam, OneBitAdam)
    ),
    *(
        (kind, {"betas": (0.9, 1.0)}, r"betas must lie in \[0, 1\)")
        for kind in (LocalVarianceAdam, OneBitAdam, ZeroOneAdam, CDAdam, MicroAdam)
    ),
    *(
        (kind, {"momentum": 1.0}, r"momentum must lie in \[0, 1\), got 1.0")
        for kind in (EF21, CocktailSGD, FetchSGD)
    ),
    *(
        (kind, {"freeze_step": bad}, f"{kind.__name__}: freeze_step must be an integer of at least")
        for kind in (OneBitAdam, OneBitLamb)
        for bad in (0, 2.5)
    ),
    *(
        (kind, {"freeze_step": 9, "total_steps": 9}, "freeze_step 9 leaves none of total_steps 9")
        for kind in (OneBitAdam, OneBitLamb)
    ),
    *(
        (kind, {"total_steps": bad}, "total_steps must be an integer of at least 1")
        for kind in (OneBitAdam, OneBitLamb)
        for bad in (0, 2.0)
    ),
    (OneBitLamb, {"max_coeff": 0.0}, r"OneBitLamb: max_coeff must lie in \(0, inf\)"),
    (OneBitLamb, {"min_coeff": 11.0}, r"min_coeff must lie in \[0, 10.0\], got 11.0"),
    (OneBitLamb, {"coeff_beta": 1.0}, r"coeff_beta must lie in \[0, 1\)"),
    (OneBitLamb, {"factor_max": 0.5}, r"factor_max must lie in \[1, inf\)"),
    (OneBitLamb, {"factor_min": NAN}, r"factor_min must lie in \[0, 1\]"),
    (OneBitLamb, {"factor_threshold": "a"}, r"factor_threshold must lie in \[0, 1\]"),
    *(
        (ZeroOneAdam, {name: bad}, f"{name} must be an integer of at least 1")
        for name, bad in zip(SCHEDULE, (0, 0, 1.5, True), strict=True)
    ),
    (MicroAdam, {"window": 0}, "window must be an integer of at least 1"),
    (MicroAdam, {"bias_correction": "all"}, "bias_correction must be one of window, published"),
    (MicroAdam, {"exchange": Exchange(SIGN, collective="sharded")}, "must have TopK with gran"),
    (
        MicroAdam,
        {"exchange": Exchange(TopK(), None, "all_gather", granularity="bucket")},
        "granularity 'bucket'",
    ),
    (MicroAdam, {"exchange": Exchange(TopK(), ErrorFeedback())}, "collective must be"),
    (
        MicroAdam,
        {"exchange": Exchange(TopK(), Differences(), "sharded")},
        "memory must be ErrorFeedback",
    ),
    (CocktailSGD, {"exchange": Exchange(TopK(), None)}, "drops elements for ever"),
    (CocktailSGD, {"exchange": Exchange(TopK(), Differences())}, "sends changes of gradients"),
    (DeMo, {"exchange": Exchange(TopK(), None)}, "the momentum is the exchange's residual"),
    (DeMo, {"exchange": Exchange(TopK(), MomentumCorrection())}, "not MomentumCorrection"),
    (DGC, {"warmup_steps": -1}, r"warmup_steps must lie in \[0, inf\)"),
    (DGC, {"warmup_steps": 2.0}, "warmup_steps must be an integer"),
    *((DGC, {"clip_norm": bad}, r"clip_norm must lie in \(0, inf\)") for bad in (0.0, NAN)),
    (DGC, {"exchange": Exchange(TopK())}, "memory must be MomentumCorrection"),
    (DGC, {"exchange": Exchange(TopK(), ErrorFeedback())}, "memory must be MomentumCorrection"),
    (DGC, {"exchange": Exchange(SIGN, MomentumCorrection())}, "must leave elements out"),
    (FetchSGD, {"density": 0.0}, "density must lie in"),
    (FetchSGD, {"rows": 0}, "rows must be an integer of at least 1"),
    (FetchSGD, {"rows": 1}, "a Count-Sketch of one row, whatever its ratio, cannot tell"),
    *(
        (FetchSGD, {"exchange": Exchange(compressor)}, "needs a linear sketch")
        for compressor in (TopK(), Identity(16), RandomK())
    ),
    (FetchSGD, {"exchange": Exchange(Identity(), ErrorFeedback())}, "use memory=None"),
    (FetchSGD, {"exchange": Exchange(SRHT()), "masking": True}, "would clear all of the sketch"),
    (
        CDAdam,
        {"exchange": Exchange(Sign(), ErrorFeedback())},
        r"CDAdam: the exchange's memory must be Differences\(\), got ErrorFeedback\(bits=32\): "
        r"write Exchange\(Sign\(block_size=4096, scale='mean'\), memory=Differences\(\)\)",
    ),
    (CDAdam, {"exchange": Exchange(SIGN, None)}, r"memory must be Differences\(\), got None"),
    (EF21, {"exchange": Exchange(SIGN, ErrorFeedback())}, r"EF21: .* must be Differences\(\)"),
    *((Marina, {"p": bad}, r"p must lie in \(0, 1\]") for bad in (0.0, NAN)),
    *(
        (Marina, {"exchange": Exchange(biased)}, "the compressor must be unbiased")
        for biased in (TopK(), Quantize(), RandomK(unbiased=False))
    ),
    (Marina, {"exchange": Exchange(Identity(), ErrorFeedback())}, "use memory=None"),
]
# What each is made with where a case says nothing.
USUAL: dict[type, tuple[Exchange, dict[str, Any]]] = {
    LocalVarianceAdam: (Exchange(SIGN), {}),
    OneBitAdam: (Exchange(SIGN), FREEZE),
    OneBitLamb: (Exchange(SIGN), FREEZE),
    ZeroOneAdam: (Exchange(SIGN), {"var_freeze_step": 1}),
    CDAdam: (Exchange(SIGN, Differences()), {}),
    EF21: (Exchange(SIGN, Differences()), {}),
    MicroAdam: (Exchange(TopK(), ErrorFeedback(), "sharded"), {}),
    CocktailSGD: (Exchange(TopK(), ErrorFeedback()), {"lr": 0.1}),
    DeMo: (Exchange(DCTTopK(), ErrorFeedback(decay=0.999)), {}),
    DGC: (Exchange(TopK(), MomentumCorrection()), {"lr": 0.1}),
    FetchSGD: (Exchange(CountSketch()), {"lr": 0.1, "density": 0.1}),
    Marina: (Exchange(Quantize(stochastic=True)), {"lr": 0.1, "p": 0.5}),
}


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [*REFUSED, *((kind, {"exchange": TopK()}, "exchange must be an Exchange") for kind in USUAL)],
    ids=str,
)
def test_what_cannot_work_is_refused(kind: type, options: dict[str, Any], message: str) -> None:
    exchange, others = USUAL[kind]
    with pytest.raises(ValueError, match=message):
        kind([nn.Parameter(torch.zeros(2))], **{"exchange": exchange, **others, **options})


@pytest.mark.parametrize("kind", USUAL)
@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"lr": -1.0}, r"lr must lie in \[0, inf\)"),
        ({"weight_decay": NAN}, r"weight_decay must lie in \[0, inf\)"),
        ({"maximize": True}, "a group has maximize=True, which .* does not have"),
    ],
)
def test_a_group_s_own_settings_are_checked(kind: type, own: Any, message: str) -> None:
    exchange, others = USUAL[kind]
    with pytest.raises(ValueError, match=message):
        kind([{"params": [nn.Parameter(torch.zeros(2))], **own}], exchange, **others)


@pytest.mark.parametrize("kind", USUAL)
@pytest.mark.parametrize("duplicate", [copy.deepcopy, *rarely(copy.copy, pickle.dumps)])
def test_copies_are_refused(kind: type, duplicate: Callable[[Any], Any]) -> None:
    exchange, others = USUAL[kind]
    optimizer = kind([nn.Parameter(torch.zeros(2))], exchange, **others)
    with pytest.raises(TypeError, match=r"cannot be copied or pickled: save state_dict\(\)"):
        duplicate(optimizer)


def test_a_control_without_compression_is_accepted() -> None:
    CocktailSGD([nn.Parameter(torch.zeros(2))], Exchange(Identity()), lr=0.1)


def test_random_elements_are_accepted() -> None:
    exchange = Exchange(RandomK(unbiased=False), MomentumCorrection())
    DGC([nn.Parameter(torch.zeros(2))], exchange, lr=0.1, warmup_steps=10)

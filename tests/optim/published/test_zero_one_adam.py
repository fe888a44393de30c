"""ZeroOneAdam against an independent NumPy reference, on real ranks."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from comm_hooks import (
    ErrorFeedback,
    Exchange,
    PayloadError,
    Sign,
)
from comm_hooks.optim.published.zero_one_adam import ZeroOneAdam
from tests.optim.catalog import HYPER, MAKE, SCHEDULE
from tests.optim.references import OPERATORS, Exact, Operator
from tests.optim.replicas import (
    SHAPES,
    Mean,
    advance,
    equal,
    fresh,
    gradient,
    snapshot,
    start,
)
from tests.optim.scenarios import RanksOf, Values, collectives, overflow, rarely, same

STEPS = 33
# What SCHEDULE comes to, by hand.  Variance: three steps 1 apart, three 2 apart.
VARIANCE = {1, 2, 3, 5, 7}
# After step 8: intervals of 1 in steps 1 to 4, of 2 in 5 to 8, of 4 from 9 on.
SYNCHRONIZED = {*range(1, 9), *(8 + since for since in (1, 2, 3, 4, 6, 8, 12, 16, 20, 24))}


def make(params: Any, operator: str = "sign", sharded: bool = True, **schedule: int) -> Any:
    collective = "sharded" if sharded else "all_gather"
    compressor = OPERATORS[operator][0]
    return MAKE["zero_one"](params, compressor=compressor, collective=collective, **schedule)


def rate(t: int) -> float:
    """A learning rate that changes from step to step, so that its sums are told from products."""
    return HYPER["lr"] * (1 + 0.5 * np.sin(t))


def train(operator: str, sharded: bool) -> list[Values]:
    """Return the parameters after each step."""
    parameters = fresh()
    optimizer = make(parameters.items(), operator, sharded)
    values = []
    for t in range(1, STEPS + 1):
        optimizer.param_groups[0]["lr"] = rate(t)
        advance(optimizer, parameters, [t - 1])
        values.append(copies(parameters))
    return values


def copies(parameters: dict[str, nn.Parameter]) -> Values:
    return {name: p.detach().numpy().copy() for name, p in parameters.items()}


def reference(compress: Operator, ranks: int, sharded: bool) -> list[Values]:
    """The docstring's algorithm, in float64 and without any of the library: each rank's x."""
    (beta1, beta2), decay = HYPER["betas"], HYPER["weight_decay"]
    everybody = range(ranks)
    results: list[Values] = [{} for _ in everybody]
    for name in SHAPES:
        x = [start(name).ravel() for _ in everybody]
        x_s, s = x[0], 0.0
        m, u = ([np.zeros_like(x_s) for _ in everybody] for _ in "mu")
        v = np.zeros_like(x_s)
        mean = Exact() if name == "bias" else Mean(compress, ranks, sharded=sharded)
        for t in range(1, STEPS + 1):
            g = [gradient(name, t - 1, rank).ravel() for rank in everybody]
            lr = rate(t)
            if t in VARIANCE:
                g = [np.mean(g, axis=0)] * ranks
                v = beta2 * v + (1 - beta2) * g[0] ** 2
            m = [beta1 * m_i + (1 - beta1) * g_i for m_i, g_i in zip(m, g, strict=True)]
            u = [u_i + lr * m_i for u_i, m_i in zip(u, m, strict=True)]
            s += lr
            x_s = x_s * (1 - lr * decay)
            if t in SYNCHRONIZED:
                together = m[0] if t in VARIANCE else mean([u_i / s for u_i in u])
                m = [together] * ranks
                u = [s * together] * ranks
            x = [x_s - u_i / (np.sqrt(v) + HYPER["eps"]) for u_i in u]
            if t in SYNCHRONIZED:
                x_s, s = x[0], 0.0
                u = [np.zeros_like(x_s)] * ranks
        for rank in everybody:
            results[rank][name] = x[rank].reshape(SHAPES[name])
    return results


@pytest.mark.parametrize("sharded", [True, *rarely(False)])
@pytest.mark.parametrize("operator", ["sign", *rarely("identity", "topk")])
def test_matches_the_reference(ranks_of: RanksOf, operator: str, sharded: bool) -> None:
    histories = ranks_of(2).run(train, operator, sharded)
    agree = {t for t in range(1, STEPS + 1) if same(histories[0][t - 1], histories[1][t - 1])}
    assert agree == SYNCHRONIZED, "replicas agree when synchronized, bit for bit, and only then"
    assert STEPS not in SYNCHRONIZED, "the last step is a local one"
    for values, expected in zip(
        histories, reference(OPERATORS[operator][1], 2, sharded), strict=True
    ):
        for name in SHAPES:
            # float32 steps of the order of 0.01; small v make larger ones
            np.testing.assert_allclose(values[-1][name], expected[name], rtol=2e-5, atol=1e-4)


def next_variance_steps(scaler: int) -> Iterator[int]:
    """The paper's rule: the j-th distance is 2^floor(j / kappa)."""
    t, j = 1, 0
    while True:
        yield t
        j += 1
        t += 2 ** (j // scaler)


@given(freeze=st.integers(1, 300), scaler=st.integers(1, 40))
def test_variance_steps_are_the_papers(freeze: int, scaler: int) -> None:
    optimizer = bare(var_freeze_step=freeze, var_update_scaler=scaler)
    steps = next_variance_steps(scaler)
    expected = set()
    while (t := next(steps)) <= freeze:
        expected.add(t)
    assert {t for t in range(1, 2 * freeze + 1) if optimizer.is_variance_step(t)} == expected


@given(freeze=st.integers(1, 20), scaler=st.integers(1, 50), clipper=st.integers(1, 40))
def test_intervals_double_up_to_the_clipper(freeze: int, scaler: int, clipper: int) -> None:
    optimizer = bare(var_freeze_step=freeze, local_step_scaler=scaler, local_step_clipper=clipper)
    interval, expected = 1.0, [1.0] * freeze
    while len(expected) < freeze + 8 * scaler:
        expected += [min(interval, clipper)] * scaler
        interval *= 2
    actual = [optimizer.synchronization_interval(t + 1) for t in range(len(expected))]
    assert actual == expected


def bare(**schedule: int) -> ZeroOneAdam:
    return ZeroOneAdam([nn.Parameter(torch.zeros(2))], Exchange(Sign()), **SCHEDULE | schedule)


def test_far_steps_cost_no_more_than_near_ones() -> None:
    optimizer = bare(var_freeze_step=1, local_step_scaler=1, local_step_clipper=3)
    assert optimizer.synchronization_interval(10**15) == 3


def test_only_synchronization_steps_communicate(ranks_of: RanksOf) -> None:
    kinds = {True: ["AllReduce"], False: ["AllToAll", "AllGather"]}
    expected = [kinds[t in VARIANCE] if t in SYNCHRONIZED else [] for t in range(1, STEPS + 1)]
    assert ranks_of(2).run(collectives, make, {}, STEPS) == [expected] * 2


def synchronize_off_schedule() -> list[tuple[bool, Values]]:
    parameters = fresh()
    optimizer = make(parameters.items(), "identity")
    advance(optimizer, parameters, range(18))  # steps 17 and 18 are local
    seen = [(optimizer.is_synchronized, copies(parameters))]
    for _ in range(2):
        optimizer.synchronize()
        seen.append((optimizer.is_synchronized, copies(parameters)))
    advance(optimizer, parameters, range(18, 22))  # an interval of 4 from there
    return [*seen, (optimizer.is_synchronized, copies(parameters))]


def test_synchronize(ranks_of: RanksOf) -> None:
    apart, together, again, later = zip(*ranks_of(2).run(synchronize_off_schedule), strict=True)
    assert [is_synchronized for is_synchronized, _ in apart] == [False] * 2
    assert not same(apart[0][1], apart[1][1])
    for (first, values), (second, others) in (together, again, later):
        assert first
        assert second
        assert same(values, others)
    assert same(together[0][1], again[0][1]), "there was nothing left to synchronize"
    for name in SHAPES:
        mean = (apart[0][1][name] + apart[1][1][name]) / 2
        np.testing.assert_allclose(together[0][1][name], mean, rtol=1e-6, atol=1e-6)


def rest(operator: str, resting: set[int]) -> tuple[bool, float]:
    """Return whether x stays where the rate is zero, and its largest step after all that."""
    parameters = fresh()
    optimizer = make(parameters.items(), operator)
    values = [copies(parameters)]
    for t in range(1, 29):
        optimizer.param_groups[0]["lr"] = 0.0 if t in resting else HYPER["lr"]
        advance(optimizer, parameters, [t - 1])
        values.append(copies(parameters))
    still = all(same(values[t], values[t - 1]) for t in resting)
    steps = [
        np.abs(values[t][name] - values[t - 1][name]).max()
        for t in range(21, 29)
        for name in SHAPES
    ]
    return still, float(max(steps))


@pytest.mark.parametrize("operator", ["sign", *rarely("identity")])
def test_a_learning_rate_of_zero_moves_nothing_and_spoils_nothing(
    ranks_of: RanksOf, operator: str
) -> None:
    # At variance steps, at a synchronization step, and from one such step to the next.
    resting = {1, 2, 6, 17, 18, 19, 20}
    usual = ranks_of(2).run(rest, operator, set())
    for (still, step), (_, usual_step) in zip(
        ranks_of(2).run(rest, operator, resting), usual, strict=True
    ):
        assert still
        assert step < 2 * usual_step


def meet_nan_between_synchronizations(poison: float) -> tuple[list[bool], Values, Values]:
    """Return when this rank was synchronized, x after the bad step and after the next exchange."""
    parameters = fresh()
    optimizer = make(parameters.items())
    advance(optimizer, parameters, range(16))
    for name, parameter in parameters.items():
        own = gradient(name, 16, dist.get_rank())
        if dist.get_rank() == 1:
            own = own * 0 if poison == 0 else own
            own.flat[0] = poison
        parameter.grad = torch.from_numpy(own).float()
    optimizer.step()
    local = copies(parameters)
    synchronized = [optimizer.is_synchronized]
    for step in range(17, 20):
        advance(optimizer, parameters, [step])
        synchronized.append(optimizer.is_synchronized)
    return synchronized, local, copies(parameters)


def test_a_local_gradient_that_is_not_finite_counts_as_zero(ranks_of: RanksOf) -> None:
    zero = ranks_of(2).run(meet_nan_between_synchronizations, 0.0)
    for poison in (float("nan"), float("-inf")):
        bad = ranks_of(2).run(meet_nan_between_synchronizations, poison)
        for rank in range(2):
            assert bad[rank][0] == [False, False, False, True], "the schedule stays"
            assert same(bad[rank][1], zero[rank][1])
            assert same(bad[rank][2], zero[rank][2])
        assert same(bad[0][2], bad[1][2])


def test_overflows_under_a_scaler_leave_replicas_synchronized(ranks_of: RanksOf) -> None:
    bad = [3, 9, 16]  # at a synchronization step twice, then at a local one
    histories = ranks_of(2).run(overflow, make, {"var_freeze_step": 8}, 25, bad)
    for spoiled in histories:
        assert all(same(spoiled[b], spoiled[b - 1]) for b in bad[:2])
        assert all(np.isfinite(values[name]).all() for values in spoiled for name in values)
    moments = {b + 1 for b in range(25) if same(histories[0][b], histories[1][b])}
    # Two steps were skipped by all, the third by nobody else.
    assert moments == {*range(1, 15), 16, 18, 22}


def state_after_a_change_of_schedule() -> Any:
    parameters = fresh()
    optimizer = make(parameters.items(), var_freeze_step=2, local_step_scaler=1)
    advance(optimizer, parameters, range(5))
    longer = make(parameters.items(), var_freeze_step=100, var_update_scaler=100)
    longer.load_state_dict(optimizer.state_dict())
    assert not longer.is_synchronized
    assert longer.is_variance_step(6)
    advance(longer, parameters, range(5, 8))
    state = snapshot(longer, parameters)
    return state[:2]


def test_a_schedule_that_changes_between_synchronizations(ranks_of: RanksOf) -> None:
    states = ranks_of(2).run(state_after_a_change_of_schedule)
    assert equal(states[0], states[1])


def drift() -> None:
    """Take steps of which every other one is local; rank 1 changes a parameter in between."""
    parameters = fresh()
    exchange = Exchange(Sign(), ErrorFeedback(), "sharded", verify_every=1)
    schedule = {"var_freeze_step": 1, "local_step_scaler": 1, "local_step_clipper": 2}
    optimizer = ZeroOneAdam(parameters.items(), exchange, **schedule)
    for step in range(12):
        if step > 6 and optimizer.is_synchronized and dist.get_rank() == 1:
            with torch.no_grad():
                parameters["bias"] += 1
        advance(optimizer, parameters, [step])


def test_ranks_that_drift_apart_are_told_although_none_exchanges_after_an_exchange(
    ranks_of: RanksOf,
) -> None:
    for outcome in ranks_of(2).outcomes(drift):
        assert isinstance(outcome.error, PayloadError)
        assert "the parameters of rank 1 are not those of rank 0" in str(outcome.error)


def synchronize_instead(sharded: bool) -> None:
    """Synchronize on rank 1, off schedule, where rank 0 goes on to its next scheduled exchange."""
    parameters = fresh()
    optimizer = make(parameters.items(), sharded=sharded, var_freeze_step=1, local_step_scaler=1)
    while optimizer.is_synchronized:
        advance(optimizer, parameters, [0])
    if dist.get_rank() == 1:
        optimizer.synchronize()
    advance(optimizer, parameters, range(4))


@pytest.mark.parametrize("sharded", [True, *rarely(False)])
def test_a_rank_that_synchronizes_where_another_takes_a_step_is_told(
    ranks_of: RanksOf, sharded: bool
) -> None:
    for outcome in ranks_of(2).outcomes(synchronize_instead, sharded):
        assert isinstance(outcome.error, PayloadError)
        assert "the optimizer of rank 1 has other hyperparameters" in str(outcome.error)

"""OneBitLamb against an independent NumPy reference, on real ranks."""

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from comm_hooks import ErrorFeedback, Exchange, Identity, Sign
from comm_hooks.optim import OneBitLamb
from tests.optim.references import PublishedMean
from tests.optim.replicas import (
    MIN_NUMEL,
    SHAPES,
    advance,
    equal,
    fresh,
    gradient,
    resume,
    snapshot,
    start,
)
from tests.optim.scenarios import RanksOf, Values, history, rarely, same

STEPS, FREEZE = 30, 12
HYPER = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
PUBLISHED = Sign(block_size=None, scale="rms")
# In the order in which an exchange keeps them: by length, as parameters come.
COMPRESSED = ("weight", "third", "other")


def make(params: Any, exact: bool = False, **options: Any) -> OneBitLamb:
    exchange = Exchange(
        Identity() if exact else PUBLISHED,
        None if exact else ErrorFeedback(),
        "all_gather" if exact else "sharded",
        min_numel=MIN_NUMEL,
        granularity="bucket",
    )
    return OneBitLamb(params, exchange, **{"freeze_step": FREEZE, **HYPER, **options})


def together(mean: PublishedMean | None, messages: dict[str, list[np.ndarray]]) -> Values:
    """Return the mean of each, those that are compressed as one vector through ``mean``.

    An owner's chunk has its share of every parameter.
    """
    result = {name: np.mean(vectors, axis=0) for name, vectors in messages.items()}
    if mean:
        compressed = [messages[name] for name in COMPRESSED]
        vectors = [
            np.concatenate([np.split(part, mean.ranks)[owner] for owner, part in every])
            for every in (
                [(owner, part) for owner in range(mean.ranks) for part in parts]
                for parts in zip(*compressed, strict=True)
            )
        ]
        chunks = np.split(mean(vectors), mean.ranks)
        ends = np.cumsum([vectors[0].size // mean.ranks for vectors in compressed])[:-1]
        pieces = zip(*(np.split(chunk, ends) for chunk in chunks), strict=True)
        result.update(zip(COMPRESSED, map(np.concatenate, pieces), strict=True))
    return result


def reference(
    ranks: int, steps: int, mean: PublishedMean | None, weight_decay: float = 0.1
) -> list[Values]:
    """The docstring's algorithm, in float64 and without any of the library."""
    lr, (beta1, beta2), eps = HYPER["lr"], HYPER["betas"], HYPER["eps"]
    x = {name: start(name).ravel() for name in SHAPES}
    m, v = ({name: np.zeros_like(x[name]) for name in SHAPES} for _ in range(2))
    average, last = dict.fromkeys(SHAPES, 0.0), dict.fromkeys(SHAPES, 1.0)
    norm = np.linalg.norm
    ends = []
    for step in range(steps):
        gs = {n: [gradient(n, step, rank).ravel() for rank in range(ranks)] for n in SHAPES}
        if step < FREEZE:
            for name in SHAPES:
                g = np.mean(gs[name], axis=0)
                m[name] = beta1 * m[name] + (1 - beta1) * g
                v[name] = beta2 * v[name] + (1 - beta2) * g**2
                u = m[name] / (np.sqrt(v[name]) + eps) + weight_decay * x[name]
                ratio = np.clip(norm(x[name]) / norm(u), 0.01, 10.0)
                average[name] = 0.9 * average[name] + 0.1 * ratio
                x[name] = x[name] - lr * ratio * u
        else:
            if step == FREEZE:
                fresh_v = {name: v[name].copy() for name in SHAPES}
                rms = {name: norm(m[name]) / np.sqrt(m[name].size) for name in SHAPES}
                scale = {name: np.mean(list(rms.values())) / rms[name] for name in SHAPES}
            messages = {
                n: [scale[n] * (beta1 * m[n] + (1 - beta1) * g) for g in gs[n]] for n in SHAPES
            }
            means = together(mean, messages)
            for name in SHAPES:
                new = means[name] / scale[name]
                g = (new - beta1 * m[name]) / (1 - beta1)
                m[name] = new
                fresh_v[name] = beta2 * fresh_v[name] + (1 - beta2) * g**2
                adam = m[name] / (np.sqrt(v[name]) + eps)
                u = adam + weight_decay * x[name]
                factor = np.max((np.sqrt(v[name]) + eps) / (np.sqrt(fresh_v[name]) + eps))
                if weight_decay:
                    share = min(1.0, norm(adam) / norm(u))
                    factor = factor * share + 1 - share
                factor = np.clip(factor, 0.5, 4.0)
                last[name] = np.clip(factor, 0.9 * last[name], 1.1 * last[name])
                x[name] = x[name] - lr * average[name] * last[name] * u
        ends.append({name: x[name].reshape(SHAPES[name]) for name in SHAPES})
    return ends


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_matches_the_reference(ranks_of: RanksOf, weight_decay: float) -> None:
    options = {"exact": True, "weight_decay": weight_decay}
    histories = ranks_of(2).run(history, make, options, STEPS)
    for replica, other in zip(*histories, strict=True):
        assert same(replica, other), "replicas must not drift"
    expected = reference(2, STEPS, None, weight_decay)
    for ours, theirs in zip(histories[0], expected, strict=True):
        for name in SHAPES:
            np.testing.assert_allclose(ours[name], theirs[name], rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_matches_the_published_exchange(ranks_of: RanksOf, ranks: int) -> None:
    """One vector of all momenta, one scale from each rank, and one for each shard back."""
    # Later the sign of a sum that is nearly zero is another one in float64.
    steps = FREEZE + 6
    histories = ranks_of(ranks).run(history, make, {}, steps)
    assert all(same(histories[0][-1], other[-1]) for other in histories)
    expected = reference(ranks, steps, PublishedMean(np.sign, ranks, sharded=True))
    exact = reference(ranks, steps, None)
    for name in SHAPES:
        ours, theirs = histories[0][-1][name], expected[-1][name]
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)
        # The test sees compression: without it the end is another one.
        if name in COMPRESSED:
            assert np.abs(theirs - exact[-1][name]).max() > 1e-2


@pytest.mark.parametrize("freeze_step", [2, *rarely(50)])
def test_resumes_on_both_sides_of_the_freeze(ranks_of: RanksOf, freeze_step: int) -> None:
    assert all(ranks_of(2).run(resume, make, {"freeze_step": freeze_step}, torch.float32))


def late_and_zero() -> list[float]:
    """Return how far parameters move: one without gradients in the warm-up, one that is zero."""
    late, zero, other = (nn.Parameter(torch.full((4, 64), x)) for x in (1.0, 0.0, 1.0))
    named = [("late", late), ("zero", zero), ("other", other)]
    optimizer = make(named, freeze_step=2, weight_decay=0.0)
    for step in range(12):
        late.grad = torch.full((4, 64), float(step > 5))
        zero.grad = other.grad = torch.ones(4, 64)
        optimizer.step()
    return [
        float((p.detach() - x).abs().max()) for p, x in ((late, 1.0), (zero, 0.0), (other, 1.0))
    ]


def test_parameters_without_gradients_or_values_do_no_harm(ranks_of: RanksOf) -> None:
    for late, zero, other in ranks_of(2).run(late_and_zero):
        assert late == 0
        assert np.isfinite(zero)
        assert 1e-3 < other < 1


def skipped_at_the_freeze() -> tuple[bool, bool]:
    """Return whether a first compressed step that fails leaves all as it was, and the next not."""
    parameters = fresh()
    optimizer = make(parameters.items(), freeze_step=3)
    advance(optimizer, parameters, range(3))
    before = snapshot(optimizer, parameters)[:2]
    for name, parameter in parameters.items():
        parameter.grad = torch.from_numpy(gradient(name, 3, dist.get_rank())).float()
    if dist.get_rank() == 1:
        parameters["weight"].grad = torch.full(SHAPES["weight"], float("nan"))
    optimizer.step()
    skipped = equal(before, snapshot(optimizer, parameters)[:2])
    advance(optimizer, parameters, [3])
    return skipped, equal(before, snapshot(optimizer, parameters)[:2])


def test_a_skipped_first_compressed_step_changes_nothing(ranks_of: RanksOf) -> None:
    assert ranks_of(2).run(skipped_at_the_freeze) == [(True, False)] * 2

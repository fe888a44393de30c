"""Marina against NumPy on least squares, whose gradients change with the parameters."""

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from comm_hooks import (
    CountSketch,
    Exchange,
    PermK,
    RandomK,
    skip_hook,
)
from comm_hooks.compressors import Compressor
from comm_hooks.optim.published.marina import COIN, Marina
from comm_hooks.randomness import derive_key, random_unit
from tests.optim.references import check
from tests.optim.replicas import equal, snapshot
from tests.optim.scenarios import RanksOf, rarely

STEPS, SEED, INPUTS, OUTPUTS, BATCH = 30, 5, 12, 8, 6
HYPER = {"lr": 0.05, "weight_decay": 0.1}
NAMES = ("weight", "bias")


def start() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.normal(size=(OUTPUTS, INPUTS)), rng.normal(size=OUTPUTS)


def minibatch(step: int, rank: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng([step, rank])
    return rng.normal(size=(BATCH, INPUTS)), rng.normal(size=(BATCH, OUTPUTS))


class Problem:
    """One rank's model, optimizer and closure."""

    def __init__(self, compressor: Compressor, p: float, shared_data: bool = False) -> None:
        self.model = nn.Linear(INPUTS, OUTPUTS)
        for parameter, values in zip(self.model.parameters(), start(), strict=True):
            parameter.data = torch.from_numpy(values).float()
        # The reference draws for each parameter.
        exchange = Exchange(compressor, seed=SEED, min_numel=16, granularity="parameter")
        self.optimizer = Marina(self.model.named_parameters(), exchange, p=p, **HYPER)
        self.shared_data = shared_data
        self.calls = 0

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())

    def closure(self, step: int, poisoned_calls: tuple[int, ...] = ()) -> Callable[[], Any]:
        rank = 0 if self.shared_data else dist.get_rank()
        inputs, targets = (torch.from_numpy(v).float() for v in minibatch(step, rank))
        self.calls = 0

        def closure() -> torch.Tensor:
            self.calls += 1
            self.optimizer.zero_grad()
            loss = (self.model(inputs) - targets).square().sum() / (2 * BATCH)
            if self.calls in poisoned_calls:
                loss = loss * float("nan")
            loss.backward()
            return loss.detach()

        return closure

    def train(self, steps: range) -> None:
        for step in steps:
            self.optimizer.step(self.closure(step))

    def result(self) -> dict[str, np.ndarray]:
        return {name: p.detach().numpy().copy() for name, p in self.parameters.items()}


def train(compressor: Compressor, p: float) -> dict[str, np.ndarray]:
    problem = Problem(compressor, p)
    problem.train(range(STEPS))
    return problem.result()


def gradients(x: list[np.ndarray], step: int, rank: int) -> list[np.ndarray]:
    inputs, targets = minibatch(step, rank)
    residual = inputs @ x[0].T + x[1] - targets
    return [residual.T @ inputs / BATCH, residual.sum(axis=0) / BATCH]


def mean(lists: list[list[np.ndarray]]) -> list[np.ndarray]:
    return [np.mean(arrays, axis=0) for arrays in zip(*lists, strict=True)]


def reference(compressor: Compressor, p: float, ranks: int) -> tuple[dict[str, np.ndarray], int]:
    """The docstring's algorithm, in float64, and the number of steps whose coin was 0."""

    def sent(difference: list[np.ndarray], step: int, rank: int) -> list[np.ndarray]:
        setting = {"key": derive_key(SEED, step, "weight"), "rank": rank, "world_size": ranks}
        weight = torch.from_numpy(difference[0].ravel())
        payload = compressor.compress(weight, **setting)
        decoded = compressor.decompress(payload, weight.numel(), **setting)
        return [decoded.double().numpy().reshape(difference[0].shape), difference[1]]

    x = list(start())
    g = mean([gradients(x, 0, rank) for rank in range(ranks)])
    compressed = 0
    for step in range(1, STEPS):
        shrink = 1 - HYPER["lr"] * HYPER["weight_decay"]
        new = [shrink * v - HYPER["lr"] * w for v, w in zip(x, g, strict=True)]
        if random_unit([derive_key(SEED, step, COIN)], 1)[0, 0] < p:
            g = mean([gradients(new, step, rank) for rank in range(ranks)])
        else:
            compressed += 1
            changes = []
            for rank in range(ranks):
                pairs = zip(gradients(new, step, rank), gradients(x, step, rank), strict=True)
                changes.append(sent([a - b for a, b in pairs], step, rank))
            g = [v + w for v, w in zip(g, mean(changes), strict=True)]
        x = new
    return dict(zip(NAMES, x, strict=True)), compressed


@pytest.mark.parametrize("p", [0.4, *rarely(0.05)])
@pytest.mark.parametrize("compressor", [PermK(), *rarely(RandomK(0.5), CountSketch(0.5))], ids=str)
def test_matches_the_reference(ranks_of: RanksOf, compressor: Compressor, p: float) -> None:
    replicas = ranks_of(2).run(train, compressor, p)
    expected, compressed = reference(compressor, p, ranks=2)
    assert STEPS * (1 - p) * 0.6 < compressed < STEPS - 1
    check(replicas, expected, atol=2e-5)


def poisoned_steps(poisoned_calls: tuple[int, ...], p: float) -> tuple[bool, bool, float, int]:
    problem = Problem(PermK(), p)
    problem.train(range(4))
    before = snapshot(problem.optimizer, problem.parameters)
    poison = poisoned_calls if dist.get_rank() == 1 else ()
    problem.optimizer.step(problem.closure(4, poison))
    calls = problem.calls
    unchanged = equal(before, snapshot(problem.optimizer, problem.parameters))
    problem.train(range(5, 8))
    moved = not torch.equal(before[0]["weight"], problem.model.weight)
    total = float(sum(p.double().sum() for p in problem.model.parameters()))
    return unchanged, moved, total, calls


@pytest.mark.parametrize(("poisoned", "p"), [((1,), 1e-6), ((2,), 1e-6), ((1,), 1.0)])
def test_a_bad_gradient_on_one_rank_skips_the_step_on_all(
    ranks_of: RanksOf, poisoned: tuple[int, ...], p: float
) -> None:
    outcomes = ranks_of(2).run(poisoned_steps, poisoned, p)
    unchanged, moved, total, calls = outcomes[0]
    assert unchanged
    assert moved
    assert calls == (1 if p == 1 else 2)
    assert outcomes[0] == outcomes[1]
    assert np.isfinite(total)


def bad_start() -> tuple[bool, bool]:
    problem = Problem(PermK(), 1e-6)
    problem.optimizer.step(problem.closure(0, (1,) if dist.get_rank() else ()))
    estimate = problem.optimizer.state[problem.model.weight]["estimate"]
    still = not estimate.any() and torch.equal(
        problem.model.weight, torch.from_numpy(start()[0]).float()
    )
    problem.optimizer.step(problem.closure(1))
    x = list(start())
    expected = mean([gradients(x, 1, rank) for rank in range(2)])[0]
    return bool(still), np.allclose(estimate, expected, atol=1e-5)


def test_a_bad_first_gradient_leaves_the_next_step_to_be_the_first(ranks_of: RanksOf) -> None:
    assert ranks_of(2).run(bad_start) == [(True, True)] * 2


def resume() -> bool:
    problem = Problem(RandomK(0.5), 0.3)
    problem.train(range(8))
    file = io.BytesIO()
    optimizer = problem.optimizer
    state = [problem.model.state_dict(), optimizer.state_dict(), optimizer.exchange.state_dict()]
    torch.save(state, file)
    problem.train(range(8, 16))
    file.seek(0)
    model, of_optimizer, of_exchange = torch.load(file, weights_only=True)
    again = Problem(RandomK(0.5), 0.3)
    again.model.load_state_dict(model)
    again.optimizer.load_state_dict(of_optimizer)
    again.optimizer.exchange.load_state_dict(of_exchange)
    again.train(range(8, 16))
    return equal(
        snapshot(problem.optimizer, problem.parameters), snapshot(again.optimizer, again.parameters)
    )


def test_a_resumed_run_ends_as_one_that_was_not_interrupted(ranks_of: RanksOf) -> None:
    assert all(ranks_of(2).run(resume))


def draws() -> tuple[list[list[float]], list[float]]:
    """Return the numbers that closures draw in each step, and those that one call each draws."""
    problem = Problem(PermK(), 1e-6)
    torch.manual_seed(7)
    seen = []
    for step in range(3):
        inner, here = problem.closure(step), []

        def closure(inner: Any = inner, here: list[float] = here) -> Any:
            here.append(float(torch.rand(())))
            return inner()

        problem.optimizer.step(closure)
        seen.append(here)
    torch.manual_seed(7)
    return seen, [float(torch.rand(())) for _ in range(3)]


def test_both_evaluations_draw_the_same_numbers(ranks_of: RanksOf) -> None:
    for seen, numbers in ranks_of(2).run(draws):
        assert seen == [[numbers[0]], [numbers[1]] * 2, [numbers[2]] * 2]


def closures_that_fail() -> list[str]:
    problem = Problem(PermK(), 1e-6)
    problem.train(range(3))
    before = snapshot(problem.optimizer, problem.parameters)
    inner = problem.closure(3)

    def returns_nothing() -> Any:
        inner()

    def fails_at_the_new_point() -> Any:
        loss = inner()
        if problem.calls % 2 == 0:
            raise ArithmeticError("at the new point")
        return loss

    messages = []
    for closure in (None, returns_nothing, fails_at_the_new_point):
        problem.calls = 0
        with pytest.raises((ValueError, ArithmeticError)) as refused:
            problem.optimizer.step(closure)
        assert equal(before, snapshot(problem.optimizer, problem.parameters))
        assert problem.optimizer.exchange.step == 3
        messages.append(str(refused.value))
    return messages


def test_closures_that_fail_leave_everything_as_it_was(ranks_of: RanksOf) -> None:
    for missing, nothing, failed in ranks_of(2).run(closures_that_fail):
        assert "needs a closure" in missing
        assert "the closure returned None" in nothing
        assert failed == "at the new point"


def accumulate_by_mistake() -> bool:
    """A closure that forgets to zero the gradients, on a model under DDP; return if it matters."""
    results = []
    for zeroes in (True, False):
        torch.manual_seed(0)
        ddp = DistributedDataParallel(nn.Linear(INPUTS, OUTPUTS))
        ddp.register_comm_hook(None, skip_hook)
        exchange = Exchange(PermK(), min_numel=16)
        optimizer = Marina(ddp.named_parameters(), exchange, lr=0.1, p=0.5)
        inputs = torch.from_numpy(minibatch(0, dist.get_rank())[0]).float()

        def closure(ddp: Any = ddp, optimizer: Any = optimizer, zeroes: bool = zeroes) -> Any:
            if zeroes:
                optimizer.zero_grad()
            loss = ddp(inputs).square().mean()  # noqa: B023
            loss.backward()
            return loss

        losses = [float(optimizer.step(closure)) for _ in range(6)]
        assert losses[-1] < losses[0]
        results.append([p.detach().clone() for p in ddp.parameters()])
    return all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_gradients_do_not_pile_up(ranks_of: RanksOf) -> None:
    assert all(ranks_of(2).run(accumulate_by_mistake))

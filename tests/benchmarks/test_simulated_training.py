"""Training of several ranks in one process, against loops of their own."""

import copy
import itertools
import math
import statistics
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from benchmarks.lab.methods import parse_method
from benchmarks.lab.outcomes import Diverged
from benchmarks.lab.runs import Point, Settings
from benchmarks.lab.schedules import constant, cosine
from benchmarks.lab.simulated import FlatModel, train, train_as_one
from benchmarks.lab.tasks import Task, build_task
from benchmarks.lab.training import Client, NamedParameters, Plan, batch_generator, new_model
from benchmarks.quality.runs import CLIP_NORM
from comm_hooks.collectives import Transport
from comm_hooks.wire.summed_header import summed_header_nbytes
from tests.benchmarks.studying import digits, nothing


class Gated(nn.Module):
    """Parameters of several shapes, one of them shared, and a mode that matters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.again = self.first
        self.drop = nn.Dropout(p=1.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.again(self.norm(self.first(x))))


def test_a_flat_model_is_the_module_in_one_parameter() -> None:
    torch.manual_seed(0)
    module = Gated()
    flat = FlatModel(copy.deepcopy(module))
    (parameter,) = flat.parameters()
    assert parameter.shape == (1, 4 * 4 + 4 + 4 + 4)
    inputs = torch.randn(3, 4)
    flat.eval()
    module.eval()
    outputs = flat(inputs)
    assert torch.equal(outputs, module(inputs))
    outputs.square().sum().backward()
    module(inputs).square().sum().backward()
    expected = torch.cat([p.grad.flatten() for p in module.parameters() if p.grad is not None])
    assert parameter.grad is not None
    assert torch.equal(parameter.grad[0], expected)
    assert flat.train()(inputs).count_nonzero() == 0


def run(task: Task, method: str, plan: Plan, lr: float, seed: int = 0) -> list[Point]:
    """Train with a method of ``python -m benchmarks.compare``, all ranks in this process."""
    settings = Settings(nproc=len(task.clients), steps=plan.rounds, learning_rate=lr)

    def build(named: NamedParameters, transport: Transport) -> Client:
        return parse_method(method).attach(named, settings, transport, CLIP_NORM)

    return train(task, build, plan, seed, nothing)


def test_all_reduce_equals_adamw_on_the_mean_gradient() -> None:
    """A loop of its own, one model, clients one after the other."""
    task = digits(2)
    plan = Plan(rounds=6, local_steps=1, batch=8, points=3, schedule=cosine)
    curve = run(task, "all_reduce", plan, lr=0.01, seed=3)

    model = new_model(task, 3, "cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.1)
    batches = [c.batches(8, batch_generator(3, i)) for i, c in enumerate(task.clients)]
    expected = []
    for step in range(6):
        optimizer.param_groups[0]["lr"] = 0.01 * cosine(step / 6)
        optimizer.zero_grad()
        for own in batches:
            (task.loss(model, next(own)) / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        if step % 2:
            expected.append(task.evaluate(model))
    assert [point.round for point in curve] == [2, 4, 6]
    for point, figures in zip(curve, expected, strict=True):
        assert point.loss == pytest.approx(figures["loss"], rel=1e-4)
        assert point.error == pytest.approx(figures["error"], abs=0.006)
    # A ring of two sends the gradient once, and a header.
    numel = sum(p.numel() for p in model.parameters())
    padded = -(-(4 * numel + summed_header_nbytes(2)) // 8) * 8
    assert curve[-1].bytes_sent == 6 * padded


def test_without_communication_the_mean_over_clients_is_judged() -> None:
    task = digits(3, partition="classes", classes_per_client=4)
    plan = Plan(rounds=4, local_steps=1, batch=8, points=1, schedule=constant)
    (point,) = run(task, "none", plan, lr=0.01)
    losses = []
    for index, client in enumerate(task.clients):
        model = new_model(task, 0, "cpu")
        optimizer = torch.optim.AdamW(
            model.parameters(), lr=0.01, betas=(0.9, 0.95), weight_decay=0.1
        )
        for batch in itertools.islice(client.batches(8, batch_generator(0, index)), 4):
            optimizer.zero_grad()
            task.loss(model, batch).backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
            optimizer.step()
        losses.append(task.evaluate(model)["loss"])
    assert point.loss == pytest.approx(statistics.mean(losses), rel=1e-5)
    assert point.bytes_sent == 0


@pytest.mark.parametrize(("steps", "local_steps", "fragments"), [(6, 3, 1), (7, 3, 1), (6, 3, 2)])
def test_every_step_is_in_the_model_at_the_end(
    steps: int, local_steps: int, fragments: int
) -> None:
    """With exact deltas what has been exchanged is the mean of the clients' models."""
    task = digits(2)
    plan = Plan(steps, 1, 8, points=1, schedule=constant)
    method = f"identity+local_adamw:local_steps={local_steps}:fragments={fragments}"
    (point,) = run(task, method, plan, lr=0.01)
    numel = sum(p.numel() for p in new_model(task, 0, "cpu").parameters())
    # What of the model is exchanged a third time in 6 steps is the second of two fragments, a
    # seventh, which are due after steps 3 and 6, and 1 and 4.
    expected = math.ceil(steps / local_steps) + (2210 / numel if fragments == 2 else 0)
    assert point.bytes_sent / (4 * numel) == pytest.approx(expected, rel=5e-3)


@given(rounds=st.integers(1, 300), points=st.integers(1, 300))
def test_points_are_spread_evenly_and_end_at_the_end(rounds: int, points: int) -> None:
    points = min(points, rounds)
    plan = Plan(rounds, 1, 1, points, constant)
    due = [r for r in range(1, rounds + 1) if plan.is_due(r)]
    assert len(due) == points
    assert due[-1] == rounds
    gaps = [after - before for before, after in itertools.pairwise([0, *due])]
    assert max(gaps) - min(gaps) <= 1


def test_what_is_not_finite_is_told_with_the_points_before() -> None:
    plan = Plan(rounds=12, local_steps=1, batch=8, points=12, schedule=constant)
    with pytest.raises(Diverged) as diverged:
        run(digits(2), "all_reduce", plan, lr=1e30)
    assert len(diverged.value.args) < 12
    assert all(math.isfinite(point.loss) for point in diverged.value.args)


def test_ranks_with_exact_means_are_one_model_on_the_batches_of_all() -> None:
    task = build_task("digits", clients=3, seed=0)
    plan = Plan(6, 1, 8, 2, constant)

    def build(parameters: NamedParameters, transport: Transport) -> Client:
        return parse_method("all_reduce").attach(
            parameters, Settings(nproc=3, learning_rate=1e-2), transport, 1.0
        )

    ranks = train(task, build, plan, 1, nothing)
    one = train_as_one(task, build, plan, 1, nothing, sent=ranks[-1].bytes_sent / 6)
    alone = train(replace(task, clients=task.clients[:1]), build, plan, 1, nothing)
    assert [(p.round, p.bytes_sent) for p in one] == [(p.round, p.bytes_sent) for p in ranks]
    assert [p.loss for p in one] == pytest.approx([p.loss for p in ranks], rel=1e-4)
    assert alone[-1].loss != pytest.approx(ranks[-1].loss, rel=1e-2)

"""A rehearsal sends what the real method sends, and costs no network."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.lab.methods import parse_method
from benchmarks.lab.model import GPT, VOCABULARY, GPTConfig
from benchmarks.lab.optimizers import OPTIMIZERS
from benchmarks.lab.runs import Settings
from comm_hooks import Exchange, Identity, Sign, TopK
from comm_hooks.launchers.advise import rehearsal
from comm_hooks.launchers.advise.cost_model import Plan, all_reduce
from comm_hooks.launchers.advise.rehearsal import Alone, Rehearsals, of_slowest_rank
from comm_hooks.launchers.advise.step import Step
from comm_hooks.launchers.clock import Starvation
from comm_hooks.wire.gathered_header import HEADER_NBYTES

MODEL = GPTConfig(layers=2, width=128, heads=4, context=16)
SETTINGS = Settings(steps=8, warmup=1, batch=1, model=MODEL)
SHAPES = tuple(tuple(p.shape) for p in GPT(MODEL).parameters())
STEP = Step(SHAPES, milliseconds=10.0)

METHODS = [
    "all_reduce",
    "none",
    "bf16",
    "powersgd",
    "powersgd:rank=32",
    "topk",
    "topk:collective=sharded",
    "sign:exempt_bits=16",
    "sign:min_numel=40000",
    "topk:granularity=bucket",
    "count_sketch",
    "perm_k",
    "local_variance_adam",
    "sign+local_variance_adam",
    "local_adamw",
    "local_adamw:fragments=8",
    "local_adamw:local_steps=5:fragments=2",
    "one_bit_adam",
    "micro_adam",
]
WITH_MORE_RANKS = ["powersgd", "topk:collective=sharded", "perm_k", "local_adamw", "one_bit_adam"]


def plan_of(spec: str, ranks: int = 2, step: Step = STEP) -> Plan:
    return Rehearsals(step, ranks).plan(parse_method(spec))


def sent_per_step(spec: str) -> float:
    """Train for real and return the bytes that this rank sent per step, once warm. Collective."""
    torch.manual_seed(0)
    trainer = parse_method(spec).connect(GPT(MODEL), SETTINGS)
    windows = torch.randint(VOCABULARY, (1, MODEL.context + 1))

    def closure() -> torch.Tensor:
        trainer.optimizer.zero_grad()
        loss: torch.Tensor = trainer.ddp(windows[:, :-1], windows[:, 1:])
        loss.backward()
        return loss.detach()

    period = getattr(trainer.optimizer, "local_steps", None) or 4
    for step in range(1, 2 * period + 1):
        trainer.optimizer.step(closure)
        if step == period:
            before = trainer.traffic(step)[0]
    return (trainer.traffic(2 * period)[0] - before) / period


@pytest.mark.parametrize(
    ("ranks", "spec"),
    [
        *((2, spec) for spec in METHODS),
        *(pytest.param(3, spec, marks=pytest.mark.slow) for spec in WITH_MORE_RANKS),
    ],
)
def test_the_bytes_are_those_of_training(ranks: int, spec: str, ranks_of: Any) -> None:
    (real, *others) = ranks_of(ranks).run(sent_per_step, spec)
    assert all(other == real for other in others)
    # Chunks of an all-reduce are rounded down to whole bytes.
    assert plan_of(spec, ranks).sent_per_step() == pytest.approx(real, abs=8)


@pytest.mark.parametrize("name", [n for n, entry in OPTIMIZERS.items() if entry.crossing])
def test_every_optimizer_can_be_played(name: str) -> None:
    plan = plan_of(name)
    assert plan.sent_per_step() > 0
    assert plan.optimizer
    assert plan.optimizer > 0
    assert not plan.in_backward


@pytest.mark.parametrize("spec", ["adamw", "amsgrad", "topk+adam"])
def test_gradients_that_cross_before_any_server(spec: str) -> None:
    plan = plan_of(spec)
    assert not plan.in_optimizer
    assert sum(map(len, (e.collectives for e in plan.in_backward))) == len(plan.in_backward)
    assert (plan.optimizer is None) == (spec == "adamw")


@pytest.mark.parametrize("spec", ["sign", "powersgd", "micro_adam", "topk+amsgrad"])
def test_what_may_be_another_loads_is_told(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "quartile_range", lambda takes: 0.0)
    monkeypatch.setattr(Starvation, "share", lambda self: 0.0)
    assert plan_of(spec).noise == 0
    monkeypatch.setattr(Starvation, "share", lambda self: 0.25)
    starved = plan_of(spec)
    assert starved.noise == (starved.codec + (starved.optimizer or 0.0)) / 4
    # Takes that differ by as much as they last.
    monkeypatch.setattr(Starvation, "share", lambda self: 0.0)
    monkeypatch.setattr(rehearsal, "quartile_range", lambda takes: max(takes, default=0.0))
    differing = plan_of(spec)
    assert differing.noise >= 0.99 * (differing.codec + (differing.optimizer or 0.0)) > 0


def test_what_takes_no_arithmetic_has_no_noise() -> None:
    assert plan_of("all_reduce").noise == plan_of("none").noise == 0


def noise_of_slowest_rank() -> float:
    return of_slowest_rank(Plan(noise=0.5 * dist.get_rank())).noise


def test_the_noisiest_rank_counts(ranks_of: Any) -> None:
    assert ranks_of(2).run(noise_of_slowest_rank) == [0.5, 0.5]


def test_arithmetic_is_counted() -> None:
    slow = plan_of("gaussian_sketch:ratio=0.05").in_backward
    assert sum(e.before + e.after for e in slow) > 1e-3
    assert all(e.before == e.after == 0 for e in plan_of("all_reduce").in_backward)
    assert all(e.before > 0 for e in plan_of("bf16").in_backward)


def test_buckets_of_large_models_overlap_and_sketches_wait_for_the_whole_gradient() -> None:
    step = Step.of_numel(9_000_000, 10.0)
    for spec in ("all_reduce", "sign"):
        shares = [exchanged.ready for exchanged in plan_of(spec, step=step).in_backward]
        assert len(shares) == 3
        assert 0 < shares[0] < shares[1] < shares[2] == 1
    (alone,) = plan_of("count_sketch", step=step).in_backward
    assert alone.ready == 1


def test_half_precision_gradients_are_half_as_long() -> None:
    half = Step(SHAPES, 10.0, "bfloat16")
    full = plan_of("all_reduce").sent_per_step()
    assert plan_of("all_reduce", step=half).sent_per_step() == full / 2
    assert plan_of("bf16", step=half).sent_per_step() == full / 2
    # The same codes, but in one bucket of halves instead of two, so with one header.
    codes = [plan_of("sign", step=step) for step in (half, STEP)]
    assert codes[1].sent_per_step() - codes[0].sent_per_step() == HEADER_NBYTES
    assert [len(plan.in_backward) for plan in codes] == [1, 2]


@pytest.mark.parametrize(
    ("spec", "per_element"),
    [
        ("topk", 4),
        ("sign:memory_bits=16", 2),
        ("sign:memory=none", 0),
        ("count_sketch", 0),
        ("local_adamw", 4),
        ("low_communication", 4),
        ("powersgd", 4),
    ],
)
def test_residuals_are_counted(spec: str, per_element: int) -> None:
    step = Step.of_numel(1 << 20, 10.0)
    assert plan_of(spec, step=step).state_bytes == per_element << 20


def test_residuals_of_the_second_compression_are_counted() -> None:
    step = Step.of_numel(1 << 20, 10.0)
    assert plan_of("sign:collective=sharded", step=step).state_bytes == 6 << 20


@pytest.mark.parametrize("spec", ["all_reduce", "sign", "topk", "bf16", "powersgd", "local_adamw"])
def test_of_a_large_model_a_part_is_played(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step.of_numel(1 << 23, 10.0)
    whole = plan_of(spec, step=step)
    monkeypatch.setattr(rehearsal, "_LARGEST", 1 << 21)
    part = plan_of(spec, step=step)
    assert len(part.in_backward) == len(whole.in_backward)
    # Factors of matrices grow with the root of their size; matrices of a part are smaller.
    tolerance = 0.02 if spec != "powersgd" else 1.5
    assert part.sent_per_step() == pytest.approx(whole.sent_per_step(), rel=tolerance)
    assert part.state_bytes == pytest.approx(whole.state_bytes, rel=0.01)


@pytest.mark.parametrize("ranks", [1, 2, 5])
@pytest.mark.parametrize(
    ("compressor", "collective"),
    [
        (Identity(), "all_reduce"),
        (Identity(), "all_gather"),
        (TopK(density=1.0, value_bits=32), "all_gather"),
        (Identity(), "sharded"),
        (Sign(), "sharded"),
    ],
)
def test_the_others_send_what_this_rank_sends(ranks: int, compressor: Any, collective: Any) -> None:
    transport = Alone(ranks, torch.device("cpu"))
    exchange = Exchange(compressor, collective=collective, transport=transport)
    # Equal shards, so that the echo of one is right for all.
    gradient = torch.full((ranks, 2048), 3.0)
    tensors = {"weight": gradient.clone()}
    exchange.average_(tensors)
    assert torch.allclose(tensors["weight"], gradient)
    noted = transport.noted()
    assert noted.sent() == exchange.stats()["bytes_sent"]


@pytest.mark.parametrize("compressor", [TopK(), Sign(), Identity()])
def test_ranks_of_a_node_and_of_all_nodes_send_apart(compressor: Any) -> None:
    transport = Alone(6, torch.device("cpu"), ranks_per_node=3)
    exchange = Exchange(compressor, collective="hierarchical", transport=transport)
    exchange.average_({"weight": torch.ones(6, 2048)})
    noted = transport.noted()
    assert noted.sent() == exchange.stats()["bytes_sent"]
    members = [collective.members for collective in noted.collectives]
    assert members[0] == members[-1] == "node"
    assert set(members[1:-1]) == {"across"}
    # A third of the vector each; half of it goes to the other node at most, twice.
    assert noted.collectives[0].traffic == pytest.approx(2 / 3 * 4 * 6 * 2048, rel=0.01)
    across = sum(c.traffic for c in noted.collectives if c.members == "across")
    assert across < 1.01 * 4 * 2 * 2048 + 100


def test_powersgd_sends_two_factors_and_what_is_not_worth_it() -> None:
    step = Step(((512, 256), (512, 256), (4, 4), (100,)), 10.0)
    (exchanged,) = plan_of("powersgd:rank=8", step=step).in_backward
    sizes = [4 * (16 + 100), 4 * 2 * 512 * 8, 4 * 2 * 256 * 8]
    assert [c.traffic for c in exchanged.collectives] == [all_reduce(s, 2).traffic for s in sizes]

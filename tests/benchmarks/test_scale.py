"""The study of many ranks: simulated ranks learn as they should, predictions have exact bytes."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from benchmarks.lab.schedules import cosine
from benchmarks.lab.tasks import build_task
from benchmarks.lab.training import batch_generator, known_warnings_ignored, new_model
from benchmarks.studies.scale.methods import Method, make_methods
from benchmarks.studies.scale.predicted import (
    MODELS,
    SCHEMES,
    TOP_K,
    Assumptions,
    Model,
    Predicted,
    plan_of,
    predict_all,
)
from benchmarks.studies.scale.training import Setup, Trained, train
from comm_hooks import Exchange
from comm_hooks.collectives import Simulated
from comm_hooks.launchers.advise.cost_model import matrix_shapes
from comm_hooks.wire.gathered_header import HEADER_NBYTES
from tests.benchmarks.studying import NUMEL, nothing
from tests.benchmarks.test_studies import invoke

METHODS = {method.name: method for method in make_methods(density=1 / 16, ratio=1 / 16)}
COMPRESSED = [name for name, m in METHODS.items() if m.exchanges and name != "all-reduce"]


def trained(method: Method, ranks: int, steps: int = 6, lr: float = 0.1) -> Trained:
    return train(Setup(steps, batch=32), method, ranks, seed=3, lr=lr, advance=nothing)


def by_hand(groups: list[list[int]], ranks: int, steps: int, lr: float) -> tuple[float, float]:
    """Train a plain model for each group of ranks on their batches; return mean loss and error."""
    task = build_task("digits", clients=ranks, seed=3)
    judged = []
    for group in groups:
        model = new_model(task, 3, "cpu")
        optimizer = torch.optim.SGD(model.parameters(), lr, momentum=0.9)
        batches = [
            task.clients[rank].batches(32 // ranks, batch_generator(3, rank)) for rank in group
        ]
        for step in range(steps):
            optimizer.param_groups[0]["lr"] = lr * cosine(step / steps)
            inputs, targets = (torch.cat(parts) for parts in zip(*map(next, batches), strict=True))
            optimizer.zero_grad()
            F.cross_entropy(model(inputs), targets).backward()
            optimizer.step()
        judged.append(task.evaluate(model))
    loss, error = (sum(figures[key] for figures in judged) for key in ("loss", "error"))
    return loss / len(judged), error / len(judged)


@pytest.mark.parametrize("ranks", [2, 8])
def test_controls_are_plain_training(ranks: int) -> None:
    together = trained(METHODS["all-reduce"], ranks)
    loss, error = by_hand([list(range(ranks))], ranks, 6, 0.1)
    assert together.loss == pytest.approx(loss, rel=1e-3)
    assert together.error == pytest.approx(error, abs=0.003)  # one image of 360
    apart = trained(METHODS["none"], ranks)
    loss, error = by_hand([[rank] for rank in range(ranks)], ranks, 6, 0.1)
    assert apart.loss == pytest.approx(loss, rel=1e-3)
    assert apart.error == pytest.approx(error, abs=0.003)
    assert apart.bytes_sent == apart.bytes_received == 0


@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_methods_learn(name: str) -> None:
    run = trained(METHODS[name], ranks=4, steps=20)
    assert run.loss is not None
    assert run.loss < 1.5 < math.log(10)


def test_bytes_by_ranks() -> None:
    def sent(name: str, ranks: int) -> int:
        run = trained(METHODS[name], ranks, steps=2)
        assert run.bytes_received == run.bytes_sent
        return run.bytes_sent

    for kind in ("top-k", "signs"):
        assert sent(f"{kind}, all-gather", 8) == 7 * sent(f"{kind}, all-gather", 2)
        # Two payloads in the limit, and a header for every shard.
        headers = 2 * 2 * 7 * HEADER_NBYTES
        assert sent(f"{kind}, sharded", 8) - headers < 2.2 * sent(f"{kind}, sharded", 2)
    assert sent("all-reduce", 4) == pytest.approx(1.5 * 4 * NUMEL, rel=3e-3)
    assert sent("Count-Sketch, all-reduce", 4) == pytest.approx(1.5 * 4 * NUMEL / 16, rel=4e-2)


def test_a_run_that_diverges_says_so() -> None:
    run = trained(METHODS["all-reduce"], ranks=2, lr=1e9)
    assert run.loss is None
    assert run.error == 1


_NUMEL = 1 << 18


@pytest.mark.filterwarnings("ignore:all ranks are on one node")
@pytest.mark.parametrize("ranks", [8, 16])
@pytest.mark.parametrize("name", [name for name in SCHEMES if name != "no communication"])
def test_predicted_bytes_are_those_of_real_rounds(name: str, ranks: int) -> None:
    way = SCHEMES[name]
    plan = plan_of(Assumptions(), way, _NUMEL, ranks)
    if name == "all-reduce, bf16":
        assert plan.traffic == 2 * (ranks - 1) * 2 * _NUMEL // ranks
        return
    assert way != "none"
    nodes = {"ranks_per_node": 8} if way == "hierarchical" else {}
    exchanges = [Exchange(TOP_K, collective=way, transport=t, **nodes) for t in Simulated(ranks)]
    shapes = matrix_shapes(_NUMEL)
    rounds = [
        exchange.round({str(i): torch.randn(shape) for i, shape in enumerate(shapes)})
        for exchange in exchanges
    ]
    with known_warnings_ignored():
        Simulated(ranks).run(rounds)
    sent = exchanges[0].stats()["bytes_sent"]
    assert plan.traffic == pytest.approx(sent, rel=0.01)


counts = st.sampled_from([8, 16, 64, 512])
schemes = st.sampled_from(list(SCHEMES))


def steps_of(ranks: int, gigabits: float, model: Model = MODELS[0]) -> dict[str, Predicted]:
    rows = predict_all(Assumptions(), [model], [gigabits], [ranks])
    return {row.scheme: row for row in rows}


@given(counts, schemes, st.sampled_from([1.0, 10.0, 100.0]))
def test_predictions_are_possible(ranks: int, name: str, gigabits: float) -> None:
    row, plain = steps_of(ranks, gigabits)[name], MODELS[0].seconds
    assert row.seconds >= plain + row.codec - 1e-9
    assert row.seconds >= steps_of(ranks, 10 * gigabits)[name].seconds
    slower = steps_of(ranks, gigabits, replace(MODELS[0], seconds=1.0))
    assert slower[name].seconds >= row.seconds
    if name == "no communication":
        assert row.seconds == plain
    if ranks == 8:
        # One node: what joins it to others does not matter.
        assert row.seconds == steps_of(ranks, 100 * gigabits)[name].seconds


def test_a_node_sends_what_the_model_says() -> None:
    """Worked out by hand for 2 nodes of 8: what crosses the link between them takes this long."""
    model, ranks = replace(MODELS[0], seconds=1e-9), 16
    rows = steps_of(ranks, 1.0, model)
    link = 125e6

    def waits(name: str) -> float:
        return rows[name].seconds - rows[name].codec

    gradient = 2 * model.numel
    assert waits("all-reduce, bf16") == pytest.approx(2 * 15 / 16 * gradient / link, rel=0.02)
    payload = rows["top-k 1/64, all-gather"].bytes_sent / 15
    assert waits("top-k 1/64, all-gather") == pytest.approx(15 * payload / link, rel=0.02)
    # Up: 8 ranks of a node send half of their payloads out of it.  Down: one ring.
    assert waits("top-k 1/64, sharded") == pytest.approx((4 + 15 / 16) * payload / link, rel=0.1)
    # Each of 8 ranks sends an eighth of a payload to the other node, and little else matters.
    inside = 2 * 7 / 8 * 4 * model.numel / Assumptions().inside_bandwidth
    assert waits("top-k 1/64, hierarchical") == pytest.approx(inside + payload / link, rel=0.1)


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    arguments = ["--ranks", "1,2", "--steps", "2", "--batch", "16", "--tuned-at", "2", "--quick"]
    few = ["--predicted-ranks", "8,16", "--gigabits", "1"]
    result = invoke("scale", *arguments, *few, "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "scale.json").read_text())
    assert len(record["simulated"]["runs"]) == 2 * len(METHODS)
    assert record["predicted"]["measured"] is False
    assert len(record["predicted"]["steps"]) == len(MODELS) * 2 * len(SCHEMES)
    assert record["predicted"]["assumptions"]["ranks_per_node"] == 8
    for name in (*METHODS, *SCHEMES):
        assert name in result.stdout

"""The study of many ranks: simulated ranks learn as they should, and bytes are counted."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from benchmarks.lab.schedules import cosine
from benchmarks.lab.tasks import build_task
from benchmarks.lab.training import batch_generator, new_model
from benchmarks.studies.scale.methods import Method, make_methods
from benchmarks.studies.scale.training import Setup, Trained, train
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


@pytest.mark.slow
def test_the_command(tmp_path: Path) -> None:
    arguments = ["--ranks", "1,2", "--steps", "2", "--batch", "16", "--tuned-at", "2", "--quick"]
    result = invoke("scale", *arguments, "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "scale.json").read_text())
    assert len(record["runs"]) == 2 * len(METHODS)
    for name in METHODS:
        assert name in result.stdout

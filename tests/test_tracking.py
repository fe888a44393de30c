"""StatsLogger: records every few steps, to whatever there is to write to."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from comm_hooks import ErrorFeedback, Exchange, TopK
from comm_hooks.collectives import Simulated
from comm_hooks.tracking import StatsLogger


class Counting:
    """Exchanges of 1000 bytes each, and then more, beside 64 times as many uncompressed."""

    def __init__(self) -> None:
        self.exchanges = 0
        self.more = 0
        self.reads = 0

    def stats(self) -> dict[str, float]:
        self.reads += 1
        sent = 1000 * self.exchanges + self.more
        return {
            "steps": self.exchanges,
            "bytes_sent": sent,
            "bytes_received": sent,
            "bytes_uncompressed": 64 * sent,
            "compression_ratio": 64.0,
            "residual_norm": 0.125,
        }


def train(state: Counting, watch: StatsLogger, first: int, last: int) -> None:
    for step in range(first, last + 1):
        state.exchanges += 2
        state_before = state.reads
        watch.log(step, loss=1 / step)
        due = step % watch.every == 0
        assert state.reads - state_before == due, "stats() reads from the device"


def test_records_go_to_a_function_every_few_steps() -> None:
    records: list[tuple[int, dict[str, float]]] = []
    state = Counting()
    watch = StatsLogger(state, lambda values, step: records.append((step, dict(values))), every=4)
    assert watch.line() == ""
    train(state, watch, 1, 10)
    assert [step for step, _ in records] == [4, 8]
    assert watch.line() == "step 8: 1 kB sent per step, 1/64 of uncompressed, residual 0.125"
    values = records[-1][1]
    assert values["loss"] == 1 / 8
    assert values["comm_hooks/steps"] == 16
    assert values["comm_hooks/bytes_sent"] == 16_000
    assert values["comm_hooks/sent_per_step"] == 1000
    assert values["comm_hooks/seconds"] > records[0][1]["comm_hooks/seconds"] > 0


def test_a_run_that_goes_on_counts_from_where_it_is() -> None:
    state = Counting()
    state.exchanges = 500
    records: list[float] = []
    watch = StatsLogger(
        state, lambda values, step: records.append(values["comm_hooks/sent_per_step"]), every=1
    )
    watch.log(1)  # nothing was exchanged
    state.exchanges += 3
    watch.log(2)
    state.exchanges += 2
    state.more += 4000
    watch.log(3)
    assert records == [0, 1000, 3000]


def test_a_file_gets_a_line_per_record(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    for part in ((1, 4), (5, 8)):  # a second run appends
        state = Counting()
        train(state, StatsLogger(state, path, every=2), *part)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4, 6, 8]
    assert lines[1]["loss"] == 0.25
    assert lines[1]["bytes_sent"] == lines[1]["bytes_received"] == 8000
    assert {"seconds", "sent_per_step", "compression_ratio", "residual_norm"} < set(lines[0])


def test_wandb_and_lightning_loggers_get_one_call_per_record() -> None:
    class Run:
        def __init__(self) -> None:
            self.calls: list[tuple[dict[str, float], int]] = []

    class WandB(Run):
        def log(self, data: dict[str, Any], step: int | None = None) -> None:
            assert step is not None
            self.calls.append((data, step))

    class Lightning(Run):
        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            assert step is not None
            self.calls.append((metrics, step))

    for run in (WandB(), Lightning()):
        state = Counting()
        train(state, StatsLogger(state, run, every=5, prefix="net/"), 1, 10)
        assert [step for _, step in run.calls] == [5, 10]
        assert run.calls[0][0]["net/bytes_sent"] == 10_000


def test_tensorboard_gets_every_value(tmp_path: Path) -> None:
    tensorboard = pytest.importorskip(
        "torch.utils.tensorboard", reason="tensorboard is not installed"
    )
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    state = Counting()
    with tensorboard.SummaryWriter(str(tmp_path)) as writer:
        train(state, StatsLogger(state, writer, every=2), 1, 4)
    events = EventAccumulator(str(tmp_path)).Reload()
    written = events.Scalars("comm_hooks/bytes_sent")
    assert [(e.step, e.value) for e in written] == [(2, 4000), (4, 8000)]
    assert {f"comm_hooks/{name}" for name in state.stats()} < set(events.Tags()["scalars"])
    assert [e.value for e in events.Scalars("loss")] == [0.5, 0.25]


def test_an_exchange_can_be_watched() -> None:
    world = Simulated(2)
    exchanges = [Exchange(TopK(density=0.1), ErrorFeedback(), transport=t) for t in world]
    watch = StatsLogger(exchanges[0], every=1)
    world.run([e.round({"w": torch.randn(64, 64)}) for e in exchanges])
    watch.log(1)
    sent = exchanges[0].stats()["bytes_sent"]
    assert sent > 1000
    assert watch.line().startswith(f"step 1: {sent / 1000:.3g} kB sent per step, 1/")


def test_bad_intervals_and_writers_are_refused() -> None:
    for every in (0, 2.0, True):
        with pytest.raises(ValueError, match=f"every must be an integer from 1, got {every!r}"):
            StatsLogger(Counting(), every=every)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"writer must be a SummaryWriter, .*, got 17"):
        StatsLogger(Counting(), 17)

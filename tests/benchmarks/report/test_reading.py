"""The command and the files it reads: bad input gets one line and exit code 2."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from benchmarks.lab.runs import Run
from benchmarks.report.logs import Log
from benchmarks.report.reading import read_runs
from comm_hooks import Exchange, TopK
from comm_hooks.launchers.main import app
from comm_hooks.tracking import StatsLogger
from tests.benchmarks.report.test_report import BASELINE, CONTROL, FAILED, GOOD
from tests.ranks import Ranks
from tests.refusing import refusal


@pytest.fixture(autouse=True)
def _folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def record(step: int, loss: float | None = 2.5, **others: Any) -> dict[str, Any]:
    sent = 100 * step
    counted = {"bytes_sent": sent, "bytes_received": 2 * sent, "seconds": step / 2}
    return {"step": step, "loss": loss, **counted, **others}


def write(name: str, *lines: Run | dict[str, Any] | str) -> Path:
    path = Path(name)
    path.write_text("".join(_as_text(line) + "\n" for line in lines))
    return path


def _as_text(line: Run | dict[str, Any] | str) -> str:
    if isinstance(line, Run):
        return line.to_json()
    return line if isinstance(line, str) else json.dumps(line)


def test_the_page_is_written_where_it_is_asked_for() -> None:
    write("a.jsonl", BASELINE, CONTROL, FAILED)
    write("b.jsonl", GOOD)
    result = CliRunner().invoke(app, ["report", "a.jsonl", "b.jsonl", "--out", "page.html"])
    assert result.exit_code == 0, result.output
    page = Path("page.html").read_text()
    for run in (BASELINE, CONTROL, FAILED, GOOD):
        assert f'data-value="{run.method}"' in page
        assert run.method in result.stdout
    assert "Report: page.html" in result.stdout


def complaint(*arguments: str) -> str:
    """Run ``report``, check that it refuses as it should, and return what it says."""
    said = refusal(app, "python -m benchmarks.report", "report", *arguments)
    assert not Path("report.html").exists()
    return said


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "x.jsonl: no records in this file"),
        (["", "  "], "x.jsonl: no records in this file"),
        ([BASELINE, "{oops}"], "x.jsonl, line 2: not JSON (Expecting property name"),
        (["<html>"], "x.jsonl, line 1: not JSON (Expecting value at column 1)"),
        ([record(1), "", "3"], "x.jsonl, line 3: not a JSON object but 3"),
        (["[" + "1," * 60 + "1]"], "line 1: not a JSON object but [1,1,1,"),
        ([{"loss": 3}], "line 1: a record of version null, and this comm-hooks reads version 2"),
        ([BASELINE.to_json().replace('"version": 2', '"version": 7')], "a record of version 7"),
        ([BASELINE.to_json().replace('"loss"', '"lost"')], "line 1: curve[0].loss is missing"),
        ([{"step": 3, "loss": 1.0}], "line 1: no 'bytes_sent': a record of a training needs"),
        ([record(1), record(-2)], "line 2: step must be an integer from 0 to 2^63, got -2"),
        ([record(1, seconds="1 s")], "line 1: seconds must be a number from 0 to 2^63, got '1 s'"),
        (
            [record(1, bytes_sent=True)],
            "line 1: bytes_sent must be a number from 0 to 2^63, got True",
        ),
        (
            [record(1, bytes_received=math.nan)],
            "bytes_received must be a number from 0 to 2^63, got nan",
        ),
        ([record(1, bytes_sent=10**400)], "bytes_sent must be a number from 0 to 2^63, got 1000"),
        (["[" * 20_000], "x.jsonl, line 1: not JSON (maximum recursion depth exceeded"),
        (["9" * 5_000], "x.jsonl, line 1: not JSON (Exceeds the limit (4300 digits)"),
        ([record(1) | {"loss": "low"}], "line 1: loss must be a number, got 'low'"),
        ([record(1, seed="a")], "line 1: seed must be an integer, got 'a'"),
        ([record(1, method=1)], "line 1: method must be a string, got 1"),
        ([record(1, None)], "x.jsonl: no record of 'x' has a loss: give it, for instance"),
    ],
)
def test_a_bad_file_is_refused(lines: list[Run | dict[str, Any] | str], message: str) -> None:
    assert message in complaint(str(write("x.jsonl", *lines)))


@pytest.mark.parametrize("loss", [1e308, -1e39, 10**400, math.inf])
def test_a_loss_beyond_float32_has_diverged(loss: float) -> None:
    (run,) = read_runs(write("x.jsonl", record(1), record(2) | {"loss": loss}))
    assert run.failure == f"diverged: the loss is {loss} since step 2"


def test_what_cannot_be_read_is_refused() -> None:
    assert "absent.jsonl: cannot read this file (No such file" in complaint("absent.jsonl")
    Path("folder").mkdir()
    assert "folder: cannot read this file (Is a directory)" in complaint("folder")
    Path("image").write_bytes(b"\xff\xd8\0")
    assert "image: not a text file of JSON lines" in complaint("image")
    write("a.jsonl", GOOD)
    assert "folder/../a.jsonl: given twice" in complaint("a.jsonl", "folder/../a.jsonl")


def test_an_out_that_cannot_be_written_is_refused() -> None:
    path = write("a.jsonl", GOOD)
    before = path.read_text()
    assert "--out a.jsonl: this file holds records" in complaint("a.jsonl", "--out", "a.jsonl")
    assert "--out no/p.html: cannot write there" in complaint("a.jsonl", "--out", "no/p.html")
    assert path.read_text() == before


def test_a_file_without_a_record_spoils_no_page() -> None:
    write("a.jsonl", GOOD)
    Path("report.html").write_text("the old one")
    result = CliRunner().invoke(app, ["report", "a.jsonl", "absent.jsonl"])
    assert result.exit_code == 2
    assert Path("report.html").read_text() == "the old one"


def test_half_a_last_line_is_left_out_and_said() -> None:
    path = write("x.jsonl", record(1), record(2))
    with path.open("a") as file:
        file.write('{"step": 3, "lo')
    (run,) = read_runs(path)
    assert [point.step for point in run.curve] == [1, 2]
    assert "line 3 is cut off and left out" in run.note
    path.write_text(BASELINE.to_json() + "\n" + GOOD.to_json()[:90])
    assert "x.jsonl, line 2: not JSON: the line is cut off" in complaint("x.jsonl")


def test_a_log_is_summed_up() -> None:
    losses = {10: 9.0, 20: 5.0, 104: 7.0, 105: 1.0, 110: 3.0}
    lines = [record(step, loss, bytes_uncompressed=400 * step) for step, loss in losses.items()]
    (run,) = read_runs(write("x.jsonl", *lines))
    figures = run.figures
    assert figures is not None
    assert run.method == "x"
    assert (
        figures.loss == 2.0
    )  # the mean from step 105 on: 5% of the 100 steps between first and last
    assert (figures.sent_per_step, figures.received_per_step, figures.step_ms) == (100, 200, 500)
    assert (figures.bytes_sent, figures.bytes_received) == (11_000, 22_000)
    assert run.note == "sent 1/4 of uncompressed"


def test_runs_of_one_file_are_told_apart_by_method_and_seed() -> None:
    path = write(
        "x.jsonl",
        *(record(s, seed=k, method=m) for s in (1, 2) for k in (0, 1) for m in ("a", "b")),
    )
    runs = read_runs(path)
    assert [(run.method, run.settings.seed) for run in runs] == [
        ("a", 0),
        ("b", 0),
        ("a", 1),
        ("b", 1),
    ]
    assert all(len(run.curve) == 2 and not run.note for run in runs)


def test_a_file_can_be_named_for_its_seed() -> None:
    names = ("sign.seed0.jsonl", "sign.seed12.jsonl", "top.k.jsonl", "seed3.jsonl")
    runs = read_runs(*(write(name, record(1)) for name in names))
    assert [(run.method, run.settings.seed) for run in runs] == [
        ("sign", 0),
        ("sign", 12),
        ("top.k", None),
        ("seed3", None),
    ]
    (run,) = read_runs(write("sign.seed0.jsonl", record(1, method="other", seed=5)))
    assert (run.method, run.settings.seed) == ("other", 5)


def test_logs_of_the_same_name_are_named_by_their_folder() -> None:
    Path("one").mkdir()
    Path("two").mkdir()
    names = ("one/log.jsonl", "two/log.jsonl", "c.jsonl")
    runs = read_runs(*(write(name, record(1)) for name in names))
    assert [run.method for run in runs] == ["one/log", "two/log", "c"]


@given(st.lists(st.integers(0, 40), min_size=1, max_size=30), st.data())
def test_a_resumed_log_has_every_step_once_and_counters_that_never_fall(
    steps: list[int], data: st.DataObject
) -> None:
    log, sent, total = Log("x", None), 0, 0
    for step in steps:
        # The process starts again, and with it its counters, or goes on.
        before = 0 if data.draw(st.booleans()) else sent
        sent = before + data.draw(st.integers(0, 50)) if before else data.draw(st.integers(0, 50))
        total += sent - before if sent >= before else sent
        log.add({**record(step), "bytes_sent": sent, "bytes_received": sent, "seconds": sent})
    curve = log.run().curve
    kept: list[int] = []
    for step in steps:
        kept = [*(each for each in kept if each < step), step]
    assert [point.step for point in curve] == kept
    counted = [point.bytes_sent for point in curve]
    assert counted == sorted(counted)
    assert counted[-1] <= total


def test_what_a_resumed_run_had_sent_before_still_counts() -> None:
    lines = [record(10), record(20), {**record(15), "bytes_sent": 500}, record(30)]
    (run,) = read_runs(write("x.jsonl", *lines))
    assert [(point.step, point.bytes_sent) for point in run.curve] == [
        (10, 1000),
        (15, 2500),
        (30, 5000),
    ]
    assert "went back to step 15: resumed there" in run.note


def test_a_run_that_resumes_twice_at_one_step_has_sent_everything_twice() -> None:
    """Counters of equal age are as large: only the time at which they began tells them apart."""

    def of(began: float, step: int, sent: int) -> Any:
        counted = {"bytes_sent": sent, "bytes_received": sent, "seconds": sent / 100}
        return {"step": step, "loss": 1.0, "began": began, **counted}

    lines = [of(1.0, 1000, 9000), of(2.0, 1050, 500), of(3.0, 1050, 500), of(3.0, 1100, 1000)]
    (run,) = read_runs(write("x.jsonl", *lines))
    assert [point.bytes_sent for point in run.curve] == [9000, 10000, 10500]
    assert run.curve[-1].seconds == 105


def test_a_second_record_of_a_step_replaces_the_first_unless_it_has_no_loss() -> None:
    lines = [record(10, 3.0), record(10, None), record(20, 2.0), record(20, 1.0)]
    (run,) = read_runs(write("x.jsonl", *lines))
    assert [(point.step, point.loss) for point in run.curve] == [(10, 3.0), (20, 1.0)]
    assert run.note == "1 records without a loss are left out"


def test_a_run_that_ends_without_a_finite_loss_has_diverged() -> None:
    lines = [record(10), record(20, math.inf), record(30, math.nan)]
    (run,) = read_runs(write("x.jsonl", *lines))
    assert run.figures is None
    assert run.failure == "diverged: the loss is inf since step 20"
    assert [point.step for point in run.curve] == [10]
    # A step that a loss scaler skips is no divergence.
    (run,) = read_runs(write("x.jsonl", *lines, record(40)))
    assert run.failure is None
    assert [point.step for point in run.curve] == [10, 40]


def test_only_losses_that_are_not_finite_are_a_failure_too() -> None:
    (run,) = read_runs(write("x.jsonl", record(1, math.nan)))
    assert run.failure == "diverged: the loss is nan since step 1"


def train_and_log(path: Path) -> float:
    exchange = Exchange(TopK(density=1 / 64))
    watch = StatsLogger(exchange, path if dist.get_rank() == 0 else None, every=2)
    for step in range(1, 7):
        exchange.average_({"weight": torch.ones(64, 64)})
        watch.log(step, loss=3.0 / step)
    return exchange.stats()["bytes_sent"]


def test_what_stats_logger_writes_can_be_read(
    ranks_of: Callable[[int], Ranks], tmp_path: Path
) -> None:
    path = tmp_path / "topk.jsonl"
    sent, _ = ranks_of(2).run(train_and_log, path)
    (run,) = read_runs(path)
    assert run.method == "topk"
    assert [point.step for point in run.curve] == [2, 4, 6]
    assert [point.loss for point in run.curve] == [1.5, 0.75, 0.5]
    assert run.figures is not None
    assert run.figures.bytes_sent == sent > 0
    assert run.note.startswith("sent 1/")

"""Table and report, from records made by hand."""

import io
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from comm_hooks.launchers.compare.report import write_report
from comm_hooks.launchers.compare.runs import Figures, Point, Run, Settings, read_runs
from comm_hooks.launchers.compare.table import (
    COLUMNS,
    NOISE,
    format_bytes,
    make_conclusions,
    make_rows,
    print_table,
)


def make_run(method: str, loss: float, per_step: int) -> Run:
    settings = Settings(steps=100)
    curve = [
        Point(step, loss + 1 / step, step * per_step, step * per_step, 0.5 * step)
        for step in (50, 100)
    ]
    final = Figures(
        loss=loss,
        drift=0.0,
        step_ms=500.4,
        sent_per_step=per_step,
        received_per_step=per_step,
        bytes_sent=100 * per_step,
        bytes_received=100 * per_step,
    )
    return Run(method, f"a note on {method}", settings, curve, final)


BASELINE = make_run("all_reduce", 2.4, 20_000_000)
CONTROL = make_run("none", 2.6, 0)
GOOD = make_run("sign+compressed_adam", 2.45, 625_000)
BAD = make_run("topk", 3.1, 80_000)
FAILED = Run("powersgd", "", Settings(), failure="ValueError: rank <4> & more")


def cells(runs: list[Run], method: str) -> dict[str, str]:
    row = next(row for row in make_rows(runs) if row.cells[0] == method)
    return dict(zip(COLUMNS, row.cells, strict=True))


def test_records_survive_the_file(tmp_path: Path) -> None:
    runs = [BASELINE, CONTROL, FAILED]
    path = tmp_path / "runs.jsonl"
    path.write_text("".join(run.to_json() + "\n" for run in runs))
    assert read_runs(path) == runs


def test_a_row_compares_with_all_reduce() -> None:
    row = cells([BASELINE, GOOD], "sign+compressed_adam")
    assert row == {
        "method": "sign+compressed_adam",
        "loss": "2.450",
        "vs all-reduce": "+0.050",
        "sent/step": "625 kB",
        "received/step": "625 kB",
        "fewer bytes": "32x",
        "total sent": "62.5 MB",
        "ms/step": "500",
        "drift": "0",
        "note": "a note on sign+compressed_adam",
    }


def test_without_all_reduce_there_is_nothing_to_compare_with() -> None:
    row = cells([GOOD, CONTROL], "sign+compressed_adam")
    assert row["vs all-reduce"] == row["fewer bytes"] == "-"


def test_what_sends_nothing_has_no_ratio() -> None:
    assert cells([BASELINE, CONTROL], "none")["fewer bytes"] == "-"


def test_a_failed_method_is_shown_with_its_reason() -> None:
    row = cells([BASELINE, FAILED], "powersgd")
    assert row["loss"] == "failed"
    assert row["note"] == "ValueError: rank <4> & more"
    assert row["sent/step"] == "-"


def test_a_warning_names_exactly_what_is_worse_than_no_communication() -> None:
    assert CONTROL.figures is not None
    close = replace(CONTROL.figures, loss=CONTROL.figures.loss + 0.9 * NOISE)
    tied = replace(GOOD, method="tied", figures=close)
    runs = [BASELINE, CONTROL, GOOD, tied]
    assert not any("Worse than no communication" in text for text in make_conclusions(runs))
    runs.append(BAD)
    (warning,) = (text for text in make_conclusions(runs) if "Worse than no" in text)
    assert warning.startswith("Worse than no communication at all: topk. ")
    assert [row.worse_than_control for row in make_rows(runs)] == [False] * 4 + [True]


def test_the_link_is_worked_out_for_the_most_and_the_fewest_bytes() -> None:
    (link,) = (text for text in make_conclusions([BASELINE, CONTROL, GOOD, BAD]) if "Mbit" in text)
    assert "1,600 ms for all_reduce and 6.4 ms for topk." in link


@pytest.mark.parametrize("width", [80, 140])
def test_no_figure_is_cut_off_on_a_narrow_terminal(width: int) -> None:
    console = Console(width=width, record=True, file=io.StringIO())
    runs = [BASELINE, CONTROL, GOOD, BAD, FAILED]
    print_table(runs, console)
    text = console.export_text()
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    for row in make_rows(runs):
        assert all(cell in text for cell in row.cells[:-1])
    assert "ValueError: rank <4> & more" in text


def test_the_page_is_whole_when_methods_failed(tmp_path: Path) -> None:
    page = write_report(
        [BASELINE, CONTROL, GOOD, BAD, FAILED], {"Command": "comm-hooks <compare>"}, tmp_path
    )
    text = page.read_text()
    assert page.parent == tmp_path
    assert "ValueError: rank &lt;4&gt; &amp; more" in text
    assert "<dd>comm-hooks &lt;compare&gt;</dd>" in text
    assert text.count('<tr class="worse">') == text.count('<tr class="failed">') == 1
    assert str(tmp_path) not in text


def test_a_report_on_failures_alone_can_be_written(tmp_path: Path) -> None:
    assert "ValueError" in write_report([FAILED], {}, tmp_path).read_text()


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999.4, "999 B"),
        (999.6, "1 kB"),
        (83_149, "83.1 kB"),
        (19_324_928, "19.3 MB"),
        (2.9e9, "2.9 GB"),
        (5.1e15, "5100 TB"),
    ],
)
def test_bytes_have_three_digits_and_a_unit(count: float, text: str) -> None:
    assert format_bytes(count) == text

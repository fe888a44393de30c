"""Records, groups, table and page, from records made by hand."""

import io
import json
import re
from dataclasses import replace
from typing import Any

import pytest
from plotly.offline import get_plotlyjs
from rich.console import Console

from benchmarks.lab.runs import Figures, LogSettings, Point, Run, Settings, parse_run
from benchmarks.lab.tables import format_bytes
from benchmarks.report.charts import MAX_POINTS, make_series
from benchmarks.report.conclusions import NOISE, make_conclusions, make_warnings
from benchmarks.report.groups import group_runs
from benchmarks.report.page import render_page
from benchmarks.report.table import Row, make_table, print_table


def make_run(method: str, loss: float, per_step: int, seed: int = 0, **settings: Any) -> Run:
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
    made = Settings(**{"steps": 100, "seed": seed, **settings})
    return Run(method, f"a note on {method}", made, curve, final, facts={"Text": "a book"})


BASELINE = make_run("all_reduce", 2.4, 20_000_000)
CONTROL = make_run("none", 2.6, 0)
GOOD = make_run("sign+compressed_adam", 2.45, 625_000)
BAD = make_run("topk", 3.1, 80_000)
FAILED = Run(
    "powersgd",
    "",
    Settings(steps=100),
    failure="ValueError: rank <4> & more",
    facts={"Text": "a book"},
)


def texts(row: Row) -> list[str]:
    return [cell.text for cell in row.cells]


def cells(runs: list[Run], method: str) -> dict[str, str]:
    table = make_table(runs)
    row = next(row for row in table.rows if row.cells[0].text == method)
    return dict(zip(table.columns, texts(row), strict=True))


@pytest.mark.parametrize("run", [BASELINE, FAILED], ids=["finished", "failed"])
def test_records_survive_the_file(run: Run) -> None:
    assert parse_run(json.loads(run.to_json())) == run


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": None}, "a record of version null, and this comm-hooks reads version 2"),
        ({"version": 3}, "version 3"),
        ({"figures": None}, "exactly one of figures and failure must be null"),
        ({"failure": "both"}, "exactly one of figures and failure must be null"),
        ({"method": 3}, "method must be a string, got 3"),
        ({"extra": 1}, "extra is not known"),
        ({"curve": [{"step": 1}]}, "curve[0].loss is missing"),
        ({"facts": {"Text": None}}, "facts.Text must be a string, got None"),
        ({"settings": {"nproc": 2}}, "settings.steps is missing"),
        ({"settings": None}, "settings must be an object, got None"),
        ({"figures": {"loss": 2.4}}, "figures.drift is missing"),
    ],
)
def test_a_record_that_is_not_ours_is_refused(change: dict[str, Any], message: str) -> None:
    record = {**json.loads(BASELINE.to_json()), **change}
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_run(record)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("betas", [0.9], "settings.betas must have 2 elements, got [0.9]"),
        ("betas", [0.9, "x"], "settings.betas[1] must be a number, got 'x'"),
        ("steps", True, "settings.steps must be an integer, got True"),
        ("steps", 1.5, "settings.steps must be an integer, got 1.5"),
        ("learning_rate", float("nan"), "settings.learning_rate must be finite, got nan"),
        ("model", {"depth": 3}, "settings.model.layers is missing"),
    ],
)
def test_settings_are_checked_in_depth(field: str, value: object, message: str) -> None:
    record = json.loads(BASELINE.to_json())
    record["settings"][field] = value
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_run(record)


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
    columns = make_table([GOOD, CONTROL]).columns
    assert "vs all-reduce" not in columns
    assert "fewer bytes" not in columns


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
    assert warning.startswith("Worse than no communication at all: topk. This is no bug ")
    assert "dividing before the exchange (local_variance_adam, local_adamw) avoids" in warning
    assert [row.worse_than_control for row in make_table(runs).rows] == [False] * 4 + [True]


@pytest.mark.parametrize(
    ("worse", "advice"),
    [
        (["local_adamw"], "(local_variance_adam)"),
        (["topk:density=0.1+local_variance_adam"], "(local_adamw)"),
        (["topk+local_variance_adam", "local_adamw:fragments=8"], None),
    ],
)
def test_what_did_worse_is_not_recommended(worse: list[str], advice: str | None) -> None:
    runs = [BASELINE, CONTROL, *(make_run(method, 3.0, 80_000) for method in worse)]
    (warning,) = (text for text in make_conclusions(runs) if "Worse than no" in text)
    _, _, reason = warning.partition(". ")
    assert not any(method.partition(":")[0] in reason for method in worse)
    assert (advice or "tiny steps. A method may also") in reason


def test_too_few_steps_come_before_anything_else() -> None:
    runs = [
        make_run(method, loss, 80_000, steps=20, warmup=10)
        for method, loss in {"all_reduce": 3.1, "none": 3.0, "local_adamw": 3.2}.items()
    ]
    other = replace(runs[0], facts={"Machine": "another"})
    first, *_ = make_warnings([*runs, replace(other, facts={"Machine": "m"}), other])
    assert first.startswith("Too few steps: 20, of which the learning rate rises for 10. ")
    (worse,) = (text for text in make_conclusions(runs) if "Worse than no" in text)
    assert worse == (
        "Worse than no communication at all: all_reduce, local_adamw. After so few steps that says "
        "nothing about them."
    )
    assert not any(
        "Too few" in text for text in make_warnings([make_run("none", 3.0, 0, steps=60)])
    )


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({}, "355"),
        ({"starved": 0.09, "step_range_ms": 80.0}, "355"),
        ({"starved": 0.11}, "~400"),
        ({"step_range_ms": 90.0}, "~400"),
        ({"starved": 0.8, "step_ms": 1861.0}, "~2,000"),
    ],
)
def test_times_that_another_load_distorted_are_no_figures(
    change: dict[str, float], text: str
) -> None:
    assert BASELINE.figures is not None
    run = replace(BASELINE, figures=replace(BASELINE.figures, **{"step_ms": 355.2, **change}))
    assert cells([run, CONTROL], "all_reduce")["ms/step"] == text
    warnings = [w for w in make_warnings([run, CONTROL]) if "Milliseconds with a ~" in w]
    assert len(warnings) == text.count("~")
    assert all("(all_reduce)" in warning for warning in warnings)
    assert f">{text}<" in render_page([run, CONTROL])


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
    for row in make_table(runs).rows:
        assert all(cell in text for cell in texts(row)[:-1])
    assert "ValueError: rank <4> & more" in text


SEEDS = [
    make_run("all_reduce", 2.4, 20_000_000, seed=0),
    make_run("all_reduce", 2.6, 20_000_000, seed=1),
    make_run("sign", 2.5, 625_000, seed=0),
    make_run("sign", 2.9, 625_000, seed=1),
]


def test_seeds_are_shown_as_their_mean_and_each() -> None:
    baseline, sign = make_table(SEEDS).rows
    assert [texts(row)[:3] for row in (baseline, *baseline.seeds)] == [
        ["all_reduce", "2.500", "+0.000"],
        ["seed 0", "2.400", "+0.000"],
        ["seed 1", "2.600", "+0.000"],
    ]
    assert [texts(row)[:3] for row in (sign, *sign.seeds)] == [
        ["sign", "2.700", "+0.200"],
        ["seed 0", "2.500", "+0.100"],
        ["seed 1", "2.900", "+0.300"],
    ]


def test_a_method_is_compared_over_the_seeds_that_both_finished() -> None:
    failed = replace(SEEDS[1], figures=None, failure="RuntimeError: gone")
    baseline, sign = make_table([SEEDS[0], failed, *SEEDS[2:]]).rows
    assert texts(baseline)[1] == "2.400"
    assert not baseline.failed
    assert baseline.seeds[1].failed
    assert texts(baseline.seeds[1])[1] == "failed"
    assert texts(baseline.seeds[1])[-1] == "RuntimeError: gone"
    assert "1 of 2 failed" in texts(baseline)[-1]
    assert texts(sign)[1:3] == ["2.700", "+0.100"]


def test_a_seed_that_was_run_twice_is_two_runs() -> None:
    (row,) = make_table([GOOD, GOOD]).rows
    assert [texts(seed)[0] for seed in row.seeds] == ["run 1", "run 2"]


def test_points_between_evaluations_are_no_other_setting() -> None:
    assert len(group_runs([GOOD, make_run(GOOD.method, 2.5, 1, seed=1, eval_every=7)])) == 1


@pytest.mark.parametrize(
    ("other", "difference"),
    [
        (make_run("sign", 2.0, 1, steps=200), "(A: steps 100; B: steps 200)"),
        (
            replace(make_run("sign", 2.0, 1), facts={"Text": "a poem"}),
            "(A: text a book; B: text a poem)",
        ),
        (
            replace(make_run("sign", 2.0, 1), settings=LogSettings(0)),
            "(A: python -m benchmarks.compare; B: a training of your own)",
        ),
    ],
    ids=["steps", "text", "log"],
)
def test_mixed_settings_are_named_and_not_compared(other: Run, difference: str) -> None:
    runs = [BASELINE, GOOD, other]
    (warning,) = make_warnings(runs)
    assert warning.startswith(f"Mixed settings {difference}: ")
    names = [texts(row)[0] for row in make_table(runs).rows]
    assert names == ["all_reduce (A)", "sign+compressed_adam (A)", "sign (B)"]
    assert cells(runs, "sign (B)")["vs all-reduce"] == "-"
    assert warning in render_page(runs)
    console = Console(width=200, record=True, file=io.StringIO())
    print_table(runs, console)
    assert difference in console.export_text()


def test_one_setting_needs_no_warning() -> None:
    assert make_warnings([BASELINE, CONTROL, *SEEDS]) == []


def test_other_machines_and_versions_are_named() -> None:
    runs = [replace(GOOD, facts={"Machine": f"m{i}", "Versions": "1"}) for i in range(2)]
    (warning,) = make_warnings(runs)
    assert warning.startswith("Machines differ, ")


def test_curves_of_seeds_are_averaged_at_the_steps_they_share() -> None:
    _, sign = make_series(SEEDS)
    low, high = (run.curve for run in SEEDS[2:])
    assert sign.mean is not None
    assert [(point.step, point.loss) for point in sign.mean] == [
        (a.step, pytest.approx((a.loss + b.loss) / 2)) for a, b in zip(low, high, strict=True)
    ]
    shorter = replace(SEEDS[3], curve=high[1:])
    (series,) = make_series([SEEDS[2], shorter])
    assert [point.step for point in series.mean or []] == [high[1].step]
    assert [len(curve) for _, curve in series.seeds] == [2, 1]
    (series,) = make_series([replace(SEEDS[2], curve=low[:1]), shorter])
    assert series.mean is None


def test_a_seed_that_failed_is_no_part_of_the_mean_curve() -> None:
    failed = replace(SEEDS[3], figures=None, failure="diverged", curve=SEEDS[3].curve[:1])
    (series,) = make_series([SEEDS[2], failed])
    assert [point.step for point in series.mean or []] == [point.step for point in SEEDS[2].curve]


@pytest.mark.parametrize("count", [1, MAX_POINTS, MAX_POINTS + 1, 10 * MAX_POINTS + 7])
def test_a_long_curve_is_thinned_to_means(count: int) -> None:
    curve = [Point(step, float(step), step, step, float(step)) for step in range(1, count + 1)]
    (series,) = make_series([replace(GOOD, curve=curve)])
    points = series.mean or []
    assert count / 20 < len(points) <= MAX_POINTS
    assert [point.step for point in points] == sorted(point.step for point in points)
    assert abs(points[-1].loss - count) <= count / MAX_POINTS + 1
    assert ("means of consecutive" in render_page([replace(GOOD, curve=curve)])) == (
        count > MAX_POINTS
    )


def test_the_page_is_whole_when_methods_failed() -> None:
    facts = {"Command": "comm-hooks <compare>"}
    runs = [replace(run, facts=facts) for run in (BASELINE, CONTROL, GOOD, BAD, FAILED)]
    text = render_page(runs)
    assert "ValueError: rank &lt;4&gt; &amp; more" in text
    assert text.count("<dd>comm-hooks &lt;compare&gt;</dd>") == 1
    assert text.count('<tbody class="worse">') == text.count('<tbody class="failed">') == 1
    assert "4 finished, 1 failed" in text
    own = text.replace(get_plotlyjs(), "")
    assert re.findall(r'(?:src|href)="([^"]*)"', own) == ["data:,"]  # needs no other file


def test_a_report_on_failures_alone_can_be_written() -> None:
    assert "ValueError" in render_page([FAILED])


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

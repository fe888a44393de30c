"""The page and the table: of comparisons and of logs, in a real browser once."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.lab.runs import Figures, Point, Run, RunSpec
from benchmarks.report import app, read_runs, rows_of, write_page
from tests.refusing import refusal

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
HOSTILE = "</script><img src=x onerror='throw 1'>"
COUNTED = {"bytes_sent": 100, "bytes_received": 100, "seconds": 1.0}


def make_run(method: str, loss: float, sent: int = 8) -> Run:
    curve = [Point(r, loss + 1 / r, 0.5, sent * r, seconds=float(r)) for r in (1, 2, 4)]
    figures = Figures(loss, 100.0, 4.0, 4.0, sent, sent, drift=0.0, starved=0.5)
    return Run(RunSpec(method, {}, {"lr": 0.1}, 0), curve, figures=figures, facts={"Text": "t"})


RUNS = [
    make_run("all_reduce", 2.0),
    make_run("none", 2.5),
    make_run("topk", 2.7),
    make_run(HOSTILE, 2.1),
    Run(RunSpec("bf16", {}, {"lr": 0.1}, 0), [], "rank 1 was ended by SIGKILL"),
]


def test_rows_say_how_far_from_the_baseline_and_why_a_run_failed() -> None:
    rows = rows_of(RUNS)
    assert rows[2][:5] == ["topk", "2.700", "+0.700", "0", "~100"]
    assert rows[4][:2] == ["bf16", "failed"]
    assert rows[4][-1] == "rank 1 was ended by SIGKILL"


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")
def test_the_page_shows_the_table_and_the_curves_without_a_network(tmp_path: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api", reason="needs Playwright")
    write_page(RUNS, tmp_path / "report.html")
    complaints: list[Any] = []
    with playwright.sync_playwright() as started:
        # Without its sandbox where it refuses to have one, which is for root.
        arguments = ["--no-sandbox"] if os.getuid() == 0 else []
        browser = started.chromium.launch(executable_path=CHROMIUM, args=arguments)
        page = browser.new_page()
        page.on("pageerror", lambda error: complaints.append(error))
        page.on("request", lambda r: r.url.startswith("http") and complaints.append(r.url))
        page.goto((tmp_path / "report.html").as_uri())
        page.wait_for_selector(".scatterlayer")
        text = page.inner_text("body")
        assert page.locator(".scatterlayer .trace").count() == 3 * sum(
            bool(run.curve) for run in RUNS
        )
        browser.close()
    assert not complaints
    assert all(word in text for word in ("all_reduce", "2.700", "+0.700", "SIGKILL", "img src=x"))


def test_the_command_reads_comparisons_and_logs(tmp_path: Path) -> None:
    (tmp_path / "runs.jsonl").write_text("".join(run.to_json() + "\n" for run in RUNS))
    lines = [{"step": s, "loss": 4 - s, **COUNTED, "bytes_sent": 50 * s} for s in (1, 2, 3)]
    (tmp_path / "sign.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"step": 4, "lo')
    read = read_runs(tmp_path / "runs.jsonl", tmp_path / "sign.jsonl")
    assert read[:5] == RUNS
    assert read[5].figures == Figures(1.0, 0.0, 50.0, 0.0, 150, 100)
    out = tmp_path / "page.html"
    files = [str(tmp_path / name) for name in ("runs.jsonl", "sign.jsonl")]
    result = CliRunner().invoke(app, [*files, "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "Worse than no communication at all: topk" in result.stdout
    assert out.stat().st_size > 1e6


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no records in this file"),
        ("[1]", "line 1: not a JSON object"),
        ('{"step": 1', "line 1:"),
        ('{"step": 1, "loss": 2}', "bytes_sent must be a number from 0 to 2^63, got None"),
        (json.dumps({"step": 1, "loss": "x", **COUNTED}), "loss must be a number"),
        (json.dumps({"step": 1, **COUNTED}), "no record of 'x' has a loss"),
        ('{"curve": []}', "spec is missing"),
    ],
)
def test_a_bad_file_is_refused_with_its_line(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text(text)
    assert message in refusal(app, "python -m benchmarks.report", str(tmp_path / "x.jsonl"))


def test_a_log_that_diverged_has_failed(tmp_path: Path) -> None:
    lines = [{"step": 1, "loss": 2.0, **COUNTED}, {"step": 2, "loss": float("nan"), **COUNTED}]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (run,) = read_runs(tmp_path / "x.jsonl")
    assert run.failure == "diverged: the loss is nan at step 2"

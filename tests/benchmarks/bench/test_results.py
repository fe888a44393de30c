"""From blocks to figures, rows and files."""

import json
import statistics
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.bench.results import (
    Bench,
    Block,
    Candidate,
    Result,
    Timing,
    read_results,
    write_results,
)
from benchmarks.bench.table import make_notes, rows_of, write_markdown
from benchmarks.lab.plain import rebuild
from benchmarks.lab.runs import Figures, Point, Run, RunSpec, Settings

PUBLISHED = Path(__file__).parents[3] / "benchmarks/results"
RATES = ["none", "1gbit", "10mbit"]
FIGURES = Figures(2.5, 100.0, 10.0, 10.0, 100, 100)

times = st.floats(1, 1e5)
blocks = st.builds(Block, times, st.floats(2000, 1e7), st.floats(0, 1e7))
several = st.lists(blocks, min_size=2, max_size=5)


def candidate(milliseconds: float, wire: float = 0.0, bucket: int | None = None) -> Candidate:
    return Candidate(bucket, [Block(milliseconds, wire, 1000.0)] * 2)


def timing(rate: str, milliseconds: float, moved: float) -> Timing:
    control = candidate(200.0, wire=100.0)
    return Timing(rate, moved, 1, control, [candidate(milliseconds, wire=1170.0)])


def result(method: str, milliseconds: float, *, moved: float = 1e10, reached: int = 3) -> Result:
    curve = [Point(1, 3.0, 0.5, 5), Point(2, 2.5, 0.5, 10)]
    run = Run(RunSpec(method, {}, {"lr": 0.1}, 0), curve, figures=FIGURES)
    return Result(run, [timing(rate, milliseconds, moved) for rate in RATES[:reached]])


@given(several, st.lists(several, min_size=1, max_size=3))
def test_the_fastest_candidate_counts(control: list[Block], tried: list[list[Block]]) -> None:
    candidates = [Candidate(size, own) for size, own in enumerate(tried)]
    taken = Timing("none", 1e9, 1, Candidate(None, control), candidates)
    medians = [statistics.median(block.milliseconds for block in own) for own in tried]
    assert taken.best.milliseconds == min(medians)
    without = statistics.median(block.milliseconds for block in control)
    assert taken.ratio == pytest.approx(min(medians) / without)
    fastest = tried[medians.index(min(medians))]
    assert taken.counted_bytes == pytest.approx(
        statistics.fmean(block.counted_bytes for block in fastest)
    )
    # What the control has cross is the timing's own.
    own, other = (
        statistics.fmean(block.interface_bytes for block in each) for each in (fastest, control)
    )
    assert taken.interface_bytes == pytest.approx(max(0.0, own - other), abs=1e-3)
    assert rebuild(Timing, json.loads(json.dumps(asdict(taken)))) == taken


def test_a_row_has_what_was_reached() -> None:
    rows = rows_of([result("sign", 230.0), result("topk", 1460.4, reached=2)], RATES)
    assert rows == [
        ["sign", "2.500", "1 kB", "1.07 kB", "230 (1.15)", "230 (1.15)", "230 (1.15)"],
        ["topk", "2.500", "1 kB", "1.07 kB", "1,460 (7.30)", "1,460 (7.30)", "-"],
    ]
    failed = Result(Run(RunSpec("bf16", {}, {"lr": 0.1}, 0), failure="diverged"))
    assert rows_of([failed], RATES) == [["bf16", "failed", "-", "-", "-", "-", "-"]]
    assert "bf16 failed: diverged" in make_notes([failed], RATES)


def test_rates_beyond_the_machine_are_said_so() -> None:
    def warned(moved: float) -> list[str]:
        return [n for n in make_notes([result("sign", 230.0, moved=moved)], RATES) if "more" in n]

    assert not warned(0.8e9)
    assert warned(0.6e9) == [
        "1 Gbit/s is more than this machine moves: an all-reduce got 600 Mbit/s through at best, "
        "so that column measures the machine."
    ]
    # One method that was slow at it is not the machine.
    both = [result("sign", 230.0, moved=0.6e9), result("topk", 230.0, moved=0.9e9)]
    assert not [note for note in make_notes(both, RATES) if "more" in note]


def test_the_noise_and_the_bucket_sizes_are_told() -> None:
    tuned = result("all_reduce", 500.0)
    slow, fast = candidate(900.0, bucket=25), candidate(500.0, bucket=4)
    tuned.timings[1] = replace(tuned.timings[1], candidates=[slow, fast])
    notes = " ".join(make_notes([tuned, result("none", 206.0)], RATES))
    assert "itself: 1.03 to 1.03" in notes
    assert "shown: all_reduce, 1 Gbit/s: 4 MB." in notes


def test_a_busy_machine_is_told() -> None:
    def warned(milliseconds: float) -> list[str]:
        busy = result("sign", 230.0)
        busy.timings[1] = replace(busy.timings[1], control=candidate(milliseconds))
        return [note for note in make_notes([busy], RATES) if "other work" in note]

    assert not warned(250.0)
    assert "from 200 to 300 ms" in warned(300.0)[0]


def test_everything_is_in_the_files(tmp_path: Path) -> None:
    results = [result("sign", 230.0), result("topk", 240.0, reached=1)]
    results.append(Result(Run(RunSpec("bf16", {}, {"lr": 0.1}, 0), failure="diverged")))
    facts = {"Machine": "two cores", "Command": "python -m benchmarks.bench"}
    write_results(Bench(results, RATES, Settings(), facts), tmp_path / "results.json")
    whole = json.loads((tmp_path / "results.json").read_text())
    assert whole["facts"] == facts
    assert whole["links_bits_per_second"] == dict.fromkeys(RATES, 1e10)
    assert [method["spec"]["method"] for method in whole["methods"]] == ["sign", "topk", "bf16"]
    assert whole["methods"][2]["failure"] == "diverged"
    first = whole["methods"][0]["timings"][2]
    assert (first["rate"], first["ms_per_step"], first["ratio"]) == ("10mbit", 230.0, 1.15)
    assert len(first["candidates"][0]["blocks"]) == 2

    read = read_results(tmp_path / "results.json")
    assert (read.rates, read.settings, read.facts) == (RATES, Settings(), facts)
    for result_read, written in zip(read.results, results, strict=True):
        assert result_read.timings == written.timings
        assert result_read.run == written.run
    (tmp_path / "other.json").write_text(json.dumps({**whole, "version": 0}))
    with pytest.raises(ValueError, match=r"other\.json is of version 0"):
        read_results(tmp_path / "other.json")

    write_markdown(Bench(results, RATES, Settings(), facts), tmp_path / "results.md")
    page = (tmp_path / "results.md").read_text()
    assert "| `topk` | 2.500 | 1 kB | 1.07 kB | 240 (1.20) | - | - |" in page
    assert "| Machine | two cores |" in page


@pytest.mark.parametrize("folder", sorted(PUBLISHED.glob("bench*")), ids=lambda path: path.name)
def test_published_pages_are_made_of_their_records(folder: Path, tmp_path: Path) -> None:
    bench = read_results(folder / "results.json")
    write_markdown(bench, tmp_path / "results.md")
    assert (tmp_path / "results.md").read_text() == (folder / "results.md").read_text()

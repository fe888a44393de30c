"""Figures stand in one place, docs/results.md, and are only repeated elsewhere."""

import json
import re
import statistics
from collections.abc import Iterator

import pytest

from benchmarks.quality import runs as quality
from benchmarks.quality.methods import METHODS, controls
from benchmarks.quality.page import share_of
from benchmarks.quality.settings import PRESETS, Setting
from benchmarks.quality.tuning import Entry, Records, by_wanted
from benchmarks.tried import Row, make_rows, read_records
from tests.docs.pages import ROOT, Page

# Records and pages change together: compared before a release.
pytestmark = pytest.mark.slow

RESULTS = Page(ROOT / "docs/results.md")
RECORDS = ROOT / "benchmarks/results/tried"


def rows_by_method(page: Page) -> Iterator[tuple[str, list[str]]]:
    """Yield the rows of tables that name a method, which is the first code in them."""
    for row in page.table_rows():
        if methods := re.findall(r"`(.+?)`", " ".join(row)):
            yield methods[0], row


def as_in_results(row: Row, all_reduce: Row, seeds: int) -> list[str]:
    """Return what the page has of a method: all cells but the first."""
    kilobytes = row.sent_warm / 1e3
    sent = f"{kilobytes:,.{1 if kilobytes < 100 else 0}f} kB" if kilobytes else "0"
    gaps = [row.losses[seed] - all_reduce.losses[seed] for seed in row.losses]
    gap, each = f"{sum(gaps) / len(gaps):+.3f}", ", ".join(f"{gap:+.3f}" for gap in gaps)
    shown = [gap, each] if seeds > 1 else [gap]
    return [f"{row.loss:.3f}", *([""] * len(shown) if row is all_reduce else shown), sent]


@pytest.mark.parametrize(
    ("steps", "seeds", "begin", "end"),
    [
        (150, 3, "## One text, two ranks", "\n450 steps, where"),
        (450, 1, "\n450 steps, where", "\nWhat does less well"),
    ],
)
def test_losses_are_those_of_the_records(steps: int, seeds: int, begin: str, end: str) -> None:
    rows = {row.method: row for row in make_rows(read_records(RECORDS), steps)}
    section = RESULTS.path.read_text().partition(begin)[2].partition(end)[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    assert len(lines) >= 9
    for line in lines:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        row = rows[cells[0].strip("`")]
        assert len(row.losses) >= seeds
        assert cells[1:] == as_in_results(row, rows["all_reduce"], seeds)


def test_shares_kept_are_those_of_the_records() -> None:
    records = by_wanted(quality.read_records(ROOT / "benchmarks/results/quality/records.jsonl"))
    section = RESULTS.path.read_text().partition("\n## More ranks")[2].partition("\n## ")[0]
    titles = {preset.title: name for name, preset in PRESETS.items()}
    row = r"^\| (\d+) \(([\d.]+) bits\) \| (.*?)(, Muon)? \| (\d+) \| (\d+) \| (.*) \|$"
    lines = re.findall(row, section, flags=re.MULTILINE)
    assert len(lines) >= 16
    for ranks, bits, title, muon, batch, tokens, cells in lines:
        setting = Setting(titles[title], int(ranks), int(batch), float(tokens))
        options = [f"bits={bits}"] * (bits != "0.09") + ["muon=true"] * bool(muon)
        method = ":".join(["low_communication", *options])
        assert cells.split(" | ") == row_of(setting, method, records)[1:], title


def test_shares_of_other_methods_are_those_of_the_records() -> None:
    records = by_wanted(quality.read_records(ROOT / "benchmarks/results/quality/records.jsonl"))
    section = RESULTS.path.read_text().partition("\n## More ranks")[2].partition("\n## ")[0]
    titles = {preset.title: name for name, preset in PRESETS.items()}
    row = r"^\| `(.*?)` \| ([\d.]+) \| (\d+) \| (.*?) \| (\d+) \| (.*) \|$"
    lines = re.findall(row, section, flags=re.MULTILINE)
    assert len(lines) >= 10
    for method, bits, ranks, title, tokens, cells in lines:
        setting = Setting(titles[title], int(ranks), 6, float(tokens))
        assert [bits, *cells.split(" | ")] == row_of(setting, method, records), (method, title)


def row_of(setting: Setting, method: str, records: Records) -> list[str]:
    """Return bits, the losses of all-reduce, none and the method, and the share kept."""
    none, all_reduce = controls(method)
    entries = {
        name: Entry(setting, name, METHODS[name], 3, range(3))
        for name in (all_reduce, none, method)
    }
    found = {(setting, name): entry.finished(records) for name, entry in entries.items()}
    losses = [f"{statistics.mean(r.judged for r in runs.values()):.3f}" for runs in found.values()]
    bits = statistics.mean(run.bits for run in found[setting, method].values())
    return [f"{bits:.2g}", *losses, str(share_of(setting, method, found))]


def test_noise_scales_are_those_of_the_record() -> None:
    record = json.loads((ROOT / "benchmarks/results/quality/noise_scale.json").read_text())
    section = RESULTS.path.read_text().partition("\n### How noisy")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| ([A-Z].*?) \| (.*) \|$", section, flags=re.MULTILINE)
    assert len(rows) == len(record["settings"]) >= 4
    for (title, cells), setting in zip(rows, record["settings"], strict=True):
        assert title == PRESETS[setting["task"]].title
        points = setting["points"]
        scales = [f"{p['noise_scale']:,.0f}" if p["noise_scale"] else "-" for p in points]
        skews = [f"{p['skew']:.2f}" if p["noise_scale"] else "-" for p in points]
        assert cells.split(" | ") == [*scales, *skews], title


def test_the_readme_repeats_the_rows_of_four_ranks() -> None:
    row = r"^\| ([A-Z].*?) \| (\d\.\d{3} \|.* %) \|$"
    lines = re.findall(row, (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    results = RESULTS.path.read_text()
    assert len(lines) == 4
    for title, cells in lines:
        assert f"| 4 (0.09 bits) | {title} | 6 | 2 | {cells} |" in results, title


def test_choosing_has_the_ranges_of_the_results() -> None:
    choosing = (ROOT / "docs/choosing.md").read_text()
    results = RESULTS.path.read_text()
    row = r"^\| (\d+) \([\d.]+ bits\) \| [^|]*(?<!Muon) \| 6 \| 2 \|.*\| (\d+)(?: ± \d+)? % \|$"
    rounds = re.findall(row, results, flags=re.MULTILINE)
    few = [int(kept) for ranks, kept in rounds if ranks in ("2", "4")]
    many = [int(kept) for ranks, kept in rounds if ranks == "8"]
    assert (len(few), len(many)) == (9, 4)
    expected = f"{min(few)} to {max(few)} % with 2 and 4 ranks; {min(many)} to {max(many)} % with 8"
    assert f"| {expected} |" in choosing
    row = r"^\| `sign\+local_variance_adam` \| ([\d.]+) \|.*\| (\d+) ± \d+ % \|$"
    bits, kept = zip(*re.findall(row, results, flags=re.MULTILINE), strict=True)
    numbers, shares = sorted(map(float, bits)), sorted(map(int, kept))
    expected = f"{numbers[0]:g} to {numbers[-1]:g} | {shares[0]} to {shares[-1]} %"
    assert f"| {expected} |" in choosing
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert f"which keeps {shares[0]} to {shares[-1]} % with 4 and 8 ranks" in readme
    row = r"^\| `quantize:bits=2` \| ([\d.]+) \|.*\| (\d+) ± \d+ % \|$"
    bits, kept = zip(*re.findall(row, results, flags=re.MULTILINE), strict=True)
    shares = sorted(map(int, kept))
    expected = f"{min(bits)} to {max(bits)} | {shares[0]} to {shares[-1]} % with 4 ranks"
    assert f"| {expected} |" in choosing
    assert f"which keeps {shares[0]} to {shares[-1]} % with 4 ranks" in readme


def test_the_papers_are_counted() -> None:
    page = Page(ROOT / "docs/papers.md")
    sections = page.path.read_text().split("\n## ")
    states = ("repeated small", "repeated", "not yet", "out of reach")
    totals = dict.fromkeys(states, 0)
    for section in sections[1:]:
        found = dict.fromkeys(states, 0)
        for line in section.splitlines():
            cells = [cell.strip() for cell in line.split("|")[1:-1]]
            if len(cells) >= 5 and cells[0] not in ("item", "---"):
                state = cells[2].strip("* ")
                found[next(s for s in states if state.startswith(s))] += 1
        name = section.partition(" (")[0]
        row = next(line for line in sections[0].splitlines() if line.startswith(f"| {name} "))
        counts = [int(n) for n in re.findall(r"\| (\d+)", row)]
        shown = [found[s] for s in ("repeated", "repeated small", "not yet", "out of reach")]
        assert counts == [*shown, sum(shown)], name
        totals = {s: totals[s] + found[s] for s in states}
    row = next(line for line in sections[0].splitlines() if line.startswith("| all "))
    shown = [totals[s] for s in ("repeated", "repeated small", "not yet", "out of reach")]
    assert [int(n) for n in re.findall(r"\| (\d+)", row)] == [*shown, sum(shown)]


def test_what_does_less_well_is_that_of_the_records() -> None:
    rows = {row.method: row for row in make_rows(read_records(RECORDS), 150)}
    section = RESULTS.path.read_text().partition("\nWhat does less well")[2].partition("\n\n##")[0]
    lines = re.findall(r"^\| `(.+?)` \|.*\| (\S+) \|$", section, flags=re.MULTILINE)
    assert len(lines) >= 5
    for method, loss in lines:
        assert len(rows[method].losses) >= 3, method
        assert loss == f"{rows[method].loss:.3f}", method
    controls = [f"{rows[name].loss:.3f}" for name in ("all_reduce", "none")]
    assert re.findall(r"\d\.\d{3}", section)[:2] == controls


def test_other_pages_repeat_figures_that_the_results_have() -> None:
    measured = set(re.findall(r"\d\.\d{3}", RESULTS.path.read_text()))
    for name in ("docs/choosing.md", "docs/concepts.md", "README.md"):
        text = (ROOT / name).read_text()
        assert set(re.findall(r"\d\.\d{3}", text)) <= measured, name


def test_times_are_those_of_the_published_bench() -> None:
    """A ratio stands in brackets there; a time is followed by its unit here."""
    published: dict[str, set[str]] = {}
    for method, row in rows_by_method(Page(ROOT / "benchmarks/results/bench/results.md")):
        cells = {part.strip("()") for cell in row for part in (cell, *cell.split())}
        published.setdefault(method, set()).update(cells)
    times = [(m, row) for m, row in rows_by_method(RESULTS) if row[-1].endswith((" s", "-"))]
    assert len(times) >= 9
    for method, row in times:
        assert {cell.removesuffix(" s") for cell in row[1:]} <= published[method], method

"""Figures stand in one place, docs/results.md, and are only repeated elsewhere."""

import json
import re
import statistics
from collections.abc import Iterator

import pytest

from benchmarks.lab.runs import RunStore
from benchmarks.quality.__main__ import find
from benchmarks.quality.runs import Found, bits_of, controls, quality_of
from benchmarks.quality.settings import PRESETS, Setting
from tests.docs.pages import ROOT, Page

# Records and pages change together: compared before a release.
pytestmark = pytest.mark.slow

RESULTS = Page(ROOT / "docs/results.md")
TRIED = (ROOT / "benchmarks/results/tried.md").read_text()
QUALITY = find(RunStore(ROOT / "benchmarks/results/quality/records.jsonl"))


def rows_by_method(page: Page) -> Iterator[tuple[str, list[str]]]:
    """Yield the rows of tables that name a method, which is the first code in them."""
    for row in page.table_rows():
        if methods := re.findall(r"`(.+?)`", " ".join(row)):
            yield methods[0], row


def tried(steps: int) -> dict[str, list[str]]:
    """Return the cells of the table of tried methods after that many steps, by method."""
    section = TRIED.partition(f"\n## {steps} steps")[2].partition("\n## ")[0]
    lines = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| `")]
    return {method.strip().strip("`"): [cell.strip() for cell in row] for method, *row in lines}


@pytest.mark.parametrize(
    ("steps", "seeds", "begin", "end"),
    [
        (150, 3, "## One text, two ranks", "\n450 steps, where"),
        (450, 1, "\n450 steps, where", "\nWhat does less well"),
    ],
)
def test_losses_are_those_of_the_records(steps: int, seeds: int, begin: str, end: str) -> None:
    rows = tried(steps)
    section = RESULTS.path.read_text().partition(begin)[2].partition(end)[0]
    lines = [line for line in section.splitlines() if line.startswith("| `")]
    assert len(lines) >= 9
    for line in lines:
        method, loss, gap, *others = (cell.strip() for cell in line.strip("|").split("|"))
        _, sent, mean, each, of_all_reduce, *_ = rows[method.strip("`")]
        assert loss == mean
        assert len(each.split(", ")) >= seeds
        assert gap in (of_all_reduce, "")
        kilobytes = float(sent.replace(",", ""))
        shown = f"{kilobytes:,.{1 if kilobytes < 100 else 0}f} kB" if kilobytes else "0"
        assert others[-1] == shown


def test_shares_kept_are_those_of_the_records() -> None:
    section = RESULTS.path.read_text().partition("\n## More ranks")[2].partition("\n## ")[0]
    titles = {preset.title: name for name, preset in PRESETS.items()}
    row = r"^\| (\d+) \(([\d.]+) bits\) \| (.*?)(, Muon)? \| (\d+) \| (\d+) \| (.*) \|$"
    lines = re.findall(row, section, flags=re.MULTILINE)
    assert len(lines) >= 16
    for ranks, bits, title, muon, batch, tokens, cells in lines:
        setting = Setting(titles[title], int(ranks), int(batch), float(tokens))
        options = [f"bits={bits}"] * (bits != "0.09") + ["muon=true"] * bool(muon)
        method = ":".join(["low_communication", *options])
        assert cells.split(" | ") == row_of(setting, method, QUALITY)[1:], title


def test_shares_of_other_methods_are_those_of_the_records() -> None:
    section = RESULTS.path.read_text().partition("\n## More ranks")[2].partition("\n## ")[0]
    titles = {preset.title: name for name, preset in PRESETS.items()}
    row = r"^\| `(.*?)` \| ([\d.]+) \| (\d+) \| (.*?) \| (\d+) \| (.*) \|$"
    lines = re.findall(row, section, flags=re.MULTILINE)
    assert len(lines) >= 10
    for method, bits, ranks, title, tokens, cells in lines:
        setting = Setting(titles[title], int(ranks), 6, float(tokens))
        assert [bits, *cells.split(" | ")] == row_of(setting, method, QUALITY), (method, title)


def row_of(setting: Setting, method: str, found: Found) -> list[str]:
    """Return bits, the losses of all-reduce, none and the method, and the quality kept."""
    none, all_reduce = controls(method)
    outcomes = [found[setting, name] for name in (all_reduce, none, method)]
    losses = [f"{statistics.mean(outcome.losses):.3f}" for outcome in outcomes]
    bits = statistics.mean(bits_of(run) for run in outcomes[-1].runs)
    return [f"{bits:.2g}", *losses, str(quality_of(setting, method, found))]


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
    opening, *papers = (ROOT / "docs/papers.md").read_text().split("\n## ")
    totals = [0] * 4
    for paper in papers:
        rows = [[cell.strip(" *") for cell in line.split("|")[1:-1]] for line in paper.splitlines()]
        small = sum(len(row) == 5 and row[2].startswith("repeated small") for row in rows)
        repeated = sum(len(row) == 5 and row[2].startswith("repeated") for row in rows) - small
        reach = re.search(r"^Out of reach: (.*?)\.$", paper, flags=re.MULTILINE | re.DOTALL)
        counts = [repeated, small, reach[1].count(";") + 1 if reach else 0]
        counts.append(sum(counts))
        assert counted(opening, paper.partition(" (")[0]) == counts, paper[:40]
        totals = [a + b for a, b in zip(totals, counts, strict=True)]
    assert counted(opening, "all") == totals


def counted(text: str, name: str) -> list[int]:
    row = next(line for line in text.splitlines() if line.startswith(f"| {name} "))
    return [int(n) for n in re.findall(r"\| (\d+)", row)]


def test_what_does_less_well_is_that_of_the_records() -> None:
    rows = tried(150)
    section = RESULTS.path.read_text().partition("\nWhat does less well")[2].partition("\n\n##")[0]
    lines = re.findall(r"^\| `(.+?)` \|.*\| (\S+) \|$", section, flags=re.MULTILINE)
    assert len(lines) >= 5
    for method, loss in lines:
        assert loss == rows[method][2], method
    expected = [rows[name][2] for name in ("all_reduce", "none")]
    assert re.findall(r"\d\.\d{3}", section)[:2] == expected


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

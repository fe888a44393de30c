"""Figures stand in one place, docs/results.md, and are only repeated elsewhere."""

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


def test_the_readme_repeats_the_rows_of_four_ranks() -> None:
    row = r"^\| ([A-Z].*?) \| (\d\.\d{3} \|.* %) \|$"
    lines = re.findall(row, (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    results = RESULTS.path.read_text()
    assert len(lines) == 4
    for title, cells in lines:
        assert f"| 4 (0.09 bits) | {title} | 6 | 2 | {cells} |" in results, title


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

"""Figures stand in one place, docs/results.md, and are only repeated elsewhere."""

import re
from collections.abc import Iterator

import pytest

from benchmarks.lab.runs import RunStore
from benchmarks.quality.__main__ import find
from benchmarks.quality.tables import PAGES, with_tables
from tests.docs.pages import ROOT, Page

# Records and pages change together: compared before a release.
pytestmark = pytest.mark.slow

RESULTS = Page(ROOT / "docs/results.md")
TRIED = (ROOT / "benchmarks/results/tried.md").read_text()


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


def test_tables_of_the_quality_are_those_of_the_records() -> None:
    found = find(RunStore(ROOT / "benchmarks/results/quality/records.jsonl"))
    for name in PAGES:
        text = (ROOT / name).read_text()
        assert with_tables(text, found) == text, (
            f"{name}: run python -m benchmarks.quality --jobs 0"
        )


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

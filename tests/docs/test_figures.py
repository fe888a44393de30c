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


def test_tables_of_the_quality_are_those_of_the_records() -> None:
    found = find(RunStore(ROOT / "benchmarks/results/quality/records.jsonl"))
    for name in PAGES:
        text = (ROOT / name).read_text()
        assert with_tables(text, found) == text, (
            f"{name}: run python -m benchmarks.quality --jobs 0"
        )


def test_other_pages_repeat_figures_that_the_results_have() -> None:
    measured = set(re.findall(r"\d\.\d{3}", RESULTS.path.read_text() + TRIED))
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

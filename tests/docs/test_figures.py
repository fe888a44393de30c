"""Figures stand in one place, docs/results.md, and are only repeated elsewhere."""

import re
from collections.abc import Iterator

import pytest

from benchmarks.lab.runs import RunStore
from benchmarks.quality.__main__ import find
from benchmarks.quality.tables import PAGES, with_tables
from tests.docs.pages import ROOT, Page, pages

RESULTS = Page(ROOT / "docs/results.md")
TRIED = (ROOT / "benchmarks/results/tried.md").read_text()


def rows_by_method(page: Page) -> Iterator[tuple[str, list[str]]]:
    """Yield the rows of tables that name a method, which is the first code in them."""
    for row in page.table_rows():
        if methods := re.findall(r"`(.+?)`", " ".join(row)):
            yield methods[0], row


@pytest.mark.slow  # every search of the records is gone through again
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


def test_shares_in_sentences_are_those_of_the_tables() -> None:
    """Those with a spread, and the ends of ranges of shares kept."""
    cells = " ".join(cell for row in RESULTS.table_rows() for cell in row)
    measured = dict(re.findall(r"((-?\d+) ± \d+) %", cells))
    for page in pages():
        text = re.sub(r"^\|.*", "", page.path.read_text(), flags=re.MULTILINE)
        assert set(re.findall(r"-?\d+ ± \d+(?= %)", text)) <= set(measured), page.path.name
        for low, high in re.findall(r"keeps? (\d+) to (\d+) %", " ".join(text.split())):
            assert {low, high} <= set(measured.values()), page.path.name


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


CONTROL = re.compile(r"same optimizer|own optimizer|AdamW|LaProp|Muon")
_IN_SENTENCE = r"(?:[^.;]|\.(?=\d))*"
_PART = r"(?:\d\s*%|\b(?:tenth|quarter|third|half)\s+of\s+(?:the\s+gain|all-reduce))"
SHARE = re.compile(
    rf"\b(?:keeps?|kept|keeping|los[et]s?)\b{_IN_SENTENCE}{_PART}|{_PART}{_IN_SENTENCE}\bkept\b"
)


def shares_without_control(text: str) -> list[str]:
    """Return the paragraphs, items and tables that print a share kept without its control."""
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    prose = re.sub(r"`benchmarks/results/.*?`", "", prose)
    blocks = re.split(r"\n\s*\n|\n(?=\* )", prose)
    found = []
    for block in blocks:
        if block.lstrip().startswith("|"):
            head, *rows = block.strip().splitlines()
            is_share = "kept" in head and "%" in "".join(rows)
            named = bool(CONTROL.search(head))
        else:
            is_share, named = bool(SHARE.search(block)), bool(CONTROL.search(block))
        if is_share and not named:
            found.append(block)
    return found


_OWN = [Page(path) for path in sorted((ROOT / "benchmarks/results").glob("*.md"))]


@pytest.mark.parametrize("page", [*pages(), *_OWN], ids=lambda page: page.path.name)
def test_no_page_prints_a_share_without_naming_its_control(page: Page) -> None:
    assert shares_without_control(page.path.read_text()) == []


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("With four ranks it keeps 92 to 109 %.", 1),
        ("With four ranks it keeps 92 to 109 % of all-reduce with AdamW.", 0),
        ("* one\n* keeps 76 to\n  101 % with 4 ranks\n* AdamW", 1),
        ("| data | kept |\n|---|---|\n| text | 92 % |", 1),
        ("| data | kept, same optimizer |\n|---|---|\n| text | 92 % |", 0),
        ("| data | kept |\n|---|---|\n| AdamW | 92 % |", 1),
        ("Residuals keep what is not sent. Of 100 % nothing is said.", 0),
        ("It keeps, with 0.17 M parameters, 44 % of the gain.", 1),
        ("With eight ranks it lost a tenth of the gain.", 1),
        ("With eight ranks it lost a tenth of the gain of all-reduce with LaProp.", 0),
    ],
)
def test_a_share_is_told_from_other_figures(text: str, count: int) -> None:
    assert len(shares_without_control(text)) == count

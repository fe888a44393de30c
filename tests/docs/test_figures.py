"""Figures stand in one place, the README, and are only repeated elsewhere."""

import re
from collections.abc import Iterator

from tests.docs.pages import ROOT, Page

README = Page(ROOT / "README.md")
_FIGURE = re.compile(r"\**[+-]?\d[\d,]*\.?\d*(?: [kM]B)?\**")


def rows_by_method(page: Page) -> Iterator[tuple[str, list[str]]]:
    """Yield the rows of tables that name a method, which is the first code in them."""
    for row in page.table_rows():
        if methods := re.findall(r"`(.+?)`", " ".join(row)):
            yield methods[0], row


def figures(row: list[str]) -> list[str]:
    return [cell for cell in row if _FIGURE.fullmatch(cell)]


def test_choosing_repeats_the_figures_of_the_readme() -> None:
    measured = [(method, set(row)) for method, row in rows_by_method(README)]
    repeated = [
        (method, figures(row))
        for method, row in rows_by_method(Page(ROOT / "docs/choosing.md"))
        if figures(row)
    ]
    assert len(repeated) >= 10
    for method, cells in repeated:
        assert any(name == method and set(cells) <= row for name, row in measured), (method, cells)


def test_other_pages_repeat_figures_that_the_readme_has() -> None:
    in_readme = set(re.findall(r"\d\.\d{3}", README.path.read_text()))
    for name in ("choosing", "concepts"):
        text = (ROOT / f"docs/{name}.md").read_text()
        assert set(re.findall(r"\d\.\d{3}", text)) <= in_readme, name


def test_times_are_those_of_the_published_bench() -> None:
    """A ratio stands in brackets there; a time is followed by its unit here."""
    published: dict[str, set[str]] = {}
    for method, row in rows_by_method(Page(ROOT / "benchmarks/results/bench/results.md")):
        cells = {part.strip("()") for cell in row for part in (cell, *cell.split())}
        published.setdefault(method, set()).update(cells)
    times = [(m, row) for m, row in rows_by_method(README) if row[-1].endswith((" s", "-"))]
    assert len(times) >= 9
    for method, row in times:
        assert {cell.removesuffix(" s") for cell in row[1:]} <= published[method], method

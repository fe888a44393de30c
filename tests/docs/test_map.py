"""The map of the code leads to files that exist, and the page of methods has every method."""

import re

import pytest

from comm_hooks.config import COMPRESSORS, MEMORIES
from tests.docs.pages import ROOT, Page

_QUESTIONS = 12
_MOST_FILES = 2


def test_every_question_is_answered_by_two_files_at_most() -> None:
    rows = [row for row in Page(ROOT / "CONTRIBUTING.md").table_rows() if row[0].endswith("?")]
    assert len(rows) >= _QUESTIONS
    for question, answer in rows:
        files = [name for name in re.findall(r"`([^`]+)`", answer) if " " not in name]
        assert 1 <= len(files) <= _MOST_FILES, question
        assert all((ROOT / file).exists() for file in files), answer


def test_the_tree_has_every_package() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    tree = text.partition("## Find your way")[2].partition("| question")[0]
    for package in ("comm_hooks", "optim", "benchmarks"):
        for folder in (ROOT / package).iterdir():
            if (folder / "__init__.py").exists() and not folder.is_symlink():
                assert re.search(rf"\b{folder.name}\b", tree), folder


@pytest.mark.parametrize("name", [*COMPRESSORS, *(kind.__name__ for kind in MEMORIES.values())])
def test_the_page_of_methods_names(name: str) -> None:
    rows = Page(ROOT / "docs/methods.md").table_rows()
    assert any(row[0] == f"`{name}`" for row in rows)

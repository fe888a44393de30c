"""The page of troubleshooting explains messages that exist."""

import ast
import re

import pytest

from tests.docs.pages import ROOT, Page

GAP = "…"
"""The place of a value in a message."""


def explained() -> list[str]:
    rows = [row for row in Page(ROOT / "docs/troubleshooting.md").table_rows() if len(row) == 2]
    return [code for row in rows for code in re.findall(r"`([^`]+)`", row[0])]


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Return every text in the source of the library, with :data:`GAP` for each value."""
    files = [*(ROOT / "comm_hooks").rglob("*.py"), *(ROOT / "optim").rglob("*.py")]
    return [
        _text(node)
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, (ast.JoinedStr, ast.Constant)) and " " in _text(node)
    ]


def explains(entry: str, message: str) -> bool:
    """Return whether an entry is a part of a message, gaps standing for anything."""
    parts = (re.escape(part.strip()) for part in entry.strip(GAP).split(GAP))
    return re.search(".*?".join(parts), message, flags=re.DOTALL) is not None


@pytest.mark.parametrize("entry", explained())
def test_an_explanation_is_of_a_message(entry: str, texts: list[str]) -> None:
    assert len(entry) >= 10, f"{entry!r} could be a part of anything"
    assert any(explains(entry, text) for text in texts), f"no message has {entry!r}"


def test_an_explanation_is_a_part_of_a_message() -> None:
    assert explains("the state was saved … a memory", "x: the state was saved with a memory, but")
    assert not explains("a memory … the state", "the state was saved with a memory, but")
    assert not explains("the states were saved", "the state was saved")


def _text(node: ast.expr) -> str:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) for part in node.values)
    return GAP

"""Every message that users can meet is explained, and no message that nobody can."""

import re
from pathlib import Path

from comm_hooks.config import unknown
from tests.docs.messages import GAP, messages
from tests.docs.pages import ROOT, Page

# They explain theirs on their own pages.
_ELSEWHERE = {"frameworks", "launchers", "mpi.py"}
_SHORTEST = 10


def explained() -> list[str]:
    page = Page(ROOT / "docs/troubleshooting.md")
    tables = [row for row in page.table_rows() if len(row) == 2]
    return [code for row in tables for code in re.findall(r"`([^`]+)`", row[0])]


def written() -> list[tuple[str, str]]:
    """Return the messages of the core, without the name or value that they begin with."""
    files: list[Path] = []
    for folder in ("comm_hooks", "optim"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            parts = set(file.relative_to(ROOT).parts)
            if ("ddp" in parts or not _ELSEWHERE & parts) and not _is_linked(file):
                files.append(file)
    found = [*messages(files), ("config.py", unknown(GAP, GAP, [GAP]))]
    return [(where, re.sub(rf"^({GAP}(: )?)+ ?", "", text)) for where, text in found]


def explains(entry: str, message: str) -> bool:
    """Return whether an entry is the beginning of a message, gaps standing for anything."""
    pattern = ".*?".join(re.escape(part.strip()) for part in entry.split(GAP))
    return re.match(pattern, message) is not None


def test_every_message_is_explained() -> None:
    entries = explained()
    missing = [
        f"{where}: {text}"
        for where, text in written()
        if not any(explains(entry, text) for entry in entries)
    ]
    assert not missing, "not on docs/troubleshooting.md:\n" + "\n".join(missing)


def test_every_explanation_is_of_a_message() -> None:
    texts = [text for _, text in written()]
    assert len(texts) > 90
    for entry in explained():
        assert len(entry) >= _SHORTEST, f"{entry!r} could be the beginning of anything"
        assert any(explains(entry, text) for text in texts), f"nobody says {entry!r}"


def test_an_explanation_is_the_beginning_of_a_message() -> None:
    assert explains("the state was saved … a memory", "the state was saved with a memory, but")
    assert not explains("a memory, but", "the state was saved with a memory, but")
    assert not explains("the states were saved", "the state was saved")


def _is_linked(file: Path) -> bool:
    return any(parent.is_symlink() for parent in file.parents if parent.is_relative_to(ROOT))

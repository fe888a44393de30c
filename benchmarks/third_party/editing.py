"""Edits of whole lines, found by how a line begins."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Edit:
    """A line that takes the place of another, or follows it.

    Attributes:
        at: the line of the script, or how it begins, without its indentation.
        new: what is written there, indented like that line; several lines with line breaks.
        after: keep the line and write behind it.
        file: another file than the script itself, relative to the script's folder.
    """

    at: str
    new: str
    after: bool = False
    file: str | None = None


def edited(text: str, edits: Sequence[Edit], name: str) -> str:
    """Return the text with the edits made.

    Raises:
        ValueError: unless each is of exactly one line: the sources are then of another version.
    """
    lines = text.splitlines()
    for edit in edits:
        found = [i for i, line in enumerate(lines) if line.strip() == edit.at]
        found = found or [i for i, line in enumerate(lines) if line.strip().startswith(edit.at)]
        if len(found) != 1:
            raise ValueError(
                f"{name} has {len(found)} lines that begin with {edit.at!r}, not one: it is of "
                "another version than that of the page"
            )
        (index,) = found
        indentation = lines[index][: len(lines[index]) - len(lines[index].lstrip())]
        new = [indentation + line for line in edit.new.splitlines()]
        lines[index : index + 1] = [lines[index], *new] if edit.after else new
    return "\n".join(lines) + "\n"

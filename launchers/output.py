"""Where all commands print, and where they write."""

import tempfile
from pathlib import Path

from rich.console import Console

_LOG_WIDTH = 140


def make_console(*, quiet: bool = False) -> Console:
    """Return the console to print on; with ``quiet`` it prints nothing."""
    console = Console(quiet=quiet)
    # Where nobody looks at a terminal, its width is no limit, and logs should not be wrapped.
    return console if console.is_terminal else Console(width=_LOG_WIDTH, quiet=quiet)


def prepare_folder(out: Path, *inner: str) -> None:
    """Make the folder for results, and find out now rather than in ten minutes if that cannot be.

    Args:
        out: what ``--out`` says.
        inner: names of folders to make in it.

    Raises:
        ValueError: if nothing can be written there; the message names ``--out``.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name in inner:
            (out / name).mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise ValueError(
            f"--out {out}: cannot write there ({error.strerror}); give another folder"
        ) from None

"""Where all commands print, and where they write."""

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console
from rich.text import Text

BAD_INPUT = 2
"""The exit code for what a user wrote."""

_LOG_WIDTH = 140


def make_console(*, quiet: bool = False) -> Console:
    """Return the console to print on; with ``quiet`` it prints nothing."""
    console = Console(quiet=quiet)
    # Where nobody looks at a terminal, its width is no limit, and logs should not be wrapped.
    return console if console.is_terminal else Console(width=_LOG_WIDTH, quiet=quiet)


def say(line: str, console: Console | None = None) -> None:
    """Print a line as it is, however long."""
    (console or make_console()).print(Text(line), soft_wrap=True)


def complain(command: str, message: object) -> None:
    """Tell what is wrong, in one line on standard error."""
    typer.echo(f"comm-hooks {command}: {message}", err=True)


def require_positive(options: Mapping[str, float | None]) -> None:
    """Raise ``ValueError`` for an option that is given and not above 0."""
    for option, value in options.items():
        if value is not None and not value > 0:
            raise ValueError(f"{option} must be positive, got {value:g}")


@contextmanager
def refusing(command: str, code: int = BAD_INPUT) -> Iterator[None]:
    """Turn a ``ValueError`` into one line and an exit code."""
    try:
        yield
    except ValueError as error:
        complain(command, error)
        raise typer.Exit(code) from None


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

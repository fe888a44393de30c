"""How all commands print, write and end."""

import signal
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console
from rich.text import Text

# Exit codes.
FAILED = 1
BAD_INPUT = 2
SKIPPED = 77  # as automake and others have it
INTERRUPTED = 130  # 128 + SIGINT, as shells have it

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
    typer.echo(f"{command}: {message}", err=True)


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


class Interruption:
    """Lets what is finished be reported when the rest is interrupted.

    Being asked to end (by timeout, CI or a scheduler) is treated as Ctrl-C is.

    Example::

        >>> with Interruption() as interruption:
        ...     raise KeyboardInterrupt
        >>> interruption.happened
        True
    """

    happened = False

    def __enter__(self) -> "Interruption":
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        self.happened = kind is KeyboardInterrupt
        return self.happened


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

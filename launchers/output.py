"""Printing, checks of options, and exit codes, common to all commands."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.text import Text

# Exit codes.
FAILED = 1
BAD_INPUT = 2

_LOG_WIDTH = 140


def make_console() -> Console:
    """Return a console for standard output."""
    console = Console()
    # Where nobody looks at a terminal, its width is no limit, and logs should not be wrapped.
    return console if console.is_terminal else Console(width=_LOG_WIDTH)


def say(line: str, console: Console | None = None) -> None:
    """Print a line of any length without wrapping or markup."""
    (console or make_console()).print(Text(line), soft_wrap=True)


def complain(command: str, message: object) -> None:
    """Print "command: message" in one line on standard error."""
    typer.echo(f"{command}: {message}", err=True)


def require_positive(options: Mapping[str, float | None]) -> None:
    """Raise ``ValueError`` for an option with a value that is not above 0; None is no value."""
    for option, value in options.items():
        if value is not None and not value > 0:
            raise ValueError(f"{option} must be positive, got {value:g}")


@contextmanager
def refusing(command: str, code: int = BAD_INPUT) -> Iterator[None]:
    """Return a context that turns a ``ValueError`` into one line on stderr and an exit code."""
    try:
        yield
    except ValueError as error:
        complain(command, error)
        raise typer.Exit(code) from None

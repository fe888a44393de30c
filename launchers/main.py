"""The ``comm-hooks`` command.

A subcommand's options are imported when it is asked for, and what does the work, torch among it,
when it runs: ``commands.NAME``, then ``NAME.run``.
"""

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

_missing = [name for name in ("typer", "rich") if not importlib.util.find_spec(name)]
if _missing:
    print(
        f"comm-hooks: the command line needs {', '.join(_missing)}: "
        'pip install "comm-hooks[launch]"',
        file=sys.stderr,
    )
    raise SystemExit(2)

import typer  # noqa: E402
import typer.core  # noqa: E402
import typer.main  # noqa: E402

_COMMANDS = {
    # The extra with what the command imports, and what it does.
    "launch": ("launch", "Start a training script on this node of several."),
    "preflight": ("launch", "Check that every node is ready, and that they reach each other."),
    "advise": ("launch", "Say which method pays off for a step and a link."),
}


class _Commands(typer.core.TyperGroup):
    """Imports only the subcommand that runs: nodes that train need no matplotlib."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_COMMANDS)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        # What the commands say of themselves would take all that they import.
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in _COMMANDS.items()])

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in _COMMANDS:
            return None
        path = f"comm_hooks.launchers.commands.{cmd_name}"
        function = getattr(importlib.import_module(path), cmd_name)
        # What follows a script's name belongs to the script, even if it looks like our option.
        settings = {"allow_interspersed_args": False}
        single = typer.Typer(
            add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
        )
        single.command(cmd_name, context_settings=settings)(_explaining(cmd_name, function))
        return typer.main.get_command(single)


def _explaining(command: str, function: Callable[..., None]) -> Callable[..., None]:
    """Return the command, which says what is missing if it cannot be imported."""

    @functools.wraps(function)
    def run(**arguments: Any) -> None:
        try:
            importlib.import_module(f"comm_hooks.launchers.{command}.run")
        except ModuleNotFoundError as error:
            missing = str(error.name).partition(".")[0]
            if missing == "comm_hooks":
                raise
            extra, _ = _COMMANDS[command]
            line = f'needs {missing}: pip install "comm-hooks[{extra}]"'
            typer.echo(f"comm-hooks {command}: {line}", err=True)
            raise typer.Exit(2) from None
        function(**arguments)

    return run


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback()
def _comm_hooks() -> None:
    """Gradient compression for distributed PyTorch."""


if __name__ == "__main__":
    app()

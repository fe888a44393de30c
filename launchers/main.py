"""The ``comm-hooks`` command; a subcommand is imported when called, and torch when it runs."""

import importlib
import importlib.util
import sys
from typing import Any

# The extra "launch".
_missing = [n for n in ("typer", "rich", "psutil") if not importlib.util.find_spec(n)]
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
    "launch": "Start a training script on this node of several.",
    "preflight": "Check that every node is ready, and that they reach each other.",
    "advise": "Say which method pays off for a step and a link.",
}


class _Commands(typer.core.TyperGroup):
    """A group of subcommands, each imported on demand from ``command.py`` of its package."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(_COMMANDS)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        # Their docstrings would have to be imported.
        with formatter.section("Commands"):
            formatter.write_dl(list(_COMMANDS.items()))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in _COMMANDS:
            return None
        module = importlib.import_module(f"comm_hooks.launchers.{cmd_name}.command")
        single = typer.Typer(
            add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
        )
        # Words after a script's name belong to the script, even if they look like our options.
        settings = {"allow_interspersed_args": False}
        single.command(cmd_name, context_settings=settings)(getattr(module, cmd_name))
        return typer.main.get_command(single)


app = typer.Typer(
    cls=_Commands, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None
)


@app.callback()
def _comm_hooks() -> None:
    """Gradient compression for distributed PyTorch."""


if __name__ == "__main__":
    app()

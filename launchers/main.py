"""The ``comm-hooks`` command. Its subcommands need the extra ``compare``."""

import importlib.util
import sys

_missing = [
    name for name in ("typer", "rich", "matplotlib", "jinja2") if not importlib.util.find_spec(name)
]
if _missing:
    print(
        f"comm-hooks: the command line needs {', '.join(_missing)}: "
        'pip install "comm-hooks[compare]"',
        file=sys.stderr,
    )
    raise SystemExit(2)

import typer  # noqa: E402

from comm_hooks.launchers.compare.command import compare  # noqa: E402

app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)
app.command()(compare)


@app.callback()
def _comm_hooks() -> None:
    """Gradient compression for distributed PyTorch."""
    # With a callback, typer keeps "compare" a subcommand even while it is the only one.


if __name__ == "__main__":
    app()

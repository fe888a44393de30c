"""The preflight as a module, for launchers that start modules on all nodes."""

import typer

from comm_hooks.launchers.commands.preflight import preflight

if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command()(preflight)
    app()

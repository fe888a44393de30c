"""How commands refuse."""

from typer import Typer
from typer.testing import CliRunner


def refusal(app: Typer, name: str, *arguments: str) -> str:
    """Run a command, check that it refuses with one line and code 2, and return what it says."""
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith(f"{name}: ")
    return result.stderr

"""How a study ends: a table, a JSON file and plots, also of one that was interrupted."""

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.studies.cli import describe_machine
from benchmarks.studies.runs import Outcome

_INTERRUPTED = 130  # 128 + SIGINT, as shells have it


def conduct(
    name: str,
    outcomes: Iterable[Outcome],
    settings: dict[str, Any],
    out: Path,
    console: Console,
    *,
    make_tables: Callable[[list[Outcome]], list[Table]],
    write_plots: Callable[[list[Outcome], Path], list[Path]],
    findings: Callable[[list[Outcome]], dict[str, Any]] = lambda outcomes: {},
) -> None:
    """Let the outcomes come, and tell about those that have come.

    Writes ``<name>.json`` and the plots to ``out``, and prints the tables.

    Raises:
        typer.Exit: with code 130, after all that, if the study was interrupted.
    """
    finished: list[Outcome] = []
    interrupted = False
    started = time.monotonic()
    try:
        for outcome in outcomes:
            finished.append(outcome)
    except KeyboardInterrupt:
        interrupted = True
    if finished:
        for table in make_tables(finished):
            console.print(table)
        record = {
            "study": name,
            **describe_machine(),
            "seconds": round(time.monotonic() - started),
            "complete": not interrupted,
            "settings": settings,
            "findings": findings(finished),
            "methods": [outcome.to_dict() for outcome in finished],
        }
        file = out / f"{name}.json"
        file.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")
        for path in [file, *write_plots(finished, out)]:
            console.print(Text(f"Wrote {path}"), soft_wrap=True)
    if interrupted:
        typer.echo(f"{name}: interrupted, {len(finished)} methods finished", err=True)
        raise typer.Exit(_INTERRUPTED)

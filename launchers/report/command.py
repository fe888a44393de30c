"""The ``report`` command: read everything, then write one page."""

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from comm_hooks.launchers.output import make_console, refusing
from comm_hooks.launchers.report.page import write_page
from comm_hooks.launchers.report.reading import read_runs
from comm_hooks.launchers.report.table import print_table


def report(
    records: Annotated[
        list[Path],
        typer.Argument(
            metavar="RUNS.JSONL...",
            help="The runs.jsonl of comparisons, and logs that StatsLogger wrote.",
        ),
    ],
    out: Annotated[Path, typer.Option(help="The page to write.")] = Path("report.html"),
) -> None:
    """Make one HTML page from the records of several runs: a table, and curves of the loss.

    Runs of one method with several seeds are shown as their mean and each seed. The page needs no
    other file and no network. Exit codes: 0, 2 for bad input (nothing is written).
    """
    with refusing("comm-hooks report"):
        runs = read_runs(*records)
        if out.resolve() in (path.resolve() for path in records):
            raise ValueError(f"--out {out}: this file holds records; give another name")
        try:
            write_page(runs, out)
        except OSError as error:
            raise ValueError(f"--out {out}: cannot write there ({error.strerror})") from None
    console = make_console()
    print_table(runs, console)
    console.print(Text(f"Report: {out}"), soft_wrap=True)

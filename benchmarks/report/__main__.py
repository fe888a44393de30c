"""``python -m benchmarks.report``."""

from pathlib import Path
from typing import Annotated

import typer


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
    from benchmarks.report import run

    run.report(
        records=records,
        out=out,
    )


if __name__ == "__main__":
    typer.run(report)

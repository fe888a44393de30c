"""What ``python -m benchmarks.report`` does: read everything, then write one page."""

from pathlib import Path

from rich.text import Text

from benchmarks.report.page import write_page
from benchmarks.report.reading import read_runs
from benchmarks.report.table import print_table
from comm_hooks.launchers.output import make_console, refusing


def report(
    *,
    records: list[Path],
    out: Path,
) -> None:
    """Do what ``python -m benchmarks.report --help`` says."""
    with refusing("python -m benchmarks.report"):
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

"""The report folder: one page that holds everything, the plots as files, and the raw records."""

import base64
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from comm_hooks.launchers.compare.plots import write_plots
from comm_hooks.launchers.compare.runs import Run
from comm_hooks.launchers.compare.table import COLUMNS, make_conclusions, make_rows

_CAPTIONS = {
    "loss-vs-step": "Loss against steps: what compression costs in quality.",
    "loss-vs-bytes": "Loss against bytes: how far the same traffic takes each method. Those that "
    "warm up without compression start where the warm-up ends; a longer run dwarfs it.",
    "loss-vs-time": "Loss against time: what compression costs in computing.",
}


def write_report(runs: list[Run], facts: dict[str, str], folder: Path) -> Path:
    """Write ``report.html`` and the plots into an existing folder.

    Args:
        runs: the records, at least one, failed ones included.
        facts: what to tell about how they were made (command, versions, machine), by name.
        folder: where to write.

    Returns:
        The path of the page. It needs no other file: the plots are part of it.
    """
    plots = [
        {"caption": _CAPTIONS[path.stem], "image": base64.b64encode(path.read_bytes()).decode()}
        for path in write_plots(runs, folder)
    ]
    environment = Environment(
        loader=PackageLoader("comm_hooks.launchers.compare", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("report.html.j2").render(
        columns=COLUMNS,
        rows=make_rows(runs),
        conclusions=make_conclusions(runs),
        plots=plots,
        settings=runs[0].settings,
        facts=facts,
    )
    path = folder / "report.html"
    path.write_text(page, encoding="utf-8")
    return path

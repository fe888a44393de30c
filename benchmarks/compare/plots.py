"""Loss against steps, against bytes, against time, as files for documents."""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.lab import plots
from benchmarks.lab.runs import Run


def write_plots(runs: Sequence[Run], folder: Path) -> list[Path]:
    """Write ``loss-vs-{step,bytes,time}.png`` for the runs that have a curve; return the paths.

    Args:
        runs: of one comparison: each method once.
        folder: where to write.
    """
    looks = [look.style for look in plots.assign_looks(run.method for run in runs)]
    paths = []
    for name in ("step", "bytes", "time"):
        figure, (axes,) = plots.new_figure(width=7)
        if name == "bytes":
            plots.draw_by_bytes(axes, runs, looks)
        else:
            for run, look in zip(runs, looks, strict=True):
                xs = [point.step if name == "step" else point.seconds for point in run.curve]
                plots.draw_run(axes, run, xs, look)
        if name == "step":
            plots.count_rounds(axes, "step")
        elif name == "time":
            axes.set_xlabel("seconds of training on this machine (no network in between)")
        paths.append(plots.save(figure, folder / f"loss-vs-{name}.png"))
    return paths

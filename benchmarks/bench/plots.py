"""Three plots: step time by rate, loss against bytes, and loss against time at each rate."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import LogLocator

from benchmarks.bench.rates import show_rate
from benchmarks.bench.results import Result
from benchmarks.bench.waits import step_milliseconds, usual_milliseconds
from benchmarks.lab.plots import (
    Style,
    assign_looks,
    draw_by_bytes,
    draw_run,
    new_figure,
    save,
    write_numbers,
)


def write_plots(results: list[Result], rates: list[str], folder: Path) -> list[Path]:
    """Write ``step-time.png``, ``loss-vs-bytes.png`` and ``loss-vs-time.png``; return the paths.

    Args:
        results: each method once; of those that failed, what there is.
        rates: in the order in which they are shown.
        folder: where to write.
    """
    usual = usual_milliseconds(results)
    runs = [result.run for result in results]
    looks = [look.style for look in assign_looks(run.method for run in runs)]

    times, (by_rate,) = new_figure(width=7)
    _draw_step_times(by_rate, results, rates, usual, looks)

    costs, (by_bytes,) = new_figure(width=7)
    draw_by_bytes(by_bytes, runs, looks)

    columns = min(2, len(rates))
    waits, grid = new_figure(columns, -(-len(rates) // columns))
    for axes, rate in zip(grid, rates, strict=False):
        _draw_losses_by_time(axes, results, rate, usual, looks)
    for axes in grid[len(rates) :]:
        axes.set_axis_off()

    figures = {"step-time": times, "loss-vs-bytes": costs, "loss-vs-time": waits}
    return [save(figure, folder / f"{name}.png") for name, figure in figures.items()]


def _draw_step_times(
    axes: Axes, results: list[Result], rates: list[str], usual: float, looks: Sequence[Style]
) -> None:
    for result, look in zip(results, looks, strict=True):
        timed = [(i, timing) for i, rate in enumerate(rates) if (timing := result.at(rate))]
        if timed:
            places = [i for i, _ in timed]
            times = [step_milliseconds(timing, usual) for _, timing in timed]
            axes.plot(places, times, label=result.run.method, marker="o", markersize=3.5, **look)
    axes.set_xticks(range(len(rates)), [show_rate(rate) for rate in rates])
    if axes.has_data():
        axes.set_yscale("log")
        _write_plain_numbers(axes.yaxis)
    axes.set_ylabel("ms per step (log scale)")


def _draw_losses_by_time(
    axes: Axes, results: list[Result], rate: str, usual: float, looks: Sequence[Style]
) -> None:
    for result, look in zip(results, looks, strict=True):
        if timing := result.at(rate):
            seconds = step_milliseconds(timing, usual) / 1e3
            draw_run(axes, result.run, [seconds * point.round for point in result.run.curve], look)
    axes.set_title(show_rate(rate), fontsize=10)
    if axes.has_data():
        axes.set_xscale("log")
        _write_plain_numbers(axes.xaxis)
    axes.set_xlabel("seconds of training (log scale)")


def _write_plain_numbers(axis: Axis) -> None:
    low, high = axis.get_view_interval()
    # Three numbers for each power of ten are too many to read where there are several.
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 50 * low else (1,)))
    write_numbers(axis)

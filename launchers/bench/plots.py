"""Three plots: step time by rate, loss against bytes, and loss against time at each rate."""

import math
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

from comm_hooks.launchers.bench.rates import show_rate
from comm_hooks.launchers.bench.results import Result
from comm_hooks.launchers.bench.waits import step_milliseconds, usual_milliseconds
from comm_hooks.launchers.compare.plots import LOSS, Styles, draw_by_bytes, save, styles_of


def write_plots(results: list[Result], rates: list[str], folder: Path) -> list[Path]:
    """Write ``step-time.png``, ``loss-vs-bytes.png`` and ``loss-vs-time.png``; return the paths.

    Args:
        results: each method once; of those that failed, what there is.
        rates: in the order in which they are shown.
        folder: where to write.
    """
    usual = usual_milliseconds(results)
    styles = styles_of([result.run for result in results])
    trained = [result for result in results if result.run.curve]

    times = Figure(figsize=(9, 4.5), layout="constrained")
    by_rate = times.subplots()
    _draw_step_times(by_rate, results, rates, usual, styles)

    costs = Figure(figsize=(9, 4.5), layout="constrained")
    by_bytes = costs.subplots()
    draw_by_bytes(by_bytes, [result.run for result in trained], styles)

    columns = min(2, len(rates))
    rows = math.ceil(len(rates) / columns)
    waits = Figure(figsize=(3.5 + 4 * columns, 0.5 + 3.5 * rows), layout="constrained")
    grid = list(waits.subplots(rows, columns, sharey=True, squeeze=False).flat)
    by_time, unused = grid[: len(rates)], grid[len(rates) :]
    for axes, rate in zip(by_time, rates, strict=True):
        _draw_losses_by_time(axes, trained, rate, usual, styles)
    for axes in unused:
        axes.set_axis_off()

    figures = {
        "step-time": (times, [by_rate]),
        "loss-vs-bytes": (costs, [by_bytes]),
        "loss-vs-time": (waits, by_time),
    }
    paths = []
    for name, (figure, panels) in figures.items():
        paths.append(folder / f"{name}.png")
        save(figure, panels, paths[-1])
    return paths


def _draw_step_times(
    axes: Axes, results: list[Result], rates: list[str], usual: float, styles: Styles
) -> None:
    for result in results:
        timed = [(i, timing) for i, rate in enumerate(rates) if (timing := result.at(rate))]
        if timed:
            places = [i for i, _ in timed]
            times = [step_milliseconds(timing, usual) for _, timing in timed]
            style = styles[result.run.method]
            axes.plot(places, times, label=result.run.method, marker="o", markersize=3.5, **style)
    axes.set_xticks(range(len(rates)), [show_rate(rate) for rate in rates])
    if axes.has_data():
        axes.set_yscale("log")
        _write_plain_numbers(axes.yaxis)
    axes.set_ylabel("ms per step (log scale)")


def _draw_losses_by_time(
    axes: Axes, results: list[Result], rate: str, usual: float, styles: Styles
) -> None:
    for result in results:
        if timing := result.at(rate):
            seconds = step_milliseconds(timing, usual) / 1e3
            times = [seconds * point.step for point in result.run.curve]
            losses = [point.loss for point in result.run.curve]
            axes.plot(times, losses, label=result.run.method, **styles[result.run.method])
    axes.set_title(show_rate(rate), fontsize=10)
    if axes.has_data():
        axes.set_xscale("log")
        _write_plain_numbers(axes.xaxis)
    axes.set_xlabel("seconds of training (log scale)")
    axes.set_ylabel(LOSS)


def _write_plain_numbers(axis: Axis) -> None:
    low, high = axis.get_view_interval()
    # Three numbers for each power of ten are too many to read where there are several.
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 50 * low else (1,)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_locator(NullLocator())

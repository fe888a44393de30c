"""The curves of the page: what they are made of, and the charts of Plotly that show them."""

import html
import statistics
from typing import Any, NamedTuple

from benchmarks.lab.plots import assign_looks
from benchmarks.lab.runs import Point, Run
from benchmarks.lab.tables import format_bytes
from benchmarks.report.groups import Group, group_runs, seed_names

MAX_POINTS = 200
"""A curve with more points is shown as the means of consecutive ones."""

_DOTS = 30  # points of a curve that are marked; more would hide the line
_UNITS = {3 * 3600: ("h", 3600), 300: ("min", 60)}  # by the seconds from which they are used

Curve = list[Point]


class Series(NamedTuple):
    """One method's curves.

    ``colour`` and ``dash`` are its :class:`~benchmarks.lab.plots.Look`; ``seeds`` has
    each run's name and curve; ``mean`` is a curve over the steps that all of them have, None where
    they share none.  A curve is empty for a run that failed before its first point.
    """

    name: str
    colour: str | int
    dash: int
    mean: Curve | None
    seeds: list[tuple[str, Curve]]

    @property
    def lines(self) -> list[tuple[str, Curve]]:
        """What is drawn, and how it is called: the mean, or each seed where there is none."""
        if self.mean is None:
            return [(f"{self.name}, {seed}", curve) for seed, curve in self.seeds]
        return [(f"{self.name}, mean" if len(self.seeds) > 1 else self.name, self.mean)]


def make_series(runs: list[Run]) -> list[Series]:
    """Return one series per method, in the order of the table."""
    groups = group_runs(runs)
    looks = assign_looks(group.method for group in groups)
    return [
        Series(
            group.name,
            *look,
            _mean(group),
            [
                (name, _thin(run.curve))
                for run, name in zip(group.runs, seed_names(group.runs), strict=True)
            ],
        )
        for group, look in zip(groups, looks, strict=True)
    ]


def is_thinned(runs: list[Run]) -> bool:
    """Tell whether a curve is shown with fewer points than it has."""
    return any(len(run.curve) > MAX_POINTS for run in runs)


def make_charts(series: list[Series]) -> list[dict[str, Any]]:
    """Return loss against steps, bytes and time: what ``charts.js`` hands to Plotly.

    Each chart has its ``traces`` and its ``xaxis``.  A trace's ``legendgroup`` is the place of its
    series, ``meta`` the name of its colour in ``page.css``, and ``customdata`` has each point's
    step.
    """
    points = [point for each in series for _, curve in each.seeds for point in curve]
    longest = max((point.seconds for point in points), default=0.0)
    unit, size = next((u for least, u in _UNITS.items() if longest > least), ("s", 1))
    sent = [point.bytes_sent for point in points if point.bytes_sent] or [1, 10]
    bytes_axis = {"title": "sent per rank (log scale)", "type": "log", "tickformat": "~s"}
    axes = [
        (lambda point: point.step, {"title": "step", "tickformat": ","}),
        (lambda point: point.bytes_sent or None, {**bytes_axis, "ticksuffix": "B"}),
        (lambda point: point.seconds / size, {"title": f"time of training ({unit})"}),
    ]
    charts = []
    for place, (x, axis) in enumerate(axes):
        traces = []
        for index, each in enumerate(series):
            common = {"legendgroup": index, "meta": f"--colour-{each.colour}", "y": []}
            if each.mean and len(each.seeds) > 1:
                for name, curve in each.seeds:
                    trace = _trace(common, name, curve, [x(point) for point in curve], each.dash, 1)
                    traces.append({**trace, "hoverinfo": "skip", "opacity": 0.55})
            for name, curve in each.lines:
                xs = [x(point) for point in curve]
                if place == 1 and curve and not curve[-1].bytes_sent:
                    # A logarithmic axis has no zero: what sends nothing is a level, not a curve.
                    xs, curve = [min(sent), max(sent)], [curve[-1]] * 2
                    name = f"{name}: 0 bytes"
                trace = _trace(common, name, curve, xs, each.dash, 2.2)
                seeds = each.seeds if each.mean and len(each.seeds) > 1 else []
                trace["text"] = [_describe(name, point, seeds) for point in curve]
                traces.append({**trace, "hovertemplate": "%{text}<extra></extra>"})
        charts.append({"traces": traces, "xaxis": axis})
    return charts


def _trace(
    common: dict[str, Any], name: str, curve: Curve, xs: list[Any], dash: int, width: float
) -> dict[str, Any]:
    return {
        **common,
        "name": html.escape(name, quote=False),
        "mode": "lines+markers" if width > 1 and len(curve) <= _DOTS else "lines",
        "line": {"width": width, "dash": ("solid", "dash", "dot")[dash]},
        "x": xs,
        "y": [round(point.loss, 5) for point in curve],
        "customdata": [point.step for point in curve],
    }


def _describe(name: str, point: Point, seeds: list[tuple[str, Curve]]) -> str:
    """Return what is shown of a point, line by line."""
    unit, size = next((u for least, u in _UNITS.items() if point.seconds > least), ("s", 1))
    lines = [
        f"<b>{html.escape(name, quote=False)}</b>",
        f"loss {point.loss:.3f}",
        f"step {point.step:,}",
        f"sent {format_bytes(point.bytes_sent)}",
        f"received {format_bytes(point.bytes_received)}",
        f"time {point.seconds / size:.3g} {unit}",
    ]
    for seed, curve in seeds:
        lines += [f"loss, {seed} {each.loss:.3f}" for each in curve if each.step == point.step]
    return "<br>".join(lines)


def _mean(group: Group) -> Curve | None:
    """Return the mean over the runs that finished, at the steps that they share."""
    curves = [run.curve for run in group.runs if run.figures] or [run.curve for run in group.runs]
    by_step = [{point.step: point for point in curve} for curve in curves]
    shared = [step for step in by_step[0] if all(step in points for points in by_step)]
    means = [_mean_point([points[step] for points in by_step]) for step in shared]
    return _thin(means) if means else None


def _thin(curve: Curve) -> Curve:
    width = -(-len(curve) // MAX_POINTS) or 1
    return [_mean_point(curve[i : i + width]) for i in range(0, len(curve), width)]


def _mean_point(points: Curve) -> Point:
    if len(points) == 1:
        return points[0]
    return Point(
        step=round(statistics.fmean(point.step for point in points)),
        loss=statistics.fmean(point.loss for point in points),
        bytes_sent=round(statistics.fmean(point.bytes_sent for point in points)),
        bytes_received=round(statistics.fmean(point.bytes_received for point in points)),
        seconds=statistics.fmean(point.seconds for point in points),
    )

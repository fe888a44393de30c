"""What the curves of the page are made of, as plain data for ``charts.js``."""

import statistics
from typing import Any

from comm_hooks.launchers.compare.groups import Group, group_runs, seed_names
from comm_hooks.launchers.compare.looks import assign_looks
from comm_hooks.launchers.compare.runs import Point, Run

MAX_POINTS = 200
"""A curve with more points is shown as the means of consecutive ones."""

_Curve = list[list[float]]


def make_series(runs: list[Run]) -> list[dict[str, Any]]:
    """Return one series per method, in the order of the table.

    Each has its ``name``; its ``colour`` and ``dash``
    (:class:`~comm_hooks.launchers.compare.looks.Look`); ``seeds``, each with a ``name`` and a curve
    of ``points``; and ``mean``, a curve over the steps that all seeds have, or None where they
    share none.  A point is [step, loss, bytes sent, bytes received, seconds]; a curve is empty for
    a run that failed before its first point.
    """
    groups = group_runs(runs)
    looks = assign_looks(group.method for group in groups)
    return [
        {
            "name": group.name,
            "colour": look.colour,
            "dash": look.dash,
            "mean": _mean(group),
            "seeds": [
                {"name": name, "points": _plain(_thin(run.curve))}
                for run, name in zip(group.runs, seed_names(group.runs), strict=True)
            ],
        }
        for group, look in zip(groups, looks, strict=True)
    ]


def is_thinned(runs: list[Run]) -> bool:
    """Tell whether a curve is shown with fewer points than it has."""
    return any(len(run.curve) > MAX_POINTS for run in runs)


def _mean(group: Group) -> _Curve | None:
    """Return the mean over the runs that finished, at the steps that they share."""
    curves = [run.curve for run in group.runs if run.figures] or [run.curve for run in group.runs]
    by_step = [{point.step: point for point in curve} for curve in curves]
    shared = [step for step in by_step[0] if all(step in points for points in by_step)]
    means = [_mean_point([points[step] for points in by_step]) for step in shared]
    return _plain(_thin(means)) if means else None


def _thin(curve: list[Point]) -> list[Point]:
    width = -(-len(curve) // MAX_POINTS) or 1
    return [_mean_point(curve[i : i + width]) for i in range(0, len(curve), width)]


def _mean_point(points: list[Point]) -> Point:
    if len(points) == 1:
        return points[0]
    return Point(
        step=round(statistics.fmean(point.step for point in points)),
        loss=statistics.fmean(point.loss for point in points),
        bytes_sent=round(statistics.fmean(point.bytes_sent for point in points)),
        bytes_received=round(statistics.fmean(point.bytes_received for point in points)),
        seconds=statistics.fmean(point.seconds for point in points),
    )


def _plain(curve: list[Point]) -> _Curve:
    return [
        [
            point.step,
            round(point.loss, 5),
            point.bytes_sent,
            point.bytes_received,
            round(point.seconds, 3),
        ]
        for point in curve
    ]

"""Step time against bandwidth."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from comm_hooks.launchers.advise.advice import Advice, Case, step_at
from comm_hooks.launchers.advise.cost_model import TCP_SHARE
from comm_hooks.launchers.rates import format_rate

# Okabe and Ito's palette, which colour-blind readers can tell apart.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
_DASHES = ("solid", "dashed", "dotted")
_POINTS = 60


def check_plot(path: Path) -> None:
    """Raise ``ValueError`` for a path that :func:`write_plot` could not write to."""
    if not path.absolute().parent.is_dir():
        raise ValueError(f"--plot {path}: there is no such folder")
    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix[1:].lower() not in known:
        raise ValueError(f"--plot {path}: must end in one of .{', .'.join(sorted(known))}")


def write_plot(case: Case, rows: Sequence[Advice], path: Path) -> None:
    """Draw a curve per method and mark the present link; the suffix says the format.

    Raises:
        ValueError: if the file cannot be written.
    """
    figure = Figure(figsize=(9, 4.8), layout="constrained")
    axes = figure.subplots()
    here = _megabits(case.network.between.bandwidth)
    first, last = min(1.0, here / 10), max(10_000.0, 10 * here)
    megabits = [first * (last / first) ** (i / (_POINTS - 1)) for i in range(_POINTS)]
    coloured = 0
    for row in rows:
        lap, colour = divmod(coloured, len(_COLOURS))
        look: dict[str, Any] = {"color": _COLOURS[colour], "linestyle": _DASHES[lap % 3]}
        if row.method.spec == "all_reduce":
            look = {"color": "#18181b"}
        elif row.method.spec == "none":
            look = {"color": "#8a8a93", "linestyle": "dashed"}
        else:
            coloured += 1
        bandwidths = [m * 1e6 / 8 * TCP_SHARE for m in megabits]
        times = [1e3 * step_at(case, row.plan, bandwidth) for bandwidth in bandwidths]
        axes.plot(megabits, times, label=row.method.spec, linewidth=1.8, **look)
    axes.axvline(here, color="#18181b", linewidth=1, linestyle=(0, (1, 2)))
    axes.annotate(
        f" this link: {format_rate(1e6 * here)}",
        (here, 1),
        xycoords=("data", "axes fraction"),
        va="top",
    )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.set_xlabel(f"Mbit/s of each link, {case.network.ranks} ranks")
    axes.set_ylabel("predicted milliseconds per step")
    axes.grid(color="#e4e4e7", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside right upper", frameon=False)
    try:
        figure.savefig(path, dpi=160)
    except OSError as error:
        raise ValueError(f"--plot {path}: cannot be written ({error.strerror})") from None


def _megabits(bandwidth: float) -> float:
    """Return the rate of the link, headers included, over which that many bytes per second go."""
    return bandwidth * 8 / 1e6 / TCP_SHARE

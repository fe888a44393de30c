"""The table and the plots of a comparison of SAFL with its peers."""

from pathlib import Path

from rich.table import Table

from benchmarks.studies.safl.methods import UNCOMPRESSED
from comm_hooks.launchers.lab import plots, tables
from comm_hooks.launchers.lab.outcomes import Outcome


def make_tables(outcomes: list[Outcome]) -> list[Table]:
    """Return the table, a section per ratio."""
    full = next((o.bytes_per_round for o in outcomes if o.name == UNCOMPRESSED), 0.0)
    columns: tables.Columns = {
        "ratio": tables.label("ratio"),
        "method": lambda outcome: outcome.name,
        "K": tables.label("K"),
        "sent": tables.sent,
        "fewer": tables.fewer(full),
        "lr": tables.learning_rate,
        **tables.JUDGED,
        "note": lambda outcome: outcome.note,
    }
    return [tables.tabulate(tables.TITLE, columns, outcomes, lambda o: o.labels["ratio"])]


def write_plots(outcomes: list[Outcome], out: Path) -> list[Path]:
    """Write the three plots; return their paths."""
    return [
        _by_rounds(outcomes, out / "error-vs-rounds.png"),
        _by_bytes(outcomes, out / "error-vs-bytes.png"),
        _by_size(outcomes, out / "sketch-sizes.png"),
    ]


def _name(outcome: Outcome) -> str:
    return f"{outcome.name}, K = {outcome.labels['K']}" if outcome.labels["K"] > 1 else outcome.name


def _ratios(outcomes: list[Outcome]) -> list[float]:
    return list(dict.fromkeys(r for o in outcomes if (r := o.labels["ratio"]) is not None))


def _sized(outcomes: list[Outcome]) -> list[str]:
    """Return the names of what has a ratio, in order of appearance."""
    return list(dict.fromkeys(_name(o) for o in outcomes if o.labels["ratio"] is not None))


def _looks(outcomes: list[Outcome]) -> dict[str, plots.Style]:
    looks = {name: plots.style(index) for index, name in enumerate(_sized(outcomes))}
    others = [o for o in outcomes if _name(o) not in looks]
    for index, outcome in enumerate(others):
        colour = plots.BLACK if outcome.name == UNCOMPRESSED else plots.GREY
        looks[_name(outcome)] = {"color": colour, "linestyle": plots.DASHES[index % 4]}
    return looks


def _by_rounds(outcomes: list[Outcome], path: Path) -> Path:
    """One panel per ratio; what has none is in all of them."""
    looks = _looks(outcomes)
    shown: list[float | None] = [*_ratios(outcomes)] or [None]
    figure, panels = plots.new_figure(len(shown))
    for axes, ratio in zip(panels, shown, strict=True):
        for outcome in outcomes:
            if outcome.labels["ratio"] in (None, ratio):
                plots.draw_curves(axes, outcome, _name(outcome), looks[_name(outcome)])
        axes.set_title("" if ratio is None else f"ratio {ratio:g}", fontsize="medium")
        plots.count_rounds(axes)
    panels[0].set_ylabel("held-out error (%)")
    return plots.save(figure, path)


def _by_bytes(outcomes: list[Outcome], path: Path) -> Path:
    """Where each method ends against what a round costs."""
    figure, (axes,) = plots.new_figure(width=7)
    finished = [o for o in outcomes if not o.diverged and o.bytes_per_round > 0]
    for name, look in _looks(outcomes).items():
        own = [o for o in finished if _name(o) == name]
        ends = [(o.bytes_per_round, [100 * error for error in o.errors]) for o in own]
        plots.draw_ends(axes, ends, name, look)
    plots.count_bytes(axes)
    axes.set_ylabel("held-out error at the end (%)")
    return plots.save(figure, path)


def _by_size(outcomes: list[Outcome], path: Path) -> Path:
    """SAFL's curves for all sizes of the sketch, one panel per family and local steps."""
    names = [name for name in _sized(outcomes) if name.startswith("safl")]
    ratios = _ratios(outcomes)
    figure, panels = plots.new_figure(max(1, len(names)))
    for axes, name in zip(panels, names, strict=False):
        for outcome in outcomes:
            if _name(outcome) == name:
                ratio = outcome.labels["ratio"]
                look = plots.style(ratios.index(ratio))
                plots.draw_curves(axes, outcome, f"ratio {ratio:g}", look)
        axes.set_title(name, fontsize="medium")
        plots.count_rounds(axes)
    panels[0].set_ylabel("held-out error (%)")
    return plots.save(figure, path)

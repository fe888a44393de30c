"""The table and the plots of a comparison of SAFL with its peers."""

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from benchmarks.studies.plots import (
    BLACK,
    GREY,
    count_bytes,
    count_rounds,
    draw_curves,
    draw_ends,
    new_figure,
    save,
    style,
)
from benchmarks.studies.runs import Outcome
from benchmarks.studies.safl.methods import UNCOMPRESSED
from benchmarks.studies.tables import TITLE, errors, fewer, learning_rate, loss, make_table
from comm_hooks.launchers.compare.table import format_bytes

_COLUMNS = (
    "ratio",
    "method",
    "K",
    "sent",
    "fewer",
    "lr",
    "error %",
    "each seed",
    "loss",
    "note",
)


def make_tables(outcomes: list[Outcome]) -> list[Table]:
    """Return the table, a section per ratio."""
    full = next((o.bytes_per_round for o in outcomes if o.name == UNCOMPRESSED), 0.0)
    rows: list[Sequence[str]] = []
    previous = outcomes[0].labels["ratio"]
    for outcome in outcomes:
        if outcome.labels["ratio"] != previous:
            rows.append(())
        previous = outcome.labels["ratio"]
        rows.append(_row(outcome, full))
    return [make_table(TITLE, _COLUMNS, rows)]


def _row(outcome: Outcome, full: float) -> Sequence[str]:
    ratio, sent = outcome.labels["ratio"], outcome.bytes_per_round
    return (
        "-" if ratio is None else f"{ratio:g}",
        outcome.name,
        str(outcome.labels["K"]),
        format_bytes(sent),
        fewer(full, sent),
        learning_rate(outcome),
        *errors(outcome),
        loss(outcome),
        outcome.note,
    )


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


def _looks(outcomes: list[Outcome]) -> dict[str, dict[str, object]]:
    looks = {name: style(index) for index, name in enumerate(_sized(outcomes))}
    others = [o for o in outcomes if _name(o) not in looks]
    patterns = iter(["solid", "dashed", "dotted", "dashdot"] * len(others))
    for outcome in others:
        colour = BLACK if outcome.name == UNCOMPRESSED else GREY
        looks[_name(outcome)] = {"color": colour, "linestyle": next(patterns)}
    return looks


def _by_rounds(outcomes: list[Outcome], path: Path) -> Path:
    """One panel per ratio; what has none is in all of them."""
    ratios, looks = _ratios(outcomes), _looks(outcomes)
    figure, panels = new_figure(max(1, len(ratios)))
    shown: list[float | None] = [*ratios] or [None]
    for axes, ratio in zip(panels, shown, strict=True):
        for outcome in outcomes:
            if outcome.labels["ratio"] in (None, ratio):
                draw_curves(axes, outcome, _name(outcome), looks[_name(outcome)])
        axes.set_title("" if ratio is None else f"ratio {ratio:g}", fontsize="medium")
        count_rounds(axes)
    panels[0].set_ylabel("held-out error (%)")
    return save(figure, panels, path)


def _by_bytes(outcomes: list[Outcome], path: Path) -> Path:
    """Where each method ends against what a round costs."""
    looks = _looks(outcomes)
    figure, panels = new_figure(1, width=7)
    for name, look in looks.items():
        draw_ends(panels[0], [o for o in outcomes if _name(o) == name], name, look)
    count_bytes(panels[0])
    panels[0].set_ylabel("held-out error at the end (%)")
    return save(figure, panels, path)


def _by_size(outcomes: list[Outcome], path: Path) -> Path:
    """SAFL's curves for all sizes of the sketch, one panel per family and local steps."""
    names = [name for name in _sized(outcomes) if name.startswith("safl")]
    ratios = _ratios(outcomes)
    figure, panels = new_figure(max(1, len(names)))
    for axes, name in zip(panels, names, strict=False):
        for outcome in outcomes:
            if _name(outcome) == name:
                ratio = outcome.labels["ratio"]
                draw_curves(axes, outcome, f"ratio {ratio:g}", style(ratios.index(ratio)))
        axes.set_title(name, fontsize="medium")
        count_rounds(axes)
    panels[0].set_ylabel("held-out error (%)")
    return save(figure, panels, path)

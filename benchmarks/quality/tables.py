"""The tables of the documentation, which the command writes into its pages."""

import re
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from benchmarks.lab.outcomes import Outcome
from benchmarks.quality.rows import ROWS
from benchmarks.quality.runs import ADAMW, Controls, Found, bits_of, quality_of, same_optimizer
from benchmarks.quality.settings import PRESETS, Setting

ROOT = Path(__file__).parents[2]
PAGES = "README.md", "docs/results.md"
"""The pages with tables, each between comments that name it."""

_BLOCK = re.compile(
    r"(<!-- (\w+): python -m benchmarks.quality -->\n)(.*?)(\n<!-- end -->)", re.DOTALL
)
_TASKS = tuple(PRESETS)
_README = "python", "c", "images", "prose"

Row = tuple[Setting, str]


def write_tables(found: Found, root: Path = ROOT) -> None:
    """Write the tables into the pages under a folder."""
    for name in PAGES:
        page = root / name
        page.write_text(with_tables(page.read_text(), found))


def with_tables(text: str, found: Found) -> str:
    """Return a page with the tables of all outcomes between its comments."""
    return _BLOCK.sub(lambda match: match[1] + TABLES[match[2]](found) + match[4], text)


def _table(header: str, rows: Iterable[Sequence[str]]) -> str:
    columns = header.count("|") + 1
    lines = [f"| {header} |", "|---" * columns + "|", *(f"| {' | '.join(row)} |" for row in rows)]
    return "\n" + "\n".join(lines) + "\n"


def _rows(wanted: Callable[[Setting, str], bool], found: Found) -> list[Row]:
    """Return the rows of the page that are wanted and have all their controls."""
    rows = [(s, name) for settings, methods in ROWS for s in settings for name in methods]
    return sorted(
        (
            (setting, method)
            for setting, method in dict.fromkeys(rows)
            if wanted(setting, method)
            and all((setting, name) in found for name in _columns(method))
        ),
        key=lambda row: (
            row[0].ranks,
            row[0].tokens,
            row[0].batch,
            _TASKS.index(row[0].task),
        ),
    )


def _columns(method: str) -> list[str]:
    """Return the controls of a method and the method, in the order of the columns."""
    same = same_optimizer(method)
    return [same.all_reduce, ADAMW.all_reduce, same.none, ADAMW.none, method]


def _loss(outcome: Outcome) -> str:
    if outcome.diverged:
        return "diverged"
    return f"{statistics.mean(outcome.losses):.3f}{' †' * outcome.is_at_edge}"


def _losses(row: Row, found: Found) -> list[str]:
    """Return the losses of all-reduce and none, with the same optimizer and AdamW, and its own."""
    setting, method = row
    shown = [_loss(found[setting, name]) for name in _columns(method)]
    if same_optimizer(method) == ADAMW:
        return [shown[0], shown[2], shown[4]]
    return [f"{shown[0]}, {shown[1]}", f"{shown[2]}, {shown[3]}", shown[4]]


def _kept(row: Row, found: Found, between: Sequence[Controls] = ()) -> list[str]:
    """Return the shares kept of all-reduce with the same optimizer, others, and AdamW."""
    setting, method = row
    pairs = [same_optimizer(method), *between, ADAMW]
    shares = [quality_of(setting, method, controls, found) for controls in pairs]
    return [str(share) if share else "-" for share in shares]


def _bits(row: Row, found: Found) -> str:
    return f"{statistics.mean(bits_of(run) for run in found[row].runs):.2g}"


def _place(setting: Setting) -> list[str]:
    return [PRESETS[setting.task].title, f"{setting.batch}", f"{setting.tokens:g}"]


def _low_communication(found: Found) -> str:
    rows = _rows(lambda setting, method: method.startswith("low_communication"), found)
    return _table(
        "ranks (bits) | data, model | samples | tokens | `all_reduce` with the same optimizer, "
        "AdamW | `none`, likewise | `low_communication` | kept, same optimizer | kept, AdamW",
        (
            [
                f"{row[0].ranks} ({_bits(row, found)})",
                _place(row[0])[0] + ", Muon" * ("muon" in row[1]),
                *_place(row[0])[1:],
                *_losses(row, found),
                *_kept(row, found),
            ]
            for row in rows
        ),
    )


def _methods(
    wanted: Callable[[Setting, str], bool],
    found: Found,
    second: str,
    between: Mapping[str, Controls] = MappingProxyType({}),
) -> str:
    rows = _rows(wanted, found)
    names = ["kept, same optimizer", *(f"kept, {name}" for name in between), "kept, AdamW"]
    first = int(all(same_optimizer(method) == ADAMW for _, method in rows))  # twice the same
    places = [
        [f"`{method}`", f"{setting.ranks}", _place(setting)[0], _bits((setting, method), found)]
        for setting, method in rows
    ]
    # The text above a table names what all of its rows have.
    shown = [i for i in range(4) if i == 3 or len({place[i] for place in places}) > 1]
    heads = "method", "ranks", "data, model", "bits"
    return _table(
        " | ".join(heads[i] for i in shown)
        + f" | `all_reduce`{second} | `none`{second} | loss | "
        + " | ".join(names[first:]),
        (
            [
                *(place[i] for i in shown),
                *_losses(row, found),
                *_kept(row, found, list(between.values()))[first:],
            ]
            for row, place in zip(rows, places, strict=True)
        ),
    )


_BOTH = " with the same optimizer, AdamW"


def _signs(found: Found) -> str:
    laprop = {"LaProp": same_optimizer("low_communication")}
    return _methods(lambda s, method: method == "sign+local_variance_adam", found, _BOTH, laprop)


def _hooks(found: Found) -> str:
    def wanted(setting: Setting, method: str) -> bool:
        return method != "low_communication" and "+" not in method and ":local" not in method

    return _methods(
        lambda s, m: wanted(s, m) and same_optimizer(m) == ADAMW and s.batch == 6, found, ""
    )


def _rounds(found: Found) -> str:
    return _methods(lambda s, method: s == Setting("python_small", 4, 6, 20.0), found, _BOTH)


def _optimizers(found: Found) -> str:
    """All-reduce with three optimizers, each with the learning rate of its best mean."""
    columns = ("all_reduce", 0.9), ("all_reduce", 0.8), ("all_reduce+laprop", 0.8)
    rows = []
    for setting in sorted({setting for setting, _ in found}):
        if all((setting, name) in found for name, _ in columns):
            shown = [_mean(found[setting, name], beta1) for name, beta1 in columns]
            if shown[0] != "-":
                rows.append([f"{setting.ranks}", *_place(setting), *shown])
    header = "AdamW, 0.9 | AdamW, 0.8 | LaProp, 0.8"
    return _table(f"ranks | data, model | samples | tokens | {header}", rows)


def _mean(outcome: Outcome, beta1: float) -> str:
    """Return the mean loss with a momentum; a dash if only the best momentum has all seeds."""
    rates = [run.settings["lr"] for run in outcome.tries if run.settings["beta1"] == beta1]
    for runs in [outcome.runs, *outcome.others]:
        if runs[0].settings["beta1"] == beta1 and len(runs) == len(outcome.runs):
            is_at_edge = runs[0].settings["lr"] in (min(rates), max(rates))
            return f"{statistics.mean(run.loss for run in runs):.3f}{' †' * is_at_edge}"
    return "-"


def _readme(found: Found) -> str:
    rows = [(Setting(task, 4, 6, 2.0), "low_communication") for task in _README]
    complete = _rows(lambda *row: row in rows, found)
    return _table(
        "data, model of 0.6 M parameters | `all_reduce`, LaProp | `none`, LaProp | "
        "`low_communication` | kept, LaProp | kept, AdamW",
        (
            [
                _place(row[0])[0],
                *(_loss(found[row[0], _columns(row[1])[i]]) for i in (0, 2, 4)),
                *_kept(row, found),
            ]
            for row in complete
        ),
    )


TABLES: Mapping[str, Callable[[Found], str]] = {
    "readme": _readme,
    "low_communication": _low_communication,
    "signs": _signs,
    "hooks": _hooks,
    "rounds": _rounds,
    "optimizers": _optimizers,
}
"""By the name in the comment."""

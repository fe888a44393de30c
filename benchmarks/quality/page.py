"""The page: tables of shares kept, and a picture of them against bits."""

import statistics
from collections.abc import Sequence
from pathlib import Path

from benchmarks.lab import plots
from benchmarks.quality.methods import controls
from benchmarks.quality.runs import Record
from benchmarks.quality.settings import COSINE, PRESETS, Setting
from benchmarks.quality.shares import Share, share_kept
from benchmarks.quality.tuning import Entry, Records

_HEAD = """\
# Quality

What a method keeps of what exchanging is worth: (none - method) / (none - all-reduce), in held-out
loss at equal tokens, all three with AdamW, or all three with Muon (`low_communication` with
LaProp, which is AdamW that divides before it averages, or with Muon). Every method has its own
learning rate, found by the same line search on the first seed (factors of two, until the best lies
between two others), then by the mean of all seeds where another rate is better on the first, a
warm-up over a tenth of the steps, a cosine schedule unless said otherwise, and gradients clipped to
norm 1. Each rank has another part of the text, or other classes (a
Dirichlet split). "±" is half the distance between seeds; a share is left out where exchanging is
worth less than thrice its own uncertainty. A learning rate with a † was the largest or smallest
tried.

`python -m benchmarks.quality` makes this page, and runs what has no record in
`benchmarks/results/quality/`. Methods are written as `python -m benchmarks.compare --hooks` takes them.
"""

_BITS = 3e-3, 64.0
"""What panels show: from fewer than any method sends to more than all-reduce does."""


def make_page(entries: Sequence[Entry], records: Records) -> str:
    """Return the page in Markdown."""
    parts = [_HEAD, _make_list_of_tasks(entries)]
    for world, group in _by_world(entries).items():
        parts.append(f"## {_title(*world)}\n")
        parts.append(_make_table(group, records))
    return "\n".join(parts)


World = tuple[str, int, float]
"""A schedule, ranks, and tokens per parameter."""


def _by_world(entries: Sequence[Entry]) -> dict[World, list[Entry]]:
    worlds: dict[World, list[Entry]] = {}
    for entry in entries:
        setting = entry.setting
        worlds.setdefault((setting.schedule, setting.ranks, setting.tokens), []).append(entry)
    return dict(sorted(worlds.items(), key=lambda item: (item[0][0] != COSINE, *item[0])))


def _title(schedule: str, ranks: int, tokens: float) -> str:
    title = f"{ranks} ranks, {tokens:g} tokens per parameter"
    return title if schedule == COSINE else f"{title}, {schedule} learning rate"


def _make_list_of_tasks(entries: Sequence[Entry]) -> str:
    names = dict.fromkeys(entry.setting.task for entry in entries)
    lines = [f"* {PRESETS[n].title}: {PRESETS[n].parameters / 1e6:.2f} M parameters" for n in names]
    return "\n".join(lines) + "\n"


def _make_table(entries: Sequence[Entry], records: Records) -> str:
    """Return one row per method, one column per task and batch."""
    settings = sorted({entry.setting for entry in entries})
    methods = list(dict.fromkeys(entry.method for entry in entries))
    found = {(e.setting, e.method): e.finished(records) for e in entries}
    at_edge = {(e.setting, e.method) for e in entries if e.is_at_edge(records)}
    columns = [f"{s.task}, batch {s.batch}" for s in settings]
    lines = [
        f"| method | bits | {' | '.join(columns)} |",
        f"|---|---|{'---|' * len(columns)}",
    ]
    for method in methods:
        runs = [found.get((setting, method), {}) for setting in settings]
        if any(runs):
            cells = [
                _cell(setting, method, found) + " †" * ((setting, method) in at_edge)
                for setting in settings
            ]
            lines.append(f"| `{method}` | {_bits(runs)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


Found = dict[tuple[Setting, str], dict[int, Record]]


def share_of(setting: Setting, method: str, found: Found) -> Share | None:
    """Return what a method keeps in a setting; None if that cannot be told."""
    runs, none, full = (found.get((setting, name), {}) for name in (method, *controls(method)))
    return share_kept(runs, none, full)


def _cell(setting: Setting, method: str, found: Found) -> str:
    runs = found.get((setting, method), {})
    if not runs:
        return ""
    losses = [run.loss for run in runs.values()]
    if None in losses:
        return "diverged"
    loss = statistics.mean(loss for loss in losses if loss is not None)
    share = None if method in controls(method) else share_of(setting, method, found)
    first = next(iter(runs.values()))
    return f"{loss:.3f}" + (f" (**{share}**)" if share else "") + f" lr {first.wanted.lr:g}"


def _bits(runs: Sequence[dict[int, Record]]) -> str:
    bits = [record.bits for group in runs for record in group.values()]
    low, high = min(bits), max(bits)
    return f"{high:.3g}" if high <= 1.05 * low else f"{low:.2g} to {high:.2g}"


def write_picture(entries: Sequence[Entry], records: Records, path: Path) -> Path:
    """Draw the share kept against bits, a panel for each number of ranks; a point per setting."""
    found = {(e.setting, e.method): e.finished(records) for e in entries}
    worlds = _by_world(entries)
    figure, panels = plots.new_figure(columns=len(worlds))
    methods = [m for m in dict.fromkeys(e.method for e in entries) if m not in controls(m)]
    looks = {method: plots.style(index) for index, method in enumerate(methods)}
    for (world, group), axes in zip(worlds.items(), panels, strict=True):
        for method in methods:
            settings = [e.setting for e in group if e.method == method]
            points = [(found[s, method], share_of(s, method, found)) for s in settings]
            drawn = [(_mean_bits(runs), 100 * share.mean) for runs, share in points if share]
            if drawn:
                bits, shares = zip(*drawn, strict=True)
                axes.plot(bits, shares, "o", color=looks[method]["color"], label=method, alpha=0.7)
        axes.axhline(100, color=plots.BLACK, linewidth=1)
        axes.axhline(0, color=plots.GREY, linewidth=1, linestyle="dashed")
        axes.set_xscale("log")
        axes.set_xlim(*_BITS)
        axes.set_ylim(bottom=-20)
        axes.set_xlabel("bits per parameter and step")
        axes.set_title(_title(*world), fontsize=10)
    panels[0].set_ylabel("share kept, %")
    return plots.save(figure, path)


def _mean_bits(runs: dict[int, Record]) -> float:
    return statistics.mean(record.bits for record in runs.values())

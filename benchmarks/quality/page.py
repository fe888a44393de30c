"""The quality kept, as written: the page, and cells that ``comm-hooks advise`` reads."""

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict

from benchmarks.lab.outcomes import Outcome
from benchmarks.quality.runs import (
    ADAMW,
    Found,
    Quality,
    bits_of,
    is_control,
    quality_of,
    same_optimizer,
)
from benchmarks.quality.settings import COSINE, PRESETS, Setting
from comm_hooks.launchers.advise.quality import Cell

_DIVERGED = -10.0
"""The quality of a method that diverged, in cells."""

_HEAD = """\
# Quality

The quality that a method keeps of an exchange: (none - method) / (none - all-reduce), in held-out
loss at equal tokens. It is given twice. The first share, in bold, has controls with the method's
own local steps: the same inner optimizer, with exact means (`all_reduce+laprop`,
`all_reduce+muon_adamw`, `identity+local_variance_adam`) and alone (`none+laprop`,
`none+muon_adamw`); it is what the exchange costs. The second has AdamW with and without all-reduce
as controls; it is what a user of AdamW sees. Where both are the same, it is given once.

Every method, control or not, has the best learning rate and the best of two momenta, found by the
same rule on the first seed: a line search for the momentum that is most often better, a try of the
other at the best rate, and a search for it if it leads (factors of two, until the best lies between
two others); then by the mean of all seeds where other settings are better on the first. Searches
for fewer than 500 steps begin at a quarter of the usual rate, below a second valley. beta1 is
0.8 or 0.9, AdamW's 0.9 or 0.95 where a method halves its horizon (`low_communication`,
`local_variance_adam`); Muon has momentum 0.8 with beta1 0.8, or 0.95 with 0.9, and always 0.8
inside `low_communication`. All have a warm-up over a tenth of the steps, a cosine schedule unless
said otherwise, and gradients clipped to norm 1. Each rank has another part of the text, or other
classes (a Dirichlet split), the same for all seeds. "±" is half the distance between seeds; "-"
stands where a control is missing, or exchanging is worth less than thrice its own uncertainty. A
learning rate with a † was the largest or smallest tried.

`python -m benchmarks.quality` makes this page, and runs what has no record in
`benchmarks/results/quality/`. Methods are written as for `python -m benchmarks.compare --hooks`.
"""


def make_page(found: Found) -> str:
    """Return the page in Markdown."""
    names = dict.fromkeys(setting.task for setting, _ in found)
    tasks = [f"* {PRESETS[n].title}: {PRESETS[n].parameters / 1e6:.2f} M parameters" for n in names]
    parts = [_HEAD, "\n".join(tasks) + "\n"]
    for world, settings in _by_world(found).items():
        parts.append(f"## {_title(*world)}\n")
        parts.append(_make_table(settings, found))
    return "\n".join(parts)


World = tuple[str, int, float]
"""A schedule, ranks, and tokens per parameter."""


def _by_world(found: Found) -> dict[World, list[Setting]]:
    worlds: dict[World, list[Setting]] = {}
    for setting in sorted({setting for setting, _ in found}):
        worlds.setdefault((setting.schedule, setting.ranks, setting.tokens), []).append(setting)
    return dict(sorted(worlds.items(), key=lambda item: (item[0][0] != COSINE, *item[0])))


def _title(schedule: str, ranks: int, tokens: float) -> str:
    title = f"{ranks} ranks, {tokens:g} tokens per parameter"
    return title if schedule == COSINE else f"{title}, {schedule} learning rate"


def _make_table(settings: Sequence[Setting], found: Found) -> str:
    """Return one row per method, one column per task and batch."""
    columns = [f"{s.task}, batch {s.batch}" for s in settings]
    lines = [
        f"| method | bits | {' | '.join(columns)} |",
        f"|---|---|{'---|' * len(columns)}",
    ]
    for method in dict.fromkeys(method for setting, method in found if setting in settings):
        outcomes = [o for s in settings if (o := found.get((s, method)))]
        cells = " | ".join(_cell(setting, method, found) for setting in settings)
        lines.append(f"| `{method}` | {_bits(outcomes)} | {cells} |")
    return "\n".join(lines) + "\n"


def _cell(setting: Setting, method: str, found: Found) -> str:
    outcome = found.get((setting, method))
    if outcome is None:
        return ""
    edge = " †" * outcome.is_at_edge
    if outcome.diverged:
        return f"diverged{edge}"
    settings = outcome.settings
    shown = f"lr {settings['lr']:g}, beta1 {settings['beta1']:g}{edge}"
    return f"{statistics.mean(outcome.losses):.3f}{_shares(setting, method, found)} {shown}"


def _shares(setting: Setting, method: str, found: Found) -> str:
    """Return both shares of a method in parentheses; nothing for a control."""
    if is_control(method):
        return ""
    same, adamw = same_optimizer(method), quality_of(setting, method, ADAMW, found)
    kept = quality_of(setting, method, same, found)
    if not kept and not adamw:
        return ""
    second = [] if same == ADAMW else [str(adamw or "-")]
    return f" ({'; '.join([f'**{kept}**' if kept else '-', *second])})"


def _bits(outcomes: Sequence[Outcome]) -> str:
    bits = [bits_of(run) for outcome in outcomes for run in outcome.runs]
    low, high = min(bits), max(bits)
    return f"{high:.3g}" if high <= 1.05 * low else f"{low:.2g} to {high:.2g}"


def make_cells(found: Found) -> list[Cell]:
    """Return one cell for each method, number of ranks, length and batch."""
    groups: dict[tuple[str, int, float, int], dict[str, tuple[Quality, Quality]]] = {}
    for setting, method in found:
        if is_control(method) or setting.schedule != COSINE:
            continue
        kept = quality_of(setting, method, same_optimizer(method), found)
        adamw = quality_of(setting, method, ADAMW, found)
        if kept and adamw:
            key = method, setting.ranks, setting.tokens, setting.batch
            groups.setdefault(key, {})[setting.task] = kept, adamw
    return [
        Cell(
            *key,
            seeds=min(kept.seeds for kept, _ in group.values()),
            spread=round(max(min(kept.spread, -_DIVERGED) for kept, _ in group.values()), 3),
            kept={task: _bounded(kept) for task, (kept, _) in group.items()},
            adamw={task: _bounded(adamw) for task, (_, adamw) in group.items()},
        )
        for key, group in sorted(groups.items())
    ]


def _bounded(quality: Quality) -> float:
    return max(_DIVERGED, round(quality.mean, 3))


def to_json(cells: Sequence[Cell]) -> str:
    """Return the file, a line for each cell."""
    lines = ",\n".join(f"    {json.dumps(asdict(cell))}" for cell in cells)
    return f'{{\n  "command": "python -m benchmarks.quality",\n  "cells": [\n{lines}\n  ]\n}}\n'

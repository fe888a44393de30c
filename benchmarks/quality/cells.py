"""The quality kept in plain data, which ``comm-hooks advise`` starts from."""

import json
from collections.abc import Sequence
from dataclasses import asdict

from benchmarks.quality.runs import Found, Quality, controls, quality_of
from benchmarks.quality.settings import COSINE
from comm_hooks.launchers.advise.quality import Cell

_DIVERGED = -10.0
"""The quality of a method that diverged."""


def make_cells(found: Found) -> list[Cell]:
    """Return one cell for each method, number of ranks, length and batch."""
    groups: dict[tuple[str, int, float, int], dict[str, Quality]] = {}
    for setting, method in found:
        kept = quality_of(setting, method, found)
        left_out = method in controls(method) or setting.schedule != COSINE
        if kept and not left_out:
            key = method, setting.ranks, setting.tokens, setting.batch
            groups.setdefault(key, {})[setting.task] = kept
    return [
        Cell(
            *key,
            seeds=min(kept.seeds for kept in group.values()),
            spread=round(max(min(kept.spread, -_DIVERGED) for kept in group.values()), 3),
            kept={task: max(_DIVERGED, round(kept.mean, 3)) for task, kept in group.items()},
        )
        for key, group in sorted(groups.items())
    ]


def to_json(cells: Sequence[Cell]) -> str:
    """Return the file, a line for each cell."""
    lines = ",\n".join(f"    {json.dumps(asdict(cell))}" for cell in cells)
    return f'{{\n  "command": "python -m benchmarks.quality",\n  "cells": [\n{lines}\n  ]\n}}\n'

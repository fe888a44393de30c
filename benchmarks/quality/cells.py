"""The shares kept in plain data, which ``comm-hooks advise`` starts from."""

import json
from collections.abc import Sequence
from dataclasses import asdict

from benchmarks.quality.methods import controls
from benchmarks.quality.page import share_of
from benchmarks.quality.settings import COSINE, Setting
from benchmarks.quality.shares import Share
from benchmarks.quality.tuning import Entry, Records
from comm_hooks.launchers.advise.quality import Cell

_DIVERGED = -10.0
"""The share of what ended in infinity."""


def make_cells(entries: Sequence[Entry], records: Records) -> list[Cell]:
    """Return one cell for each method, number of ranks, length and batch."""
    found = {(e.setting, e.method): e.finished(records) for e in entries}
    groups: dict[tuple[str, int, float, int], dict[str, Share]] = {}
    for entry in entries:
        share = share_of(entry.setting, entry.method, found)
        setting: Setting = entry.setting
        left_out = entry.method in controls(entry.method) or setting.schedule != COSINE
        if share and not left_out:
            key = entry.method, setting.ranks, setting.tokens, setting.batch
            groups.setdefault(key, {})[setting.task] = share
    return [
        Cell(
            *key,
            seeds=min(share.seeds for share in shares.values()),
            spread=round(max(min(share.spread, -_DIVERGED) for share in shares.values()), 3),
            kept={task: max(_DIVERGED, round(share.mean, 3)) for task, share in shares.items()},
        )
        for key, shares in sorted(groups.items())
    ]


def to_json(cells: Sequence[Cell]) -> str:
    """Return the file, a line for each cell."""
    lines = ",\n".join(f"    {json.dumps(asdict(cell))}" for cell in cells)
    return f'{{\n  "command": "python -m benchmarks.quality",\n  "cells": [\n{lines}\n  ]\n}}\n'

"""Tables of what has come of the faults, in Markdown."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.docs.pages import ROOT
from tests.faults.kinds import FAMILIES, KINDS
from tests.faults.methods import METHODS
from tests.faults.training import TIMEOUT_SECONDS, VERIFY_EVERY

RECORDS = ROOT / "benchmarks/results/faults/records.jsonl"
PAGE = ROOT / "docs/faults.md"

Record = Mapping[str, Any]

_GROUPS = tuple(dict.fromkeys(method.group for method in METHODS.values()))


def read_records(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def by_kind(records: Sequence[Record]) -> str:
    """Return one row per kind of fault, under its family."""
    lines = []
    for family, kinds in FAMILIES.items():
        lines.append(f"| **{family}** |" + " |" * len(_GROUPS))
        lines += [_row(kind.name, records, {kind.name}) for kind in kinds]
    return "\n".join([*_head("one rank …"), *lines])


def by_family(records: Sequence[Record]) -> str:
    """Return one row per family."""
    lines = []
    for family, kinds in FAMILIES.items():
        lines.append(_row(family, records, {kind.name for kind in kinds}))
    lines.append(_row("**all**", records, set(KINDS)))
    return "\n".join([*_head("one rank …"), *lines])


def totals(records: Sequence[Record]) -> str:
    """Return what came of all of them in a sentence."""
    verdicts = [record["verdict"] for record in records]
    wrong = {
        "silent divergences": sum("silent divergence" in verdict for verdict in verdicts),
        "hangs": sum("hangs" in verdict for verdict in verdicts),
        "crashes": sum("crashed" in verdict for verdict in verdicts),
    }
    good = {verdict: verdicts.count(verdict) for verdict in ("refused", "recovered")}
    rest = len(records) - sum(good.values()) - sum(wrong.values())
    return (
        f"{len(records):,} faults: {good['refused']:,} refused, {good['recovered']:,} recovered "
        f"from; {', '.join(f'{count} {what}' for what, count in wrong.items())}, {rest} errors "
        "that do not name the rank and the reason."
    )


def page(records: Sequence[Record]) -> str:
    """Return the text of ``docs/faults.md``."""
    columns = "\n".join(
        f"* **{group}**: " + ", ".join(f"`{m.name}`" for m in METHODS.values() if m.group == group)
        for group in _GROUPS
    )
    return _PAGE.format(
        totals=totals(records),
        families=by_family(records),
        table=by_kind(records),
        columns=columns,
        timeout=TIMEOUT_SECONDS,
        verify_every=VERIFY_EVERY,
    )


def _head(first: str) -> list[str]:
    return [f"| {first} | {' | '.join(_GROUPS)} |", "|---" * (1 + len(_GROUPS)) + "|"]


def _row(name: str, records: Iterable[Record], kinds: set[str]) -> str:
    cells = []
    own = [record for record in records if record["fault"] in kinds]
    for group in _GROUPS:
        verdicts = [r["verdict"] for r in own if METHODS[r["method"]].group == group]
        counts = {v: verdicts.count(v) for v in ("refused", "recovered") if v in verdicts}
        told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
        cells.append(f"{told or 0} of {len(verdicts)}" if verdicts else "")
    return f"| {name} | {' | '.join(cells)} |"


_PAGE = """# Faults

What becomes of a training run when one of its ranks does what it should not. Every case is a run of
its own: 2 to 4 processes joined by gloo, with a timeout of {timeout:g} seconds, a small model, and
one fault, at a step and a rank that are drawn from the case's name. Sharded models are divided by
FSDP over two ranks each of two nodes, which exchange shard by shard.

{totals}

* **refused**: every rank that was still there ended with a `ConfigMismatchError`, `PayloadError`,
  `PeerError` or `ValueError` that names the rank and the reason. A rank that leaves a step out is
  through before the others, and those that do not take one more are, too: the rest then learn who
  is gone.
  Where a model is sharded this holds for the rank that exchanges with the one at fault: the others
  meet it in what FSDP sends, and may end in torch's own words.
* **recovered**: all ranks went on, and ended with the same parameters, bit for bit. After a NaN or
  an infinity hooks and optimizers also ended like a run that leaves this step out on all ranks (but
  for `ZeroOneAdam`, which takes such a gradient for zero at local steps, and `Marina`, which tries
  the step again). An optimizer's state that goes back on one rank does no harm where the next
  exchange overwrites it, and is refused elsewhere.

{families}

Each fault by itself:

{table}

Ranks compare a fingerprint of their parameters every {verify_every} exchanges here, every 32
unless `verify_every` says otherwise. Bits are flipped where a checksum covers them: not in what
follows the header of a sum, nor in vectors inside a node ([the wire format](wire.md)).
All of this is gloo on CPUs. On a GPU what does not fit is told in the next step, and a rank that is
late, stopped or dead is for NCCL's watchdog to find, which ends the others in words of its own.

The methods:

{columns}

```sh
make faults
```

injects what has no record in `benchmarks/results/faults/records.jsonl` yet, and writes this page.
`make test` injects a few of them.
"""

"""Tables of the outcomes, in Markdown."""

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


def table(records: Sequence[Record]) -> str:
    """Return a row per family of faults, one below it per kind, and one of all."""
    lines = [f"| one rank … | {' | '.join(_GROUPS)} |", "|---" * (1 + len(_GROUPS)) + "|"]
    for family, kinds in FAMILIES.items():
        lines.append(_row(f"**{family}**", records, {kind.name for kind in kinds}))
        lines += [_row(kind.name, records, {kind.name}) for kind in kinds]
    return "\n".join([*lines, _row("**all**", records, set(KINDS))])


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
        table=table(records),
        columns=columns,
        timeout=TIMEOUT_SECONDS,
        verify_every=VERIFY_EVERY,
    )


def _row(name: str, records: Iterable[Record], kinds: set[str]) -> str:
    cells = []
    own = [record for record in records if record["fault"] in kinds]
    for group in _GROUPS:
        verdicts = [r["verdict"] for r in own if METHODS[r["method"]].group == group]
        counts = {v: verdicts.count(v) for v in ("refused", "recovered") if v in verdicts}
        told = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
        rest = len(verdicts) - sum(counts.values())
        cells.append(told + (f", {rest} neither" if rest else ""))
    return f"| {name} | {' | '.join(cells)} |"


_PAGE = """# Faults

One rank of a training run misbehaves. Every case is a run of its own: 2 to 4 processes joined by
gloo, with a timeout of {timeout:g} seconds, a small model, and one fault, at a step and a rank that
are drawn from the case's name; each kind and method twice. A run ends by saving its state. Sharded
models are divided by FSDP over two ranks each of two nodes, which exchange shard by shard.

{totals}

* **refused**: every remaining rank ended with a `ConfigMismatchError`, `PayloadError`, `PeerError`
  or `ValueError` that names the rank and the reason. A rank that leaves a step out ends before the
  others; the others then name the missing rank. Where a model is sharded, this holds for the
  partner of the faulty rank; the other ranks meet the fault inside FSDP, and may end in torch's own
  words.
* **recovered**: all ranks went on, and ended with the same parameters, bit for bit. With a stopped
  store this needs no new connection. A flipped bit counts here if the run ends as an undisturbed
  one.

{table}

Ranks compare a fingerprint of their parameters every {verify_every} exchanges here; the default of
`verify_every` is 32. Bits are flipped where a checksum covers them: not in the body of a sum, nor
in vectors inside a node ([the wire format](wire.md)). All runs use gloo on CPUs. On a GPU the error
comes in the next step, and NCCL's watchdog ends ranks that wait for a late or dead one, in
its own words.

The methods:

{columns}

`make faults` injects the faults without a record in `benchmarks/results/faults/records.jsonl`, and
writes this page; `make test` injects a few.
"""

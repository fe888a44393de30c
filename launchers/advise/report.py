"""What people read in the terminal."""

import math
from collections.abc import Iterable, Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.lab.tables import format_bytes
from comm_hooks.launchers.advise.advice import Advice, Case
from comm_hooks.launchers.advise.links import Measured
from comm_hooks.launchers.advise.shares import ALL, Kept, most_ranks
from comm_hooks.launchers.advise.snippets import json_line, python_line
from comm_hooks.launchers.clock import roughly
from comm_hooks.launchers.output import say
from comm_hooks.launchers.rates import format_rate

_COLUMNS = (
    "method",
    "ms/step",
    "vs all-reduce",
    "codec ms",
    "waiting ms",
    "sent/step",
    "residual",
    "kept",
)


def print_links(links: Sequence[Measured], console: Console) -> None:
    """Print every direction that was measured."""
    for item in links:
        where = "inside a node" if item.inside else "between nodes"
        rate = format_rate(8 * item.link.bandwidth)
        ways = f"rank {item.source} to rank {item.target} ({where})"
        say(f"{ways}: {rate}, {1e3 * item.link.latency:.2f} ms", console)


def print_rows(
    case: Case, rows: Sequence[Advice], left_out: Mapping[str, str], console: Console
) -> None:
    """Print a line per method, the fastest first, and why some are left out."""
    plain = next((r for r in rows if r.method.spec == "all_reduce"), None)
    step = case.step
    say(
        f"{step.numel / 1e6:.3g} M parameters ({step.dtype}), {step.milliseconds:.4g} ms per "
        f"step without exchange, {case.network.ranks} ranks, {case.network.backend}",
        console,
    )
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name == "method" else "right", overflow="fold")
    for row in sorted(rows, key=lambda row: row.prediction.step):
        codec = row.prediction.arithmetic - step.milliseconds / 1e3
        factor = "-"
        if plain:
            ratio = plain.prediction.step / row.prediction.step
            factor = f"{roughly(ratio) if row.is_noisy else f'{ratio:.3g}'}x"
        table.add_row(
            Text(row.method.spec),
            _format_seconds(row.prediction.step, row.is_noisy),
            factor,
            _format_seconds(codec, row.codec_is_noisy),
            f"{1e3 * row.prediction.waiting:,.0f}",
            format_bytes(row.sent),
            format_bytes(row.plan.state_bytes) if row.plan.state_bytes else "-",
            str(row.kept) if row.kept else "-",
        )
    console.print(table)
    for spec, reason in left_out.items():
        console.print(Text(f"{spec} is left out: {reason}"))
    notes = [
        "codec: what the method's arithmetic adds to the step on this device; residual: what each "
        "rank keeps for the method.",
        _describe_shares([row.kept for row in rows if row.kept and row.kept is not ALL], case),
    ]
    if case.network.backend != "gloo":
        notes.append(
            f"{case.network.backend}: full use of the link and a number of rounds that grows with "
            "the logarithm of the ranks are assumed, not measured."
        )
    if any(row.is_noisy or row.codec_is_noisy for row in rows):
        notes.insert(
            0,
            "~: noise. While this was measured other programs, or more threads than there are "
            "cores (OMP_NUM_THREADS), kept this device busy, so that arithmetic seems to take "
            "longer than it does: measure again on an idle device.",
        )
    for note in notes:
        console.print(Text(f"* {note}"))


def print_zero_notes(case: Case, console: Console) -> None:
    """Print what ZeRO changes."""
    gathered = sum(collective.traffic for collective in case.afterwards)
    notes = [
        f"ZeRO stage {case.zero_stage}: the all-gather of updated parameters stays "
        f"({format_bytes(gathered)} per step), so bytes shrink to a third at best, and a residual "
        "on each rank takes back memory that ZeRO saves.",
    ]
    if case.zero_stage == 2:
        notes.append("Stage 2 exchanges gradients at every micro-step of an accumulated batch.")
    for note in notes:
        console.print(Text(f"* {note}"))


def print_choice(
    case: Case, rows: Sequence[Advice], chosen: Advice | None, min_share: float, console: Console
) -> None:
    """Print what to use, in Python and in JSON, and whether noise may have decided that."""
    if chosen is None:
        console.print(Text(f"No method here is known to keep {min_share:.0%} on every task."))
        _print_faster(rows, math.inf, min_share, console)
        return
    console.print(Text(f"\nRecommended: {chosen.method.spec}"))
    if not case.zero_stage:  # where there is no DDP model
        say(f"  Python: {python_line(chosen.method)}", console)
    line = json_line(chosen.method) or "none: this method is made in Python"
    say(f"  JSON (DeepSpeed): {line}", console)
    _print_faster(rows, chosen.prediction.step, min_share, console)
    if any(row.is_noisy for row in rows):
        say("  Another method may be the faster one: the figures marked ~ are noise.", console)


def _print_faster(
    rows: Sequence[Advice], seconds: float, min_share: float, console: Console
) -> None:
    """Print what would be recommended with a lower ``--min-share``."""
    for row in rows:
        kept = row.kept
        if not kept or row.prediction.step >= seconds:
            continue
        share = math.floor(100 * kept.lowest) / 100
        if 0 < share < min_share:  # what may be worse than nothing is nobody's choice
            say(
                f"  {row.method.spec} is faster, but keeps {kept} only: --min-share {share:g} "
                "takes it in",
                console,
            )


def _format_seconds(seconds: float, is_noisy: bool) -> str:
    milliseconds = 1e3 * seconds
    if is_noisy and milliseconds >= 0.5:
        return roughly(milliseconds)
    return f"{milliseconds:,.0f}"


def _describe_shares(shares: Sequence[Kept], case: Case) -> str:
    """Say what the column of shares is, and of which trainings."""
    ranks = case.network.ranks
    if not shares:
        return (
            f"kept: nothing was measured of these methods with {ranks} ranks or more on enough "
            f"tasks (of any method the most are {most_ranks()}), so none of them is recommended in "
            "place of all-reduce."
        )
    cells = [cell for share in shares for cell in share.cells]
    return (
        "kept: of what exchanging is worth, (none - method) / (none - all-reduce) in held-out "
        "loss, the least and the most of several tasks (± half the distance between seeds): "
        f"{_listed(cell.ranks for cell in cells)} ranks, "
        f"{_listed(cell.tokens for cell in cells)} tokens per parameter, batches of "
        f"{_listed(cell.batch for cell in cells)}, models of 0.6 M parameters. Other models and "
        "longer trainings can differ either way: compare on your own data before a long run "
        "(python -m benchmarks.compare --data). '-': not measured on enough tasks."
    )


def _listed(sizes: Iterable[float]) -> str:
    *others, last = (f"{size:g}" for size in sorted(set(sizes)))
    return f"{', '.join(others)} or {last}" if others else last

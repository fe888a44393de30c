"""The printed output of ``advise``: the links, the predictions and the recommendation."""

import math
from collections.abc import Iterable, Mapping, Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from comm_hooks.launchers.advise.links import Measured
from comm_hooks.launchers.advise.quality import ALL, Kept, most_ranks
from comm_hooks.launchers.advise.recommend import Case, Row
from comm_hooks.launchers.links import format_rate
from comm_hooks.launchers.output import say

_COLUMNS = ("method", "ms/step", "vs all-reduce", "codec ms", "sent/step", "kept")


def print_links(links: Sequence[Measured], console: Console) -> None:
    """Print one line for each direction of a link."""
    for item in links:
        rate, latency = format_rate(8 * item.link.bandwidth), 1e3 * item.link.latency
        say(f"rank {item.source} to rank {item.target}: {rate}, {latency:.2f} ms", console)


def print_rows(
    case: Case, rows: Sequence[Row], left_out: Mapping[str, str], console: Console
) -> None:
    """Print a table row per method, the fastest first, and the reasons why methods are left out."""
    plain = next((row for row in rows if row.method.spec == "all_reduce"), None)
    step = case.step
    say(
        f"{step.numel / 1e6:.3g} M parameters ({step.dtype}), {step.milliseconds:.4g} ms per "
        f"step without exchange, {case.network.ranks} ranks, {case.network.backend}",
        console,
    )
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name == "method" else "right", overflow="fold")
    for row in sorted(rows, key=lambda row: row.seconds):
        table.add_row(
            Text(row.method.spec),
            f"{1e3 * row.seconds:,.0f}",
            f"{plain.seconds / row.seconds:.3g}x" if plain else "-",
            "?" if row.method.compressor == "powersgd" else f"{1e3 * row.codec:,.0f}",
            format_bytes(row.traffic),
            str(row.kept) if row.kept else "-",
        )
    console.print(table)
    for spec, reason in left_out.items():
        console.print(Text(f"{spec} is left out: {reason}"))
    notes = [
        "codec: the arithmetic that the method adds to a step on this device.",
        _describe_quality([row.kept for row in rows if row.kept and row.kept is not ALL], case),
    ]
    if any(row.method.compressor == "powersgd" for row in rows):
        notes.append("powersgd: without its arithmetic, which is not measured.")
    if case.network.backend != "gloo":
        notes.append(
            f"{case.network.backend}: full use of the link and a number of rounds that grows with "
            "the logarithm of the ranks are assumed, not measured."
        )
    if case.zero_stage:
        gathered = sum(collective.traffic for collective in case.afterwards)
        notes.append(
            f"ZeRO stage {case.zero_stage}: every method keeps the all-gather of updated "
            f"parameters ({format_bytes(gathered)} per step), so bytes shrink to a third at best."
        )
    for note in notes:
        console.print(Text(f"* {note}"))


def print_choice(
    rows: Sequence[Row], chosen: Row | None, min_share: float, console: Console
) -> None:
    """Print the recommended method with the reason, and faster methods with less quality."""
    if chosen is None:
        say(f"\nNo method here is known to keep {min_share:.0%} on every task.", console)
    else:
        reason = f"{1e3 * chosen.seconds:,.0f} ms per step"
        if chosen.kept is ALL:
            reason += ", and no method here is faster by 5 % and known to keep enough"
        else:
            reason += (
                f", the fastest of those known to keep {min_share:.0%}; it keeps {chosen.kept}"
            )
        say(f"\nRecommended: {chosen.method.spec} ({reason})", console)
    for row in rows:
        if not row.kept or (chosen and row.seconds >= chosen.seconds):
            continue
        share = math.floor(100 * row.kept.lowest) / 100
        if 0 < share < min_share:  # below 0 a method is worse than no exchange
            say(
                f"  {row.method.spec} is faster, but keeps only {row.kept}: --min-share {share:g} "
                "admits it",
                console,
            )


def format_bytes(count: float) -> str:
    """Return a number of bytes as text with a unit: B, kB, MB or GB.

    Example::

        >>> format_bytes(1_204_224), format_bytes(999.6)
        ('1.2 MB', '1 kB')
    """
    for unit in ("B", "kB", "MB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1e3
    return f"{count:,.1f} GB"


def _describe_quality(shares: Sequence[Kept], case: Case) -> str:
    """Return the note about the column "kept": its meaning, and the measured trainings."""
    ranks = case.network.ranks
    if not shares:
        return (
            f"kept: nothing was measured of these methods with {ranks} ranks or more on enough "
            f"tasks (of any method the most are {most_ranks()}), so none of them is recommended in "
            "place of all-reduce."
        )
    cells = [cell for share in shares for cell in share.cells]
    return (
        "kept: the part of the gain from exchanging, (none - method) / (none - all-reduce) in "
        "held-out loss, the least and the most of several tasks (± half the distance between "
        f"seeds), measured with {_listed(cell.ranks for cell in cells)} ranks, "
        f"{_listed(cell.tokens for cell in cells)} tokens per parameter, batches of "
        f"{_listed(cell.batch for cell in cells)}, models of 0.6 M parameters. Other models and "
        "longer trainings can differ either way: compare on your own data before a long run. "
        "'-': not measured on enough tasks."
    )


def _listed(sizes: Iterable[float]) -> str:
    *others, last = (f"{size:g}" for size in sorted(set(sizes)))
    return f"{', '.join(others)} or {last}" if others else last

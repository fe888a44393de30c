"""Predict the step time of each method, choose one, and print both."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.filesize import decimal
from rich.table import Table
from rich.text import Text

from comm_hooks.launchers.advise.cost_model import Network, Plan, predict
from comm_hooks.launchers.advise.methods import Method
from comm_hooks.launchers.advise.quality import ALL, Kept, kept_by, most_ranks
from comm_hooks.launchers.output import say

_CLOSE = 1.05
"""The speed-up over all-reduce above which another method is recommended."""

_COLUMNS = ("method", "ms/step", "vs all-reduce", "codec ms", "sent/step", "kept", "kept, AdamW")


@dataclass(frozen=True)
class Row:
    """The prediction for one method.

    Attributes:
        method: the method.
        seconds: the seconds of a step.
        codec: the seconds of arithmetic that the method adds to a step.
        traffic: the bytes that each rank sends per step.
        kept: the quality in similar measured trainings; None without a measurement.
    """

    method: Method
    seconds: float
    codec: float
    traffic: float
    kept: Kept | None


def make_row(method: Method, plan: Plan, network: Network, step: float, adamw: float) -> Row:
    """Return the prediction for a method.

    Args:
        method: the method.
        plan: its exchanges and arithmetic.
        network: the network between the ranks.
        step: the seconds of a training step without exchange.
        adamw: the seconds of a step of AdamW on this model.
    """
    optimizer = min(adamw, step)
    seconds = predict(plan, network, forward_backward=step - optimizer, optimizer=optimizer)
    codec = plan.codec + (0.0 if plan.optimizer is None else plan.optimizer - optimizer)
    return Row(method, seconds, codec, plan.traffic, kept_by(method, network.ranks))


def choose(rows: Sequence[Row], min_share: float) -> Row | None:
    """Return the fastest method with a measured quality of at least ``min_share`` on every task.

    Return all-reduce if it is slower by less than 5 %, and None if no method qualifies.  The method
    ``none`` never qualifies.
    """
    fit = [
        row
        for row in rows
        if row.method.compressor != "none" and row.kept and row.kept.lowest >= min_share
    ]
    if not fit:
        return None
    fastest = min(fit, key=lambda row: row.seconds)
    for row in fit:
        if row.kept is ALL and row.seconds <= _CLOSE * fastest.seconds:
            return row
    return fastest


def print_rows(rows: Sequence[Row], network: Network, console: Console) -> None:
    """Print a row per method, the fastest first, and the meaning of the columns."""
    plain = next((row for row in rows if row.method.spec == "all_reduce"), None)
    table = Table(box=box.SIMPLE_HEAD, show_edge=False)
    for name in _COLUMNS:
        table.add_column(name, justify="left" if name == "method" else "right", overflow="fold")
    for row in sorted(rows, key=lambda row: row.seconds):
        table.add_row(
            Text(row.method.spec),
            f"{1e3 * row.seconds:,.0f}",
            f"{plain.seconds / row.seconds:.3g}x" if plain else "-",
            f"{1e3 * row.codec:,.0f}",
            decimal(round(row.traffic)),
            *((str(row.kept), row.kept.of_adamw) if row.kept else ("-", "-")),
        )
    console.print(table)
    notes = [
        "codec: the arithmetic that the method adds to a step on this device.",
        _describe_quality([row.kept for row in rows if row.kept and row.kept is not ALL], network),
    ]
    if network.backend != "gloo":
        notes.append(
            f"{network.backend}: full use of the link and a number of rounds that grows with the "
            "logarithm of the ranks are assumed, not measured."
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


def _describe_quality(shares: Sequence[Kept], network: Network) -> str:
    """Return the note about the column "kept": its meaning, and the measured trainings."""
    if not shares:
        return (
            f"kept: nothing was measured of these methods with {network.ranks} ranks or more on "
            f"three tasks (the most ranks of any measurement are {most_ranks()}), so none of them "
            "is recommended in place of all-reduce."
        )
    cells = [cell for share in shares for cell in share.cells]
    return (
        "kept: the part of the gain from exchanging, (none - method) / (none - all-reduce) in "
        "held-out loss, where none and all-reduce have the method's own local steps; kept, AdamW: "
        "where they have AdamW. The lowest and the highest of several tasks (± half the distance "
        f"between seeds), measured with {_listed(cell.ranks for cell in cells)} ranks, "
        f"{_listed(cell.tokens for cell in cells)} tokens per parameter, batches of "
        f"{_listed(cell.batch for cell in cells)}, models of 0.15 to 0.7 M parameters. Other "
        "models and longer trainings can differ either way: compare on your own data before a long "
        "run. '-': measured on fewer than three tasks."
    )


def _listed(sizes: Iterable[float]) -> str:
    *others, last = (f"{size:g}" for size in sorted(set(sizes)))
    return f"{', '.join(others)} or {last}" if others else last

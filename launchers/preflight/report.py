"""The printed tables of a preflight without problems."""

from collections.abc import Sequence

from rich.table import Table

from comm_hooks.launchers.output import make_console, say
from comm_hooks.launchers.preflight.facts import Facts
from comm_hooks.launchers.preflight.links import Link
from comm_hooks.launchers.rates import format_rate

_MOST_LINKS = 12


def print_report(nodes: Sequence[Facts], links: Sequence[Link], met: int) -> None:
    """Print the nodes, their versions, and the slowest links.

    Args:
        nodes: the facts about each node.
        links: the measured links between the nodes.
        met: the number of processes that took part.
    """
    console = make_console()
    table = Table("node", "host", "address", "interface", "processes", "GPUs")
    for index, facts in enumerate(nodes):
        gpus = f"{len(facts.gpus)} x {facts.gpus[0]}" if facts.gpus else "none"
        processes = "?" if facts.processes is None else str(facts.processes)
        table.add_row(str(index), facts.host, facts.address, facts.interface, processes, gpus)
    console.print(table)
    versions = ", ".join(f"{name} {version}" for name, version in nodes[0].versions.items())
    say(f"All nodes: {versions}", console)
    if links:
        table = Table("link", "round trip", "bandwidth")
        slowest = sorted(links, key=lambda link: link.bits_per_second or 0.0)[:_MOST_LINKS]
        for link in slowest:
            table.add_row(
                f"{link.source} -> {link.target}",
                f"{1e3 * (link.round_trip or 0):.2f} ms",
                format_rate(link.bits_per_second or 0),
            )
        console.print(table)
        if len(slowest) < len(links):
            console.print(f"(the slowest {len(slowest)} of {len(links)})", highlight=False)
    counts = f"nodes: {len(nodes)}, links: {len(links)}, processes in a gloo group: {met}"
    say(f"Passed: no problem was found ({counts})", console)

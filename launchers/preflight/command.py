"""The options of ``comm-hooks preflight``, and the function that runs it."""

import os
from typing import Annotated

import typer

from comm_hooks.launchers.output import FAILED, complain, refusing, require_positive


def preflight(
    head: Annotated[
        str | None,
        typer.Option(metavar="HOST[:PORT]", help="Where nodes meet, as for comm-hooks launch."),
    ] = None,
    nnodes: Annotated[
        int, typer.Option(help="Nodes, where this is started by hand once on each.")
    ] = 1,
    node_rank: Annotated[
        int | None, typer.Option(help="Which node this is. [default: the head is 0]")
    ] = None,
    nproc: Annotated[
        int | None, typer.Option(help="Processes per node that training will have.")
    ] = None,
    interface: Annotated[
        str | None, typer.Option(help="Network interface. [default: the one that leads to --head]")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for nodes.")] = 60.0,
    min_bandwidth: Annotated[
        float | None,
        typer.Option(help="Mbit/s that every link must carry. [default: half of the median link]"),
    ] = None,
    local_rank: Annotated[str | None, typer.Option("--local_rank", hidden=True)] = None,
) -> None:
    """Check every node before training: versions, ports, links, GPUs, disks.

    Run it as training will be: under torchrun, deepspeed, mpirun or srun, or by hand once on each
    node with --nnodes and --head; comm-hooks launch --preflight does that. Prints one line per
    problem, or tables. Exit codes, the same on all nodes: 0, 1 for problems, 2 for bad input.
    """
    from comm_hooks.launchers.launch.job import Job
    from comm_hooks.launchers.network import parse_endpoint
    from comm_hooks.launchers.preflight.check import check
    from comm_hooks.launchers.preflight.facts import describe
    from comm_hooks.launchers.preflight.meeting import find_party, meet
    from comm_hooks.launchers.preflight.report import print_report

    with refusing("comm-hooks preflight"):
        require_positive({"--timeout": timeout, "--min-bandwidth": min_bandwidth})
        Job((), nproc=nproc, nodes=(nnodes, nnodes), node_rank=node_rank)  # checks them
        endpoint = parse_endpoint(head) if head else None
        party = find_party(endpoint, nnodes, node_rank, nproc, os.environ)
    with refusing("comm-hooks preflight", FAILED):
        facts, listener = describe(party, interface)
        origin = f"{facts.address} ({facts.interface})" if facts.address else facts.host
        meeting = meet(party, timeout, origin)
        least = None if min_bandwidth is None else min_bandwidth * 1e6
        if facts.interface and party.process.launcher != "torchrun":
            # As comm-hooks launch does; torchrun by itself does not.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", facts.interface)
        verdict = check(meeting, facts, listener, timeout, least)
        if listener:
            listener.close()
    if party.speaks or meeting.rank == 0:
        for line in verdict.problems:
            complain("comm-hooks preflight", line)
    if verdict.problems:
        raise typer.Exit(FAILED)
    if meeting.rank == 0:
        print_report(verdict.nodes, verdict.links, party.size)

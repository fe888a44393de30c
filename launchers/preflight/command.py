"""``comm-hooks preflight``."""

from pathlib import Path
from typing import Annotated

import typer


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
    config: Annotated[
        Path | None, typer.Option(help="A file that must be alike on all nodes, such as ds.json.")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds to wait for nodes.")] = 60.0,
    links: Annotated[bool, typer.Option(help="Measure the links between nodes.")] = True,
    min_bandwidth: Annotated[
        float | None,
        typer.Option(help="Mbit/s that every link must carry. [default: half of the median link]"),
    ] = None,
    max_clock_offset: Annotated[
        float, typer.Option(help="Seconds by which clocks may differ.")
    ] = 1.0,
    local_rank: Annotated[str | None, typer.Option("--local_rank", hidden=True)] = None,
) -> None:
    """Check every node before training: versions, settings, ports, links, clocks, GPUs, disks.

    Run it as training will be: under torchrun, deepspeed, mpirun or srun, or by hand once on each
    node with --nnodes and --head; comm-hooks launch --preflight does that. Prints one line per
    problem, or tables. Exit codes, alike on all nodes: 0, 1 for problems, 2 for bad input.
    """
    from comm_hooks.launchers.preflight import run

    run.preflight(
        head=head,
        nnodes=nnodes,
        node_rank=node_rank,
        nproc=nproc,
        interface=interface,
        config=config,
        timeout=timeout,
        links=links,
        min_bandwidth=min_bandwidth,
        max_clock_offset=max_clock_offset,
        local_rank=local_rank,
    )

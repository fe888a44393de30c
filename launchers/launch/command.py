"""The options of ``comm-hooks launch``, and the function that runs it."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from comm_hooks.launchers.launch.job import Job, parse_nodes, parse_variables
from comm_hooks.launchers.network import parse_endpoint, wait_for_port
from comm_hooks.launchers.output import refusing

if TYPE_CHECKING:
    from comm_hooks.launchers.launch.plan import Plan


def launch(
    target: Annotated[
        list[str], typer.Argument(metavar="SCRIPT [ARGS]...", help="The script of every rank.")
    ],
    module: Annotated[
        bool, typer.Option("--module", "-m", help="SCRIPT is a module, as for python -m.")
    ] = False,
    nproc: Annotated[
        int | None, typer.Option(help="Processes per node. [default: one per GPU, else 1]")
    ] = None,
    nnodes: Annotated[
        str, typer.Option(metavar="N|MIN:MAX", help="Nodes; a range for an elastic job.")
    ] = "1",
    node_rank: Annotated[
        int | None,
        typer.Option(help="Which node this is, counted from 0. Without it torchrun decides."),
    ] = None,
    head: Annotated[
        str | None,
        typer.Option(metavar="HOST[:PORT]", help="Where nodes meet; the same on all of them."),
    ] = None,
    interface: Annotated[
        str | None, typer.Option(help="Network interface. [default: the one that leads to --head]")
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="A variable for all ranks; may be repeated."),
    ] = None,
    max_restarts: Annotated[int, typer.Option(help="How often torchrun starts ranks anew.")] = 0,
    preflight: Annotated[
        bool, typer.Option("--preflight", help="Check all nodes first; see comm-hooks preflight.")
    ] = False,
    wait: Annotated[
        float, typer.Option(help="Seconds to wait for the head to listen; 0 asks once.")
    ] = 60.0,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be run, and end.")
    ] = False,
) -> None:
    """Start a training script on this machine, or on this node of several.

    Detects Slurm and mpirun, prints the command, which can be pasted into a shell, and runs it.
    Options go before SCRIPT. Exit codes: that of the command; 2 for bad input and for a head that
    does not answer, before any rank is started.
    """
    from comm_hooks.launchers.launch.plan import make_plan

    with refusing("comm-hooks launch"):
        job = Job(
            tuple(target),
            module=module,
            nproc=nproc,
            nodes=parse_nodes(nnodes),
            node_rank=node_rank,
            head=parse_endpoint(head) if head else None,
            interface=interface,
            variables=parse_variables(env or ()),
            max_restarts=max_restarts,
            preflight=preflight,
        )
        plan = make_plan(job, os.environ)
        if plan.runs_here and not dry_run:
            job.require_target()
    if dry_run:
        for step in plan.steps:
            typer.echo(step)
        return
    with refusing("comm-hooks launch"):
        _run(plan, wait)


def _run(plan: Plan, wait: float) -> None:
    """Run the plan's steps in order; the last step's program replaces this process."""
    *first, last = plan.steps
    for step in first:
        if not plan.quiet:
            typer.echo(step, err=True)
        if code := step.run():
            raise typer.Exit(abs(code))
    if not plan.quiet:
        typer.echo(last, err=True)
    if plan.head and plan.route:
        if reason := wait_for_port(plan.head, wait):
            raise ValueError(
                f"cannot reach the head at {plan.head} from {plan.route.address} "
                f"({plan.route.interface}): {reason}, for {wait:g} s; is it started there, and is "
                "the port open?"
            )
    try:
        last.become()
    except FileNotFoundError:
        raise ValueError(f"there is no {last.arguments[0]} on PATH") from None

"""What ``comm-hooks launch`` does: choose what starts the ranks, print it, run it."""

import os
from pathlib import Path

import typer

from comm_hooks.config import unknown
from comm_hooks.launchers.launch.hostfile import read_hostfile
from comm_hooks.launchers.launch.job import LAUNCHERS, Job, parse_nodes, parse_variables
from comm_hooks.launchers.launch.plan import Plan, make_plan, render_file
from comm_hooks.launchers.launch.steps import Command, Step
from comm_hooks.launchers.launch.submission import Submission
from comm_hooks.launchers.network import parse_endpoint, wait_for_port
from comm_hooks.launchers.output import complain, refusing


def launch(
    *,
    target: list[str],
    module: bool,
    nproc: int | None,
    nnodes: str | None,
    node_rank: int | None,
    head: str | None,
    interface: str | None,
    env: list[str] | None,
    max_restarts: int,
    launcher: str,
    hostfile: Path | None,
    preflight: bool,
    config: str | None,
    wait: float,
    slurm: Path | None,
    kubernetes: Path | None,
    name: str | None,
    cpus: int | None,
    cpu: bool,
    sbatch: list[str] | None,
    image: str | None,
    runtime: str,
    dry_run: bool,
) -> None:
    """Do what ``comm-hooks launch --help`` says."""
    with refusing("comm-hooks launch"):
        if launcher not in LAUNCHERS:
            raise ValueError(f"--launcher: {unknown('launcher', launcher, LAUNCHERS)}")
        job = Job(
            tuple(target),
            module=module,
            processes=nproc,
            nodes=_nodes(nnodes, hostfile),
            node_rank=node_rank,
            head=parse_endpoint(head) if head else None,
            interface=interface,
            variables=parse_variables(env or ()),
            restarts=max_restarts,
            check=preflight,
            config=config,
            gpus=not cpu,
        )
        submission = Submission(
            slurm, kubernetes, name, cpus, cpu, tuple(sbatch or ()), image, runtime
        )
        if submission.wanted:
            if launcher != "auto" or hostfile or node_rank is not None:
                raise ValueError(
                    "--launcher, --hostfile and --node-rank do not go with --slurm and "
                    "--kubernetes: the scheduler starts torchrun on its nodes"
                )
            text = render_file(job, submission)
            typer.echo(text.rstrip("\n") if dry_run else submission.write(text))
            return
        plan = make_plan(job, launcher, hostfile, os.environ)
        if plan.runs_here and not dry_run:
            job.require_target()
    for note in plan.notes:
        complain("comm-hooks launch", note)
    if dry_run:
        for step in plan.steps:
            typer.echo(step)
        return
    with refusing("comm-hooks launch"):
        _run(plan, wait)


def _nodes(nnodes: str | None, hostfile: Path | None) -> tuple[int, int]:
    if nnodes is not None:
        return parse_nodes(nnodes)
    count = len(read_hostfile(hostfile)) if hostfile else 1
    return count, count


def _run(plan: Plan, wait: float) -> None:
    """Run all steps; the last one takes the place of this process."""
    for step in plan.steps[:-1]:
        _show(plan, step)
        if code := step.run():
            raise typer.Exit(abs(code))
    last = plan.steps[-1]
    assert isinstance(last, Command)
    _show(plan, last)
    if plan.head and plan.route:
        reason = wait_for_port(plan.head, wait)
        if reason:
            raise ValueError(
                f"cannot reach the head at {plan.head} from {plan.route.address} "
                f"({plan.route.interface}): {reason}, for {wait:g} s; is it started there, and is "
                "the port open?"
            )
    try:
        last.become()
    except FileNotFoundError:
        raise ValueError(f"there is no {last.arguments[0]} on PATH") from None


def _show(plan: Plan, step: Step) -> None:
    if not plan.quiet:
        typer.echo(step, err=True)

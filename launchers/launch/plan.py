"""The choice of the launcher for a job, and of the commands that start it."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from comm_hooks.launchers.environment import detect_environment, in_allocation
from comm_hooks.launchers.launch import programs, slurm
from comm_hooks.launchers.launch.job import Job
from comm_hooks.launchers.launch.steps import Command, comm_hooks, options
from comm_hooks.launchers.network import Endpoint, Route, find_route


@dataclass(frozen=True)
class Plan:
    """The steps of a launch.

    Attributes:
        steps: the steps, run one after the other until one fails; the last starts the job.
        head: the endpoint that must listen before the last step; None if it need not be awaited.
        route: the way from this machine to the head.
        quiet: whether another process prints the same commands.
        runs_here: whether ranks run on this machine, which then needs the script.
    """

    steps: list[Command]
    head: Endpoint | None = None
    route: Route | None = None
    quiet: bool = False
    runs_here: bool = True


def make_plan(job: Job, environment: Mapping[str, str]) -> Plan:
    """Choose the launcher, and return the steps.

    1. a process that torchrun or deepspeed has started does not launch again;
    2. a rank of mpirun becomes the script, with the variables of PyTorch;
    3. a task of srun becomes torchrun, with the nodes and the head from Slurm;
    4. a Slurm allocation of several nodes is filled by srun;
    5. else torchrun starts the ranks of this node.

    Args:
        job: the job.
        environment: the environment variables of this process.

    Raises:
        ValueError: for options that exclude each other, and programs that are not installed.
    """
    process = detect_environment(environment)
    if process.launcher == "torchrun":
        raise ValueError(
            f"this is rank {process.rank} of {process.world_size} already (RANK is set): run the "
            "script itself here, or launch it from outside"
        )
    if process.launcher == "mpirun":
        if job.preflight and process.world_size > 1:
            raise ValueError(
                "--preflight must come before the ranks: mpirun ... comm-hooks preflight"
            )
        rank = programs.rank_of_mpirun(job, process)
        return Plan([rank], quiet=process.rank > 0)
    if process.launcher:
        job = slurm.task_of_srun(job, process, environment)
    elif in_allocation(environment) and (nodes := int(environment.get("SLURM_NNODES", 1))) > 1:
        return Plan([slurm.srun(job, nodes)], runs_here=False)
    return _torchrun(job, environment)


def _torchrun(job: Job, environment: Mapping[str, str]) -> Plan:
    if job.nproc is None:
        job = replace(job, nproc=torch.cuda.device_count() or 1)
    if job.nodes == (1, 1):
        return Plan([*_preflight(job, None), programs.torchrun_here(job)])
    head = job.head
    if head is None:
        raise ValueError(
            f"--nnodes {job.nodes[1]} needs --head HOST[:PORT]: the node where all of them meet, "
            "the same on each"
        )
    route = find_route(head.host, job.interface)
    if job.node_rank == 0 and not route.is_head:
        raise ValueError(
            f"--node-rank 0 must run on the head, but {head.host} ({route.head}) is not this "
            f"machine ({route.address})"
        )
    job_id = environment.get("SLURM_JOB_ID", "comm-hooks")
    steps = [*_preflight(job, head), programs.torchrun_node(job, head, route, job_id)]
    hosts = route.is_head if job.node_rank is None else job.node_rank == 0
    awaited = None if hosts else Endpoint(route.head, head.port)
    return Plan(steps, awaited, route)


def _preflight(job: Job, head: Endpoint | None) -> list[Command]:
    """Return the command of the preflight, one process on each node; [] if not asked for."""
    if not job.preflight:
        return []
    if job.is_elastic:
        raise ValueError(
            f"--preflight needs a fixed number of nodes, got --nnodes {job.nodes[0]}:{job.nodes[1]}"
        )
    values: dict[str, object] = {"--nproc": job.nproc}
    if head:
        rank = None if job.node_rank is None else str(job.node_rank)
        meeting = {"--head": head, "--nnodes": job.nodes[1], "--node-rank": rank}
        values = {**meeting, "--interface": job.interface, **values}
    return [Command((*comm_hooks("preflight"), *options(values)), job.variables)]

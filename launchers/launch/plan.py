"""The choice of the launcher for a job, and of the commands that start it."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path

import torch

from comm_hooks.launchers.environment import detect_environment, in_allocation
from comm_hooks.launchers.launch import programs, schedulers
from comm_hooks.launchers.launch.job import Host, Job, read_hostfile
from comm_hooks.launchers.launch.steps import Command, Step, comm_hooks, options
from comm_hooks.launchers.network import Endpoint, Route, find_route

DEEPSPEED_HOSTFILE = Path("/job/hostfile")
"""The default hostfile of the deepspeed launcher."""

_PREFLIGHT = "comm_hooks.launchers.preflight"


@dataclass(frozen=True)
class Plan:
    """The steps of a launch.

    Attributes:
        steps: the steps, run one after the other until one fails; the last starts the job.
        head: the endpoint that must listen before the last step; None if it need not be awaited.
        route: the way from this machine to the head.
        notes: notes for the user, one line each.
        quiet: whether another process prints the same commands.
        runs_here: whether ranks run on this machine, which then needs the script.
    """

    steps: list[Step]
    head: Endpoint | None = None
    route: Route | None = None
    notes: list[str] = field(default_factory=list)
    quiet: bool = False
    runs_here: bool = False


def make_plan(
    job: Job, launcher: str, hostfile: Path | None, environment: Mapping[str, str]
) -> Plan:
    """Choose the launcher, unless it is given, and return the steps.

    1. a process that torchrun or deepspeed has started does not launch again;
    2. a rank of mpirun becomes the script, with the variables of PyTorch;
    3. a task of srun becomes torchrun, with the nodes and the head from Slurm;
    4. a Slurm allocation of several nodes is filled by srun;
    5. a hostfile, ours or the default of deepspeed, is for deepspeed if it is installed;
    6. torchrun.

    Args:
        job: the job.
        launcher: one of :data:`~comm_hooks.launchers.launch.job.LAUNCHERS`.
        hostfile: the hostfile for deepspeed or mpirun.
        environment: the environment variables of this process.

    Raises:
        ValueError: for options that do not go together, and programs that are not there.
    """
    process = detect_environment(environment)
    if process.launcher == "torchrun":
        raise ValueError(
            f"this is rank {process.rank} of {process.world_size} already (RANK is set): run the "
            "script itself here, or launch it from outside"
        )
    if process.launcher and launcher != "auto":
        raise ValueError(
            f"--launcher {launcher}: {process.launcher} started this process already, as one of "
            f"{process.world_size}: leave --launcher out"
        )
    if launcher == "auto":
        if process.launcher == "mpirun":
            if job.preflight and process.world_size > 1:
                raise ValueError(
                    "--preflight must come before the ranks: comm-hooks launch --launcher mpirun "
                    "--preflight, or mpirun ... comm-hooks preflight"
                )
            rank = programs.rank_of_mpirun(job, process)
            return Plan([rank], quiet=process.rank > 0, runs_here=True)
        if process.launcher:
            return _torchrun(schedulers.task_of_srun(job, process, environment), environment)
        nodes = int(environment.get("SLURM_NNODES", 1))
        if in_allocation(environment) and nodes > 1:
            return Plan([schedulers.srun(job, nodes)])
        if hostfile is None and DEEPSPEED_HOSTFILE.is_file() and find_spec("deepspeed"):
            hostfile = DEEPSPEED_HOSTFILE
        launcher = "deepspeed" if hostfile else "torchrun"
    if launcher == "torchrun":
        if hostfile:
            raise ValueError(
                "--hostfile is for deepspeed and mpirun: torchrun is started on each node, with "
                "--nnodes, --head and --node-rank"
            )
        return _torchrun(job, environment)
    if job.max_restarts:
        raise ValueError(f"--max-restarts is an option of torchrun: {launcher} has none like it")
    if hostfile is None and job.nodes != (1, 1):
        raise ValueError(f"--launcher {launcher} with several nodes needs --hostfile")
    hosts = read_hostfile(hostfile) if hostfile else []
    # 1 is the default, with the hostfile of deepspeed.
    if hosts and job.nodes not in ((1, 1), (len(hosts), len(hosts))):
        raise ValueError(
            f"--nnodes {job.nodes[1]}, but --hostfile {hostfile} names {len(hosts)} hosts"
        )
    if launcher == "deepspeed":
        return _deepspeed(job, hostfile, hosts)
    return _mpirun(job, launcher, hostfile, hosts)


def _torchrun(job: Job, environment: Mapping[str, str]) -> Plan:
    job, notes = _count_processes(job)
    if job.nodes == (1, 1):
        steps = [*_preflight(job, None), programs.torchrun_here(job)]
        return Plan(steps, notes=notes, runs_here=True)
    if job.head is None:
        raise ValueError(
            f"--nnodes {job.nodes[1]} needs --head HOST[:PORT]: the node where all of them meet, "
            "the same on each"
        )
    route = find_route(job.head.host, job.interface)
    if job.node_rank == 0 and not route.is_head:
        raise ValueError(
            f"--node-rank 0 must run on the head, but {job.head.host} ({route.head}) is not this "
            f"machine ({route.address})"
        )
    job_id = environment.get("SLURM_JOB_ID", "comm-hooks")
    steps = [*_preflight(job, job.head), programs.torchrun_node(job, job.head, route, job_id)]
    hosts = route.is_head if job.node_rank is None else job.node_rank == 0
    head = None if hosts else Endpoint(route.head, job.head.port)
    return Plan(steps, head, route, notes, runs_here=True)


def _deepspeed(job: Job, hostfile: Path | None, hosts: list[Host]) -> Plan:
    if not find_spec("deepspeed"):
        raise ValueError('--launcher deepspeed: not installed: pip install "comm-hooks[deepspeed]"')
    if hostfile is None:
        return Plan([*_preflight(job, None), *programs.deepspeed_here(job)], runs_here=True)
    if job.node_rank is None:
        steps = programs.deepspeed_over_ssh(job, hostfile, hosts)
        if job.preflight:
            config = options({"--config": job.config})
            first = replace(job, target=(_PREFLIGHT, *config), module=True)
            steps = [*programs.deepspeed_over_ssh(first, hostfile, hosts), steps[-1]]
        return Plan(steps)
    job = replace(job, nodes=(len(hosts), len(hosts)))
    head = job.head or Endpoint(hosts[0].name)
    route = find_route(head.host, job.interface)
    steps = [*_preflight(job, head), *programs.deepspeed_node(job, hostfile, head, route)]
    # The script opens the port itself, at any time: there is nothing to wait for.
    return Plan(steps, runs_here=True)


def _mpirun(job: Job, launcher: str, hostfile: Path | None, hosts: list[Host]) -> Plan:
    if job.node_rank is not None:
        raise ValueError("--node-rank does not go with mpirun, which starts all nodes itself")
    head = job.head
    notes: list[str] = []
    if hosts:
        head = head or Endpoint(hosts[0].name)
        counts = [job.nproc or host.slots for host in hosts]
        for host, count in zip(hosts, counts, strict=True):
            if count is None:
                raise ValueError(
                    f"--hostfile {hostfile}: {host.name} has no slots=N, so give --nproc: ranks "
                    "per node"
                )
        slots = [count for count in counts if count]
    else:
        job, notes = _count_processes(job)
        slots = [job.nproc or 1]
    # Each rank is comm-hooks launch again, which finds the interface of its own node.
    module = (sys.executable, "-m", "comm_hooks.launchers.main", "launch")
    values = options({"--head": head, "--interface": job.interface})
    targets = [(*module, *values, *job.words("--module"))]
    if job.preflight:
        values = options({"--head": head, "--config": job.config})
        targets.insert(0, (sys.executable, "-m", _PREFLIGHT, *values))
    steps: list[Step] = [programs.mpirun(job, launcher, hosts, slots, each) for each in targets]
    return Plan(steps, notes=notes, runs_here=not hosts)


def _preflight(job: Job, head: Endpoint | None) -> list[Step]:
    """Return the command of the preflight on this node, or [] if the job has none."""
    if not job.preflight:
        return []
    nodes = job.fixed_nodes("--preflight")
    values: dict[str, object] = {"--nproc": job.nproc, "--config": job.config}
    if head:
        rank = None if job.node_rank is None else str(job.node_rank)
        meeting = {"--head": head, "--nnodes": nodes, "--node-rank": rank}
        values = {**meeting, "--interface": job.interface, **values}
    return [Command((*comm_hooks("preflight"), *options(values)), job.variables)]


def _count_processes(job: Job) -> tuple[Job, list[str]]:
    """Return the job with ``nproc`` set, by default one per GPU or 1, and notes for the user."""
    if job.nproc is not None:
        return job, []
    if count := torch.cuda.device_count():
        return replace(job, nproc=count), []
    return replace(job, nproc=1), ["no GPU here, so one process per node: --nproc for more"]

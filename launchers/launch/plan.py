"""From a job and what is there to the commands that run it."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path

import torch

from comm_hooks.launchers.environment import LauncherEnvironment, detect_environment, in_allocation
from comm_hooks.launchers.launch import deepspeed, kubernetes, mpi, slurm, torchrun
from comm_hooks.launchers.launch.hostfile import (
    DEEPSPEED_HOSTFILE,
    Host,
    read_hostfile,
    slots_of,
)
from comm_hooks.launchers.launch.job import Job
from comm_hooks.launchers.launch.steps import Command, Step, options, program
from comm_hooks.launchers.launch.submission import Submission, job_name
from comm_hooks.launchers.network import Endpoint, Route, find_route

_PREFLIGHT = "comm_hooks.launchers.preflight"


@dataclass(frozen=True)
class Plan:
    """What to run.

    Args:
        steps: one after the other, until one fails; the last is the job.
        head: where something must listen before the last step makes sense; None where this is the
            node that listens.
        route: how this machine gets there.
        notes: what the user may not expect, one line each.
        quiet: whether another process prints the same commands.
        runs_here: whether ranks run on this machine, as this plan starts them, so that it needs
            the script; else each node looks for itself.
    """

    steps: list[Step]
    head: Endpoint | None = None
    route: Route | None = None
    notes: list[str] = field(default_factory=list)
    quiet: bool = False
    runs_here: bool = False


def render_file(job: Job, submission: Submission) -> str:
    """Return the text of a file for a scheduler.

    Raises:
        ValueError: for a job that the scheduler cannot run as told.
    """
    name = submission.name or job_name(job.target[0])
    render = kubernetes.render_train_job if submission.kubernetes else slurm.render_batch_file
    return render(job, name, submission)


def make_plan(
    job: Job, launcher: str, hostfile: Path | None, environment: Mapping[str, str]
) -> Plan:
    """Choose the launcher, unless told, and return what to run.

    1. a process that torchrun or deepspeed has started does not launch again;
    2. a rank of mpirun becomes the script, with the variables that PyTorch looks for;
    3. a task of srun becomes torchrun, with what Slurm says about nodes;
    4. a Slurm allocation of several nodes is filled by srun;
    5. a hostfile, ours or the one where deepspeed looks, is for deepspeed if it is installed;
    6. torchrun.

    Args:
        job: what to run.
        launcher: one of :data:`LAUNCHERS`.
        hostfile: for deepspeed and mpirun.
        environment: ``os.environ``.

    Raises:
        ValueError: for what does not go together or is not there.
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
            return Plan([_rank(job, process)], quiet=process.rank > 0, runs_here=True)
        if process.launcher:
            return _torchrun(slurm.fill_in(job, process, environment), environment)
        nodes = int(environment.get("SLURM_NNODES", 1))
        if in_allocation(environment) and nodes > 1:
            return Plan([slurm.build_srun(job, nodes)])
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
    if job.restarts:
        raise ValueError(f"--max-restarts is torchrun's: {launcher} has nothing like it")
    if launcher == "deepspeed":
        return _deepspeed(job, hostfile)
    return _mpirun(job, launcher, hostfile)


def _torchrun(job: Job, environment: Mapping[str, str]) -> Plan:
    job, notes = _count_processes(job)
    if job.nodes == (1, 1):
        steps = [*_preflight(job, None), torchrun.build_single_node(job)]
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
    steps = [
        *_preflight(job, job.head),
        torchrun.build_multi_node(job, job.head, route, job_id),
    ]
    hosts = route.is_head if job.node_rank is None else job.node_rank == 0
    head = None if hosts else Endpoint(route.head, job.head.port)
    return Plan(steps, head, route, notes, runs_here=True)


def _deepspeed(job: Job, hostfile: Path | None) -> Plan:
    if not find_spec("deepspeed"):
        raise ValueError('--launcher deepspeed: not installed: pip install "comm-hooks[deepspeed]"')
    if hostfile is None:
        if job.nodes != (1, 1):
            raise ValueError("--launcher deepspeed with several nodes needs --hostfile")
        steps = [*_preflight(job, None), *deepspeed.build_single_node(job)]
        return Plan(steps, runs_here=True)
    hosts = read_hostfile(hostfile)
    _check_count(job, hosts, hostfile)
    if job.node_rank is None:
        steps = deepspeed.build_over_ssh(job, hostfile, hosts)
        if job.check:
            config = options({"--config": job.config})
            first = replace(job, target=(_PREFLIGHT, *config), module=True)
            steps = [*deepspeed.build_over_ssh(first, hostfile, hosts), steps[-1]]
        return Plan(steps)
    job = replace(job, nodes=(len(hosts), len(hosts)))
    head = job.head or Endpoint(hosts[0].name)
    route = find_route(head.host, job.interface)
    steps = [
        *_preflight(job, head),
        *deepspeed.build_by_hand(job, hostfile, head, route),
    ]
    # The script itself opens the port, whenever it comes to that: nothing to wait for.
    return Plan(steps, runs_here=True)


def _mpirun(job: Job, launcher: str, hostfile: Path | None) -> Plan:
    flavour = mpi.FLAVOURS.get(launcher) or mpi.find_flavour()
    if job.node_rank is not None:
        raise ValueError("--node-rank does not go with mpirun, which starts all nodes itself")
    head = job.head
    notes: list[str] = []
    if hostfile:
        hosts = read_hostfile(hostfile)
        _check_count(job, hosts, hostfile)
        slots = slots_of(hosts, job.processes, hostfile)
        head = head or Endpoint(hosts[0].name)
    elif job.nodes != (1, 1):
        raise ValueError(f"--launcher {launcher} with several nodes needs --hostfile")
    else:
        job, notes = _count_processes(job)
        hosts, slots = [], [job.processes or 1]
    targets = [mpi.rank_target(job, head)]
    if job.check:
        arguments = options({"--head": head, "--config": job.config})
        targets.insert(0, (sys.executable, "-m", _PREFLIGHT, *arguments))
    steps = [mpi.build_command(job, flavour, hosts, slots, target) for target in targets]
    return Plan(list(steps), notes=notes, runs_here=not hosts)


def _check_count(job: Job, hosts: list[Host], hostfile: Path) -> None:
    # 1: the hostfile is one that was found, not one that was given.
    if job.nodes not in ((1, 1), (len(hosts), len(hosts))):
        raise ValueError(
            f"--nnodes {job.nodes[1]}, but --hostfile {hostfile} names {len(hosts)} hosts"
        )


def _preflight(job: Job, head: Endpoint | None) -> list[Step]:
    """Return the preflight as one process on each node, started as the job is."""
    if not job.check:
        return []
    command = [*program("comm-hooks", "comm_hooks.launchers.main"), "preflight"]
    nodes = job.fixed_nodes("--preflight")
    if head:
        rank = None if job.node_rank is None else str(job.node_rank)
        meeting = {"--head": head, "--nnodes": nodes, "--node-rank": rank}
        command += options({**meeting, "--interface": job.interface})
    command += options({"--nproc": job.processes, "--config": job.config})
    return [Command(tuple(command), job.variables)]


def _rank(job: Job, process: LauncherEnvironment) -> Command:
    if job.check and process.world_size > 1:
        raise ValueError(
            "--preflight must come before the ranks: comm-hooks launch --launcher mpirun "
            "--preflight, or mpirun ... comm-hooks preflight"
        )
    return mpi.build_rank(job, process)


def _count_processes(job: Job) -> tuple[Job, list[str]]:
    """Return the job with a number of processes: one per GPU, or one."""
    if job.processes is not None:
        return job, []
    if count := torch.cuda.device_count():
        return replace(job, processes=count), []
    return replace(job, processes=1), ["no GPU here, so one process per node: --nproc for more"]

"""mpirun: the command line for its two flavours, and what a rank of it needs for PyTorch."""

import shutil
import subprocess
import sys
from typing import Literal

from comm_hooks.launchers.environment import LauncherEnvironment
from comm_hooks.launchers.launch.hostfile import Host
from comm_hooks.launchers.launch.job import Job
from comm_hooks.launchers.launch.steps import Command, options
from comm_hooks.launchers.launch.torchrun import interfaces
from comm_hooks.launchers.network import Endpoint, find_route

Flavour = Literal["mpich", "openmpi"]
FLAVOURS: dict[str, Flavour] = {"mpich": "mpich", "openmpi": "openmpi"}


def find_flavour() -> Flavour:
    """Return which MPI the ``mpirun`` on this machine belongs to.

    Intel MPI and MVAPICH are of the family of MPICH: they take the same options.

    Raises:
        ValueError: if there is none, or its family cannot be told.
    """
    if not shutil.which("mpirun"):
        raise ValueError("--launcher mpirun: there is no mpirun on PATH")
    answer = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False)
    text = answer.stdout + answer.stderr
    if "Open MPI" in text or "OpenRTE" in text:
        return "openmpi"
    if "HYDRA" in text or "Intel(R) MPI" in text:
        return "mpich"
    raise ValueError(
        f"--launcher mpirun: cannot tell which MPI this is ({text.strip()[:60]!r}): use --launcher "
        "mpich or openmpi"
    )


def build_command(
    job: Job, flavour: Flavour, hosts: list[Host], slots: list[int], target: tuple[str, ...]
) -> Command:
    """Return the mpirun command line.

    Args:
        job: for the variables.
        flavour: whose options to use.
        hosts: where, the first one is the head; none for this machine.
        slots: ranks on each host, or on this machine.
        target: the program that every rank is.
    """
    places = ",".join(f"{h.name}:{count}" for h, count in zip(hosts, slots, strict=False))
    if flavour == "openmpi":
        arguments = options({"-np": sum(slots), "--host": places})
        for name, value in job.variables.items():
            arguments += ["-x", f"{name}={value}"]
    else:
        arguments = options({"-n": sum(slots), "-hosts": places})
        for name, value in job.variables.items():
            arguments += ["-genv", name, value]
    return Command(("mpirun", *arguments, *target))


def rank_target(job: Job, head: Endpoint | None) -> tuple[str, ...]:
    """Return the program that every rank of mpirun is: ``comm-hooks launch`` with the script.

    It finds out on its own node which interface leads to the head.
    """
    arguments = options({"--head": head, "--interface": job.interface})
    command = (sys.executable, "-m", "comm_hooks.launchers.main", "launch")
    return (*command, *arguments, *job.words("--module"))


def build_rank(job: Job, process: LauncherEnvironment) -> Command:
    """Return the script's own command, with what ``init_process_group()`` looks for.

    Raises:
        ValueError: if ranks are on several nodes and nobody says where they meet.
    """
    endpoint = meeting_point(job.head, process)
    variables = process.variables(endpoint)
    if process.local_size < process.world_size:
        route = find_route(endpoint.host, job.interface)
        variables |= {"MASTER_ADDR": route.head, **interfaces(job, route)}
    return Command((sys.executable, *job.words("-m")), {**variables, **job.variables})


def meeting_point(head: Endpoint | None, process: LauncherEnvironment) -> Endpoint:
    """Return where the ranks of mpirun or srun meet: the head, or this machine if it has all.

    Raises:
        ValueError: if they are on several machines and there is no head.
    """
    if head is not None:
        return head
    if process.local_size < process.world_size:
        raise ValueError(
            f"{process.launcher} started {process.world_size} ranks, "
            f"{process.local_size} of them here: "
            "give --head HOST:PORT, the machine of rank 0"
        )
    return Endpoint("127.0.0.1")

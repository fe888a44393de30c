"""The command line of the deepspeed launcher, and the variables that it would not pass on."""

import os
import re
from collections.abc import Mapping
from pathlib import Path

from comm_hooks.launchers.launch.hostfile import Host
from comm_hooks.launchers.launch.job import Job
from comm_hooks.launchers.launch.steps import Command, Step, WriteFile, options, program
from comm_hooks.launchers.launch.torchrun import interfaces
from comm_hooks.launchers.network import DEFAULT_PORT, Endpoint, Route, interface_address

ENVIRONMENT_FILE = Path("comm_hooks.deepspeed_env")
"""What the launcher exports on all nodes; written beside the job."""

_PROGRAM = ("deepspeed", "deepspeed.launcher.runner")
# What a training run needs alike on all nodes and pdsh does not carry: it exports only variables
# that begin with MLFLOW, PYTHON, MV2, UCX and, with CUDA, NCCL.
_CARRIED = ("DS_ACCELERATOR", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_UNSAFE = re.compile(r"[\"$`\\]")


def build_single_node(job: Job) -> list[Step]:
    """Return the command for ranks on this machine only."""
    return [Command(_call(job, {"--num_gpus": job.processes}), job.variables)]


def build_by_hand(job: Job, hostfile: Path, head: Endpoint, route: Route) -> list[Step]:
    """Return the command for this node, where the same is started by hand on the others."""
    values = {
        "--hostfile": hostfile,
        "--num_gpus": job.processes,
        "--no_ssh": True,
        "--node_rank": str(job.node_rank),
        "--master_addr": route.head,
        "--master_port": head.port,
    }
    variables = {**interfaces(job, route), **job.variables}
    return [Command(_call(job, values), variables)]


def build_over_ssh(job: Job, hostfile: Path, hosts: list[Host]) -> list[Step]:
    """Return what starts ranks on all hosts of the hostfile over ssh.

    Variables go into a file that the deepspeed launcher exports on all nodes, together with what
    the user's own ``.deepspeed_env`` says, which the file takes the place of.

    Raises:
        ValueError: for a host without slots, and a value that the launcher would mangle.
    """
    for host in hosts:
        if host.slots is None:
            raise ValueError(
                f"--hostfile {hostfile}: deepspeed needs 'name slots=N' in each line, "
                f"{host.name} has no slots"
            )
    head = job.head
    values = {
        "--hostfile": hostfile,
        "--num_gpus": job.processes,
        "--master_addr": head and head.host,
        "--master_port": head and head.port != DEFAULT_PORT and head.port,
    }
    arguments = _call(job, values)
    ours = {name: os.environ[name] for name in _CARRIED if name in os.environ}
    if job.interface:
        interface_address(job.interface)
        ours |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), job.interface)
    ours |= job.variables
    for name, value in ours.items():
        if _UNSAFE.search(value):
            raise ValueError(
                f"--env {name}: the deepspeed launcher cannot carry quotes, $, ` and \\ to other "
                f"nodes, got {value!r}"
            )
    if not ours:
        return [Command(arguments)]
    lines = (*_user_lines(), *(f"{name}={value}" for name, value in ours.items()))
    command = Command(arguments, {"DS_ENV_FILE": str(ENVIRONMENT_FILE)})
    return [WriteFile(ENVIRONMENT_FILE, lines), command]


def _call(job: Job, values: Mapping[str, object]) -> tuple[str, ...]:
    return (*program(*_PROGRAM), *options(values), *job.words("--module"))


def _user_lines() -> list[str]:
    """Return the lines of the files that the launcher would read without ours."""
    name = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
    lines = []
    for folder in (Path.home(), Path()):
        path = folder / name
        if path != ENVIRONMENT_FILE and path.is_file():
            lines += [line.strip() for line in path.read_text().splitlines() if "=" in line]
    return lines

"""The command line of the deepspeed launcher, and the variables that it would not pass on."""

import os
import re
from pathlib import Path

from comm_hooks.launchers.endpoint import DEFAULT_PORT, Endpoint
from comm_hooks.launchers.launch.hostfile import Host
from comm_hooks.launchers.launch.job import Job
from comm_hooks.launchers.launch.network import Route, interface_address
from comm_hooks.launchers.launch.steps import Command, Step, WriteFile, program
from comm_hooks.launchers.launch.torchrun import interfaces

ENVIRONMENT_FILE = Path("comm_hooks.deepspeed_env")
"""What the launcher exports on all nodes; written beside the job."""

_PROGRAM = ("deepspeed", "deepspeed.launcher.runner")
# What a training run needs alike on all nodes and pdsh does not carry: it exports only variables
# that begin with MLFLOW, PYTHON, MV2, UCX and, with CUDA, NCCL.
_CARRIED = ("DS_ACCELERATOR", "OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_UNSAFE = re.compile(r"[\"$`\\]")


def build_single_node(job: Job) -> list[Step]:
    """Return the command for ranks on this machine only."""
    return [Command((*program(*_PROGRAM), *_count(job), *_target(job)), job.variables)]


def build_by_hand(job: Job, hostfile: Path, head: Endpoint, route: Route) -> list[Step]:
    """Return the command for this node, where the same is started by hand on the others."""
    # fmt: off
    arguments = [
        *program(*_PROGRAM), "--hostfile", str(hostfile), *_count(job),
        "--no_ssh", "--node_rank", str(job.node_rank),
        "--master_addr", route.head, "--master_port", str(head.port),
    ]
    # fmt: on
    variables = {**interfaces(job, route), **job.variables}
    return [Command((*arguments, *_target(job)), variables)]


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
    arguments = [*program(*_PROGRAM), "--hostfile", str(hostfile), *_count(job)]
    if job.head:
        arguments += ["--master_addr", job.head.host]
    if job.head and job.head.port != DEFAULT_PORT:
        arguments += ["--master_port", str(job.head.port)]
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
        return [Command((*arguments, *_target(job)))]
    lines = (*_user_lines(), *(f"{name}={value}" for name, value in ours.items()))
    command = Command((*arguments, *_target(job)), {"DS_ENV_FILE": str(ENVIRONMENT_FILE)})
    return [WriteFile(ENVIRONMENT_FILE, lines), command]


def _count(job: Job) -> list[str]:
    return [] if job.processes is None else ["--num_gpus", str(job.processes)]


def _target(job: Job) -> list[str]:
    return [*(["--module"] if job.module else []), *job.target]


def _user_lines() -> list[str]:
    """Return the lines of the files that the launcher would read without ours."""
    name = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
    lines = []
    for folder in (Path.home(), Path()):
        path = folder / name
        if path != ENVIRONMENT_FILE and path.is_file():
            lines += [line.strip() for line in path.read_text().splitlines() if "=" in line]
    return lines

"""The facts about a node: versions, interfaces, GPUs, and problems of its own."""

import hashlib
import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import tempfile
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import psutil
import torch

import comm_hooks
from comm_hooks.launchers.environment import LauncherEnvironment, check_world_size
from comm_hooks.launchers.network import find_route
from comm_hooks.launchers.preflight.links import Listener
from comm_hooks.launchers.preflight.meeting import Party

_LEAST_FREE_BYTES = 1 << 30
_LEAST_OPEN_FILES = 1024


@dataclass(frozen=True)
class Facts:
    """The facts about one process; nodes are compared by their first process.

    Attributes:
        node: the number of the node, or else its name.
        host: the machine's name.
        address: the address at which other nodes reach this node; empty if not known.
        interface: the network interface of that address.
        port: the TCP port at which this process answers measurements of links; 0 for none.
        processes: the number of ranks per node; None if not known.
        versions: the versions, by name, of the packages that must be the same on all nodes.
        gpus: the names of the GPUs that PyTorch sees.
        complaints: problems of this process alone, one line each.
    """

    node: str
    host: str
    address: str
    interface: str
    port: int
    processes: int | None
    versions: dict[str, str]
    gpus: list[str]
    complaints: list[str] = field(default_factory=list)


def describe(party: Party, interface: str | None) -> tuple[Facts, Listener | None]:
    """Return the facts about this process, and its TCP listener; None without an address."""
    complaints = find_complaints(Path(), dict(os.environ))
    address = name = ""
    listener = None
    if party.head:
        try:
            route = find_route(party.head.host, interface)
            address, name = route.address, route.interface
            listener = Listener(address)
        except (ValueError, OSError) as error:
            complaints.append(str(error))
    if party.process.launcher:
        complaints += _complain_if_alone(party.process)
    facts = Facts(
        node=party.node if party.node is not None else address or socket.gethostname(),
        host=socket.gethostname(),
        address=address,
        interface=name,
        port=listener.port if listener else 0,
        processes=party.processes,
        versions=find_versions(),
        gpus=[torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())],
        complaints=complaints,
    )
    return facts, listener


def _complain_if_alone(process: LauncherEnvironment) -> list[str]:
    """Return one problem if the training script would not find the other processes, else []."""
    size = process.world_size
    if process.launcher != "torchrun":
        # RANK is not set: DeepSpeed asks mpi4py, as other programs for MPI do.
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError):
            return []
        size = MPI.COMM_WORLD.Get_size()
    try:
        check_world_size(size)
    except RuntimeError as error:
        return [str(error)]
    return []


def find_versions() -> dict[str, str]:
    """Return the versions, by name, of the packages that must be the same on all nodes."""
    versions = {
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "comm-hooks": comm_hooks.__version__,
        # Two checkouts of one version differ, too.
        "comm-hooks source": source_digest(Path(comm_hooks.__file__).parent),
    }
    if find_spec("deepspeed"):
        versions["deepspeed"] = importlib.metadata.version("deepspeed")
    if torch.version.cuda and torch.cuda.is_available():
        versions["CUDA"] = torch.version.cuda
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return versions


def source_digest(package: Path) -> str:
    """Return a digest of all Python files of a package: eight hexadecimal digits."""
    digest = hashlib.sha256()
    for folder, folders, files in os.walk(package, followlinks=True):
        folders.sort()
        for name in sorted(files):
            if name.endswith(".py"):
                path = Path(folder, name)
                digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:8]


def find_complaints(folder: Path, environment: dict[str, str]) -> list[str]:
    """Return the problems of this machine alone: interfaces, disk space, limits.

    Args:
        folder: the output folder of the training.
        environment: the environment variables of this process.
    """
    complaints = []
    interfaces = psutil.net_if_addrs()
    for variable in ("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"):
        for name in filter(None, environment.get(variable, "").split(",")):
            if name not in interfaces:
                complaints.append(
                    f"{variable} is {name}, which is no interface of this machine: it has "
                    f"{', '.join(interfaces)}"
                )
    for path in dict.fromkeys((folder, Path(tempfile.gettempdir()))):
        free = shutil.disk_usage(path).free
        if free < _LEAST_FREE_BYTES:
            complaints.append(f"only {free / 1e6:.0f} MB are free in {path}")
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files != resource.RLIM_INFINITY and files < _LEAST_OPEN_FILES:
        complaints.append(
            f"a process may open only {files} files: raise it with ulimit -n {_LEAST_OPEN_FILES}"
        )
    return complaints

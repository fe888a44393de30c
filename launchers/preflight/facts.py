"""What a node tells about itself."""

import hashlib
import importlib.metadata
import json
import os
import platform
import resource
import shutil
import socket
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch

import comm_hooks

_LEAST_FREE_BYTES = 1 << 30
_LEAST_OPEN_FILES = 1024
_MISSING = "not installed"


@dataclass(frozen=True)
class Facts:
    """One process's account; nodes are compared by that of their first process.

    Args:
        node: what tells nodes apart: their number, or else their name.
        host: the machine's name.
        address: where other nodes reach this one; empty if that is not known.
        interface: the network interface of that address.
        port: where it listens for measurements.
        processes: ranks per node; None where nobody said.
        versions: of what must be the same on all nodes, by name.
        config: the settings of the file given by ``--config``, by path in it.
        gpus: the names of those that PyTorch sees.
        complaints: what this process found wrong by itself, one line each.
        notes: what may surprise, but is no reason to stop.
    """

    node: str
    host: str
    address: str
    interface: str
    port: int
    processes: int | None
    versions: dict[str, str]
    config: dict[str, str]
    gpus: list[str]
    complaints: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> "Facts":
        return cls(**json.loads(text))


def find_versions() -> dict[str, str]:
    """Return the versions of what takes part in training, by name."""
    versions = {
        "Python": platform.python_version(),
        "torch": torch.__version__,
        "comm-hooks": comm_hooks.__version__,
        # Two checkouts of one version differ, too.
        "comm-hooks source": source_digest(Path(comm_hooks.__file__).parent),
        "deepspeed": _version("deepspeed"),
    }
    if torch.version.cuda and torch.cuda.is_available():
        versions["CUDA"] = torch.version.cuda
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return versions


def source_digest(package: Path) -> str:
    """Return eight hexadecimal digits that change with any Python file of a package."""
    digest = hashlib.sha256()
    for folder, folders, files in os.walk(package, followlinks=True):
        folders.sort()
        for name in sorted(files):
            if name.endswith(".py"):
                path = Path(folder, name)
                digest.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:8]


def read_config(path: Path) -> dict[str, str]:
    """Return a file's settings by their path in it, or its digest if it is not JSON.

    Raises:
        ValueError: if it cannot be read.

    Example::

        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile("w") as file:
        ...     _ = file.write('{"optimizer": {"params": {"lr": 0.1}}}')
        ...     file.flush()
        ...     read_config(Path(file.name))
        {'optimizer.params.lr': '0.1'}
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise ValueError(f"--config {path}: cannot read it ({error.strerror})") from None
    try:
        return dict(_flatten("", json.loads(content)))
    except ValueError:
        return {"sha256": hashlib.sha256(content).hexdigest()[:16]}


def find_complaints(folder: Path, environment: dict[str, str]) -> list[str]:
    """Return what is wrong with this machine alone: interfaces, disk space, limits.

    Args:
        folder: where training will write.
        environment: ``os.environ``.
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
    for place in dict.fromkeys((folder, Path(tempfile.gettempdir()))):
        free = shutil.disk_usage(place).free
        if free < _LEAST_FREE_BYTES:
            complaints.append(f"only {free / 1e6:.0f} MB are free in {place}")
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if files != resource.RLIM_INFINITY and files < _LEAST_OPEN_FILES:
        complaints.append(
            f"a process may open only {files} files: raise it with ulimit -n {_LEAST_OPEN_FILES}"
        )
    return complaints


def gloo_address(environment: dict[str, str]) -> str | None:
    """Return where gloo would be reached if nothing but the machine's name told it; None if told.

    An empty string if the name does not resolve.
    """
    if environment.get("GLOO_SOCKET_IFNAME"):
        return None
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


def find_gpus() -> list[str]:
    """Return the names of the GPUs that PyTorch sees."""
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return _MISSING


def _flatten(path: str, value: Any) -> list[tuple[str, str]]:
    if not isinstance(value, dict) or not value:
        return [(path, json.dumps(value))]
    return [
        pair
        for key, below in value.items()
        for pair in _flatten(f"{path}.{key}" if path else key, below)
    ]

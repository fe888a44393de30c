"""A training job: its checked options, and the hosts of a hostfile."""

import difflib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path
from typing import NamedTuple

from comm_hooks.launchers.network import Endpoint

LAUNCHERS = ("auto", "torchrun", "deepspeed", "mpirun", "mpich", "openmpi")

_VARIABLE = re.compile(r"[A-Za-z_]\w*")
# More may follow: Open MPI has max_slots=.
_HOST_LINE = re.compile(
    r"(?P<name>[\w.-]+)(?:\s+slots=(?P<slots>\d+)|:(?P<count>\d+))?(?:\s+(?!slots)\S+)*"
)


@dataclass(frozen=True)
class Job:
    """The options of ``comm-hooks launch`` that describe the job; ``--help`` describes each.

    ``nodes`` are the smallest and the largest number of nodes, ``variables`` those of ``--env``.

    Raises:
        ValueError: for options that contradict each other.
    """

    target: tuple[str, ...]
    module: bool = False
    nproc: int | None = None
    nodes: tuple[int, int] = (1, 1)
    node_rank: int | None = None
    head: Endpoint | None = None
    interface: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    max_restarts: int = 0
    preflight: bool = False
    config: str | None = None

    def __post_init__(self) -> None:
        if self.config and not self.preflight:
            raise ValueError("--config is what --preflight compares: add --preflight")
        fewest, most = self.nodes
        if not 1 <= fewest <= most:
            raise ValueError(
                f"--nnodes {fewest}:{most}: needs a number of nodes, or MIN:MAX with MIN <= MAX"
            )
        for option, value, least in (
            ("--nproc", self.nproc, 1),
            ("--max-restarts", self.max_restarts, 0),
        ):
            if value is not None and value < least:
                raise ValueError(f"{option} must be at least {least}, got {value}")
        if self.node_rank is None:
            return
        if self.is_elastic or self.max_restarts:
            other = f"--nnodes {fewest}:{most}" if self.is_elastic else "--max-restarts"
            raise ValueError(
                f"--node-rank {self.node_rank} fixes the order of nodes, which {other} must be "
                f"free to change: leave --node-rank out"
            )
        if not 0 <= self.node_rank < most:
            raise ValueError(
                f"--node-rank must lie between 0 and {most - 1} with {most} nodes, got "
                f"{self.node_rank}"
            )

    @property
    def is_elastic(self) -> bool:
        return self.nodes[0] != self.nodes[1]

    def words(self, flag: str) -> list[str]:
        """Return the target as words of a command in which ``flag`` announces a module."""
        return [*([flag] if self.module else []), *self.target]

    def require_target(self) -> None:
        """Raise ``ValueError`` if the script, or the module's package, is not on this machine.

        Without this check every rank would report it in a traceback.
        """
        name, here = self.target[0], Path.cwd()
        if self.module:
            added = self.variables.get("PYTHONPATH", "").split(os.pathsep)
            package = name.partition(".")[0]
            if package in sys.builtin_module_names or PathFinder.find_spec(
                package, [str(here), *filter(None, added), *sys.path]
            ):
                return
            raise ValueError(f"-m {name}: there is no module {package!r} here ({here})")
        path = Path(name)
        if path.is_file() or (path / "__main__.py").is_file():
            return
        others = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
        nearest = difflib.get_close_matches(path.name, others, n=1)
        hint = f": did you mean {str(path.with_name(nearest[0]))!r}?" if nearest else ""
        what = "is a folder without __main__.py" if path.is_dir() else "there is no such file"
        raise ValueError(f"{name}: {what} here ({here}){hint}")

    def fixed_nodes(self, option: str) -> int:
        """Return the number of nodes; raise ``ValueError`` for a range, with the option's name."""
        if self.is_elastic:
            raise ValueError(
                f"{option} needs a fixed number of nodes, got --nnodes "
                f"{self.nodes[0]}:{self.nodes[1]}: only torchrun started by hand takes a range"
            )
        return self.nodes[0]


def parse_nodes(text: str) -> tuple[int, int]:
    """Return the smallest and the largest number of nodes from ``"4"`` or ``"2:4"``.

    Raises:
        ValueError: for other text.

    Example::

        >>> parse_nodes("4"), parse_nodes("2:4")
        ((4, 4), (2, 4))
    """
    found = re.fullmatch(r"(\d+)(?::(\d+))?", text)
    if not found:
        raise ValueError(f"--nnodes {text}: needs a number of nodes, or MIN:MAX as in 2:4")
    fewest = int(found[1])
    return fewest, int(found[2] or fewest)


def parse_variables(assignments: Sequence[str]) -> dict[str, str]:
    """Return environment variables from texts of the form ``NAME=VALUE``.

    Raises:
        ValueError: for other text.

    Example::

        >>> parse_variables(["OMP_NUM_THREADS=4", "NOTE=a b"])
        {'OMP_NUM_THREADS': '4', 'NOTE': 'a b'}
    """
    variables = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals or not _VARIABLE.fullmatch(name) or "\n" in value:
            raise ValueError(f"--env {assignment!r}: needs NAME=VALUE in one line")
        variables[name] = value
    return variables


class Host(NamedTuple):
    """A machine of a hostfile; ``slots`` is its number of ranks, or None if it is not given."""

    name: str
    slots: int | None


def read_hostfile(path: Path) -> list[Host]:
    """Read a hostfile of DeepSpeed, Open MPI or MPICH.

    Lines are ``name slots=4``, ``name:4`` or ``name``; empty lines and comments (#) are skipped.

    Raises:
        ValueError: if the file cannot be read, a line is different, or a host comes twice.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise ValueError(f"--hostfile {path}: cannot read it ({reason})") from None
    hosts: dict[str, Host] = {}
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.partition("#")[0].strip()
        if not line:
            continue
        found = _HOST_LINE.fullmatch(line)
        slots = found and (found["slots"] or found["count"])
        if not found or slots == "0":
            raise ValueError(
                f"--hostfile {path}, line {number}: {line!r} is none of 'name slots=4', 'name:4', "
                f"'name'"
            )
        if found["name"] in hosts:
            raise ValueError(f"--hostfile {path}, line {number}: {found['name']} comes twice")
        hosts[found["name"]] = Host(found["name"], int(slots) if slots else None)
    if not hosts:
        raise ValueError(f"--hostfile {path}: no host in it")
    return list(hosts.values())

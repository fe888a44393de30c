"""What the user wants to run, however it is started."""

import difflib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.machinery import PathFinder
from pathlib import Path

from comm_hooks.launchers.network import Endpoint

LAUNCHERS = ("auto", "torchrun", "deepspeed", "mpirun", "mpich", "openmpi")

_VARIABLE = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class Job:
    """A script and how much of it.

    Args:
        target: the script, or the module's name, and its arguments.
        module: run it as ``python -m`` does.
        processes: per node; None for one per GPU, or one where there is none.
        nodes: the fewest and the most nodes; they differ for an elastic job.
        node_rank: which node this is, if the order of nodes is fixed.
        head: where ranks meet.
        interface: the network interface to use, or None for the one that leads to the head.
        variables: environment variables for all ranks.
        restarts: how often torchrun starts all ranks again after a failure.
        check: whether the preflight comes first.
        config: a file that must be the same on all nodes; the preflight compares it.
        gpus: whether a scheduler is asked for GPUs, one for each process.
    """

    target: tuple[str, ...]
    module: bool = False
    processes: int | None = None
    nodes: tuple[int, int] = (1, 1)
    node_rank: int | None = None
    head: Endpoint | None = None
    interface: str | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    restarts: int = 0
    check: bool = False
    config: str | None = None
    gpus: bool = True

    def __post_init__(self) -> None:
        if self.config and not self.check:
            raise ValueError("--config is what --preflight compares: add --preflight")
        fewest, most = self.nodes
        if not 1 <= fewest <= most:
            raise ValueError(
                f"--nnodes {fewest}:{most}: needs a number of nodes, or MIN:MAX with MIN <= MAX"
            )
        for option, value, least in (
            ("--nproc", self.processes, 1),
            ("--max-restarts", self.restarts, 0),
        ):
            if value is not None and value < least:
                raise ValueError(f"{option} must be at least {least}, got {value}")
        if self.node_rank is None:
            return
        if self.is_elastic or self.restarts:
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

        Every rank would say so, in a traceback of its own.
        """
        name, here = self.target[0], Path.cwd()
        if self.module:
            added = self.variables.get("PYTHONPATH", "").split(os.pathsep)
            places = [str(here), *filter(None, added), *sys.path]
            package = name.partition(".")[0]
            if package in sys.builtin_module_names or PathFinder.find_spec(package, places):
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

    def fixed_size(self, option: str) -> tuple[int, int]:
        """Return the numbers of nodes and of processes on each, for a scheduler's file.

        Raises:
            ValueError: without a number of processes, and for a range of nodes.
        """
        nodes = self.fixed_nodes(option)
        if self.processes is None:
            raise ValueError(
                f"{option} needs --nproc: processes per node, each with a GPU unless --cpu"
            )
        return nodes, self.processes

    def fixed_nodes(self, option: str) -> int:
        """Return the number of nodes for what cannot change it.

        Raises:
            ValueError: for a range.
        """
        if self.is_elastic:
            raise ValueError(
                f"{option} needs a fixed number of nodes, got --nnodes "
                f"{self.nodes[0]}:{self.nodes[1]}: only torchrun started by hand takes a range"
            )
        return self.nodes[0]


def parse_nodes(text: str) -> tuple[int, int]:
    """Return the fewest and the most nodes from ``"4"`` or ``"2:4"``.

    Raises:
        ValueError: for anything else.

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
    """Return environment variables from ``NAME=VALUE`` each.

    Raises:
        ValueError: for anything else.

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

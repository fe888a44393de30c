"""A training job: its checked options."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from comm_hooks.launchers.network import Endpoint

_VARIABLE = re.compile(r"[A-Za-z_]\w*")


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

    def __post_init__(self) -> None:
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
        """Return the target as words of a command line, after ``flag`` if it is a module."""
        return [*([flag] if self.module else []), *self.target]

    def require_target(self) -> None:
        """Raise ``ValueError`` if the script is not on this machine.

        Otherwise every rank would report it.
        """
        path = Path(self.target[0])
        if self.module or path.is_file() or (path / "__main__.py").is_file():
            return
        what = "is a folder without __main__.py" if path.is_dir() else "there is no such file"
        raise ValueError(f"{path}: {what} here ({Path.cwd()})")


def parse_nodes(text: str) -> tuple[int, int]:
    """Return the smallest and the largest number of nodes from ``"4"`` or ``"2:4"``.

    Raises:
        ValueError: for other text.
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
    """
    variables = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not equals or not _VARIABLE.fullmatch(name) or "\n" in value:
            raise ValueError(f"--env {assignment!r}: needs NAME=VALUE in one line")
        variables[name] = value
    return variables

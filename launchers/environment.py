"""The rank of this process, read from the environment variables that launchers set."""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from comm_hooks.launchers.network import Endpoint

# The ids that Slurm gives to other steps than those of srun: batch script, interactive shell.
_FIRST_SPECIAL_STEP = 0xFFFF_FFF0


class _Variables(NamedTuple):
    """The names of a launcher's environment variables; of several names the first set counts."""

    launcher: str
    rank: str
    world_size: tuple[str, ...]
    local_rank: str
    local_size: tuple[str, ...]
    node: tuple[str, ...] = ()


_MPI = "OMPI_COMM_WORLD_"
# The launcher that started last, which is the one that starts ranks, comes first.
_LAUNCHERS = (
    _Variables(
        launcher="torchrun",
        rank="RANK",
        world_size=("WORLD_SIZE",),
        local_rank="LOCAL_RANK",
        local_size=("LOCAL_WORLD_SIZE", "LOCAL_SIZE"),
        node=("GROUP_RANK", "CROSS_RANK"),
    ),
    _Variables(
        "mpirun", f"{_MPI}RANK", (f"{_MPI}SIZE",), f"{_MPI}LOCAL_RANK", (f"{_MPI}LOCAL_SIZE",)
    ),
    _Variables(
        "mpirun",
        "PMI_RANK",
        ("PMI_SIZE",),
        "MPI_LOCALRANKID",
        ("MPI_LOCALNRANKS",),
        ("PMI_HOSTNAME",),
    ),
    _Variables(
        "srun",
        "SLURM_PROCID",
        ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        "SLURM_LOCALID",
        (),
        ("SLURM_NODEID",),
    ),
)


@dataclass(frozen=True)
class LauncherEnvironment:
    """The rank of a process among those of its launcher; by default a process without launcher.

    Attributes:
        launcher: ``"torchrun"`` (also deepspeed and accelerate, which set the same variables),
            ``"mpirun"``, ``"srun"`` or None.
        rank: the rank of this process among all processes.
        world_size: the number of processes.
        local_rank: the rank of this process on its node.
        local_size: the number of processes on this node.
        node: the number or name of this node; None if the launcher does not set it.
    """

    launcher: str | None = None
    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node: str | None = None

    def variables(self, head: Endpoint) -> dict[str, str]:
        """Return the environment variables of ``torch.distributed``, with the store at ``head``."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "MASTER_ADDR": head.host,
            "MASTER_PORT": str(head.port),
        }

    def meeting_point(self, head: Endpoint | None) -> Endpoint:
        """Return ``head``; if it is None, an endpoint on this machine, if that has all ranks.

        Raises:
            ValueError: if ranks are on several machines and ``head`` is None.
        """
        if head is None and self.local_size < self.world_size:
            raise ValueError(
                f"{self.launcher} started {self.world_size} ranks, {self.local_size} of them here: "
                "give --head HOST:PORT, the machine of rank 0"
            )
        return head or Endpoint("127.0.0.1")


def detect_environment(environment: Mapping[str, str] | None = None) -> LauncherEnvironment:
    """Return the launcher environment of this process.

    Torchrun's variables take precedence over mpirun's, and mpirun's over Slurm's.

    Args:
        environment: the environment variables; ``os.environ`` if None.

    Raises:
        ValueError: if variables contradict each other or are no numbers.

    Example::

        >>> detect_environment({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2",
        ...             "MPI_LOCALRANKID": "1", "PMI_HOSTNAME": "a"})
        LauncherEnvironment(launcher='mpirun', rank=1, world_size=2, local_rank=1, \
local_size=2, node='a')
    """
    environment = os.environ if environment is None else environment
    names = _innermost(environment)
    if names is None:
        return LauncherEnvironment()
    size_name = next(name for name in names.world_size if name in environment)
    rank, size = _number(environment, names.rank), _number(environment, size_name)
    if not 0 <= rank < size:
        raise ValueError(
            f"{names.launcher} set {names.rank}={rank} and {size_name}={size}: a rank lies between "
            "0 and the number of ranks minus 1"
        )
    nodes = _number(environment, "SLURM_STEP_NUM_NODES", "SLURM_NNODES", default=1)
    untold = {"torchrun": size, "mpirun": 1, "srun": size // nodes}[names.launcher]
    return LauncherEnvironment(
        names.launcher,
        rank,
        size,
        _number(environment, names.local_rank),
        _number(environment, *names.local_size, default=untold),
        next((environment[name] for name in names.node if name in environment), None),
    )


def _innermost(environment: Mapping[str, str]) -> _Variables | None:
    """Return the variable names of the launcher that started last, or None without a launcher."""
    is_step = _is_step(environment)
    for names in _LAUNCHERS:
        is_told = names.rank in environment and any(n in environment for n in names.world_size)
        if names.rank == "PMI_RANK" and is_step:
            # srun sets PMI's variables, too, but not the local rank.
            is_told &= "MPI_LOCALNRANKS" in environment
        if is_told and (is_step or names.launcher != "srun"):
            return names
    return None


def check_world_size(
    world_size: int | None = None, environment: Mapping[str, str] | None = None
) -> None:
    """Raise ``RuntimeError`` if the process group has fewer ranks than mpirun or srun started.

    ``srun -n 2 python train.py`` starts two processes.  They find each other only if the script
    reads Slurm's variables.  DeepSpeed asks mpi4py; built for another MPI than that of srun, it
    makes each process rank 0 of 1.  Both then train alone, without an error, and write the same
    checkpoint.

    Call it after ``init_process_group()`` or ``deepspeed.initialize()``.  More ranks are fine: one
    task of srun may be torchrun, which starts several.

    Args:
        world_size: the number of ranks; by default ``torch.distributed``'s, 1 without a group.
        environment: the environment variables; ``os.environ`` if None.

    Raises:
        RuntimeError: if ``world_size`` is smaller than the number of started processes.

    Example::

        >>> check_world_size(16, {"SLURM_NTASKS": "2"})
        >>> check_world_size(1, {"SLURM_NTASKS": "2"})
        Traceback (most recent call last):
            ...
        RuntimeError: SLURM_NTASKS is 2, but the process group has only 1 rank: each process \
would train alone. Let torchrun start the ranks (srun --ntasks-per-node=1 comm-hooks launch ...), \
or use the mpirun that mpi4py was built for
    """
    environment = os.environ if environment is None else environment
    if world_size is None:
        import torch.distributed as dist

        world_size = dist.get_world_size() if dist.is_initialized() else 1
    # Of mpirun in a Slurm job, or of srun in a larger one, the innermost variable counts.
    names = [n for names in _LAUNCHERS if names.launcher != "torchrun" for n in names.world_size]
    name = next((name for name in names if name in environment), None)
    if name is None or world_size >= _number(environment, name):
        return
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    raise RuntimeError(
        f"{name} is {environment[name]}, but the process group has only {ranks}: each process "
        "would train alone. Let torchrun start the ranks (srun --ntasks-per-node=1 comm-hooks "
        "launch ...), or use the mpirun that mpi4py was built for"
    )


def in_allocation(environment: Mapping[str, str]) -> bool:
    """Return whether this is the script or shell of a Slurm job, from which srun starts tasks."""
    return "SLURM_JOB_ID" in environment and not _is_step(environment)


def first_host(environment: Mapping[str, str]) -> str:
    """Return the name of the first node of this Slurm step, or else of this Slurm job.

    Raises:
        ValueError: if the list of nodes cannot be expanded on this machine.
    """
    nodes = environment.get("SLURM_STEP_NODELIST") or environment.get("SLURM_JOB_NODELIST", "")
    if re.fullmatch(r"[\w.-]+", nodes):
        return nodes
    if not shutil.which("scontrol"):
        raise ValueError(
            f"the first node of {nodes!r} cannot be found: there is no scontrol here; give --head"
        )
    expanded = subprocess.run(
        ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=False
    )
    if expanded.returncode or not expanded.stdout.strip():
        raise ValueError(f"scontrol cannot expand {nodes!r}: give --head")
    return expanded.stdout.split()[0]


def _is_step(environment: Mapping[str, str]) -> bool:
    if "SLURM_PROCID" not in environment or "SLURM_STEP_ID" not in environment:
        return False
    return _number(environment, "SLURM_STEP_ID") < _FIRST_SPECIAL_STEP


def _number(environment: Mapping[str, str], *names: str, default: int = 0) -> int:
    for name in names:
        if name in environment:
            try:
                return int(environment[name])
            except ValueError:
                raise ValueError(
                    f"{name}={environment[name]!r} in the environment is not a number"
                ) from None
    return default

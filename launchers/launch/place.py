"""What the launcher that started this process says about it, by its environment variables."""

import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass

# The ids that Slurm gives to what is no step of srun: batch script, interactive shell, the like.
_FIRST_SPECIAL_STEP = 0xFFFF_FFF0


@dataclass(frozen=True)
class Place:
    """One process among those of a launcher.

    Args:
        launcher: ``"torchrun"`` (also deepspeed and accelerate, which set the same variables),
            ``"mpirun"`` or ``"srun"``.
        rank: of this process among all.
        world_size: how many there are.
        local_rank: of this process on its node.
        local_size: how many there are on its node.
        node: the number or name of its node, or None where the launcher does not say.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_size: int
    node: str | None


def find_place(environment: Mapping[str, str]) -> Place | None:
    """Return this process's place, or None if no launcher has started it.

    ``RANK`` counts before mpirun's variables, and those before Slurm's: what was started last is
    what starts ranks.

    Example::

        >>> find_place({"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALNRANKS": "2",
        ...             "MPI_LOCALRANKID": "1", "PMI_HOSTNAME": "a"})
        Place(launcher='mpirun', rank=1, world_size=2, local_rank=1, local_size=2, node='a')
    """

    def number(*names: str, default: int = 0) -> int:
        found = next((environment[name] for name in names if name in environment), None)
        return default if found is None else int(found)

    if "RANK" in environment and "WORLD_SIZE" in environment:
        size = number("WORLD_SIZE")
        return Place(
            "torchrun",
            number("RANK"),
            size,
            number("LOCAL_RANK"),
            number("LOCAL_WORLD_SIZE", "LOCAL_SIZE", default=size),
            environment.get("GROUP_RANK", environment.get("CROSS_RANK")),
        )
    if "OMPI_COMM_WORLD_SIZE" in environment:
        return Place(
            "mpirun",
            number("OMPI_COMM_WORLD_RANK"),
            number("OMPI_COMM_WORLD_SIZE"),
            number("OMPI_COMM_WORLD_LOCAL_RANK"),
            number("OMPI_COMM_WORLD_LOCAL_SIZE", default=1),
            None,
        )
    # srun sets PMI_RANK, too, but not these: MPICH's and Intel's mpirun do.
    if "PMI_SIZE" in environment and "MPI_LOCALNRANKS" in environment:
        return Place(
            "mpirun",
            number("PMI_RANK"),
            number("PMI_SIZE"),
            number("MPI_LOCALRANKID"),
            number("MPI_LOCALNRANKS"),
            environment.get("PMI_HOSTNAME"),
        )
    if _is_step(environment):
        nodes = number("SLURM_STEP_NUM_NODES", "SLURM_NNODES", default=1)
        tasks = number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", default=1)
        return Place(
            "srun",
            number("SLURM_PROCID"),
            tasks,
            number("SLURM_LOCALID"),
            tasks // nodes,
            environment.get("SLURM_NODEID"),
        )
    return None


def in_allocation(environment: Mapping[str, str]) -> bool:
    """Return whether this is a Slurm job's script or shell, where srun starts tasks."""
    return "SLURM_JOB_ID" in environment and not _is_step(environment)


def first_host(environment: Mapping[str, str]) -> str:
    """Return the name of the first node of this Slurm job, or of this step.

    Raises:
        ValueError: if the list cannot be expanded here.
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
    return int(environment["SLURM_STEP_ID"]) < _FIRST_SPECIAL_STEP

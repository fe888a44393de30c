"""Are we as many as the launcher started? Where not, each process trains alone, and says nothing.

``srun -n 2 python train.py`` starts two processes that know of each other only if something reads
what Slurm tells them.  DeepSpeed asks mpi4py; one that was built for another MPI than srun speaks
calls each process the only one.  Both then train, without an error, and write the same checkpoint.
"""

from collections.abc import Mapping

import torch.distributed as dist

from comm_hooks.launchers.place import expected_world_size


def check_world_size(
    world_size: int | None = None, environment: Mapping[str, str] | None = None
) -> None:
    """Raise unless at least as many ranks have met as mpirun or srun started.

    Call it after ``init_process_group()`` or ``deepspeed.initialize()``.  More ranks are fine: one
    task of srun may be torchrun, which starts several.

    Args:
        world_size: by default that of ``torch.distributed``, which is 1 if it is not initialized.
        environment: ``os.environ`` if None.

    Raises:
        RuntimeError: if there are fewer: they train apart from each other.

    Example::

        >>> check_world_size(16, {"SLURM_NTASKS": "2"})
        >>> check_world_size(1, {"SLURM_NTASKS": "2"})
        Traceback (most recent call last):
            ...
        RuntimeError: SLURM_NTASKS is 2, but only 1 rank has met: each process would train alone. \
Let torchrun start the ranks (srun --ntasks-per-node=1 comm-hooks launch ...), or use the mpirun \
that mpi4py was built for
    """
    expected = expected_world_size(environment)
    if world_size is None:
        world_size = dist.get_world_size() if dist.is_initialized() else 1
    if expected is None or world_size >= expected[0]:
        return
    met = "1 rank has" if world_size == 1 else f"{world_size} ranks have"
    raise RuntimeError(
        f"{expected[1]} is {expected[0]}, but only {met} met: each process would train alone. Let "
        "torchrun start the ranks (srun --ntasks-per-node=1 comm-hooks launch ...), or use the "
        "mpirun that mpi4py was built for"
    )

"""Tasks by name: data divided over clients, a model, and how it is judged."""

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.lab.tasks.autoencoder import autoencoder
from benchmarks.lab.tasks.digits import digits
from benchmarks.lab.tasks.fashion_mnist import fashion_mnist
from benchmarks.lab.tasks.gpt_text import gpt_text
from benchmarks.lab.tasks.task import Batch, Shard, Task
from benchmarks.lab.tasks.verses import verses
from comm_hooks.config import unknown

__all__ = ["TASKS", "Batch", "Shard", "Task", "build_task"]

TASKS: dict[str, Callable[..., Task]] = {
    "digits": digits,
    "fashion_mnist": fashion_mnist,
    "autoencoder": autoencoder,
    "gpt_text": gpt_text,
    "verses": verses,
}


def build_task(
    name: str,
    *,
    clients: int,
    seed: int = 0,
    data_dir: Path | str | None = None,
    partition: str | None = None,
    **options: Any,
) -> Task:
    """Return the task of that name.

    Args:
        name: a key of :data:`TASKS`.
        clients: how many share the training data.
        seed: of the partition.  Weights follow from ``torch.manual_seed``, batches from the
            generators that are passed to the clients.
        data_dir: where the data lies; see the task.
        partition: how data is divided, where that is a choice; by default ``"iid"``.
        options: the task's own arguments.

    Raises:
        ValueError: for an unknown name or option, with the nearest known one; for values out of
            range; for data that is missing or not what it should be.

    Example::

        >>> task = build_task("digits", clients=5, partition="classes", classes_per_client=2)
        >>> sum(len(client) for client in task.clients), len(task.held_out)
        (1437, 360)
    """
    if name not in TASKS:
        raise ValueError(unknown("task", name, TASKS))
    known = [
        parameter.name
        for parameter in inspect.signature(TASKS[name]).parameters.values()
        if parameter.name not in ("clients", "seed")
    ]
    if partition is not None:
        options["partition"] = partition
    if data_dir is not None:
        if "data_dir" not in known:
            raise ValueError(f"{name}: reads no files of yours: leave out --data-dir")
        options["data_dir"] = Path(data_dir)
    for option in options:
        if option not in known:
            raise ValueError(unknown(f"option of {name}", option, known))
    return TASKS[name](clients=clients, seed=seed, **options)

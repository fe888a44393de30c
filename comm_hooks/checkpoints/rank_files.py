"""Save one file per rank beside a checkpoint: residuals differ between ranks."""

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from comm_hooks.checkpoints.protocol import RankState, exchange_of
from comm_hooks.checkpoints.restoring import Storage, entry_of, first_line, raise_together, restore

Write = Callable[[dict[str, Any], str], object]
Read = Callable[[str], dict[str, Any]]


def save_rank_file(
    state: RankState, folder: str | os.PathLike[str], *, write: Write | None = None
) -> None:
    """Write this rank's state to ``folder/rank<r>.pt``.  Every rank must call it.

    ``r`` is the rank among all ranks of the run, also where only some of them exchange with each
    other (the replicas of a shard, with FSDP2): all ranks may share a folder.  A file appears under
    its name only when it is complete.  Files that a run with more ranks left there are not read.

    Args:
        state: a :class:`~comm_hooks.CompressionState`, the exchange of an optimizer, or
            :class:`~comm_hooks.optim.LocalRounds`.
        folder: the folder of the files, created if needed.  Nodes must share it only if the run is
            to continue on another number of ranks.
        write: replaces :func:`torch.save`, for filesystems that are not local; it receives the
            dict to save and the path as a string.

    Raises:
        PayloadError: on all ranks, before anything is written, if their parameters differ.
        ValueError: on all ranks, if any of them cannot write its file.

    Example::

        >>> import tempfile
        >>> from comm_hooks import register
        >>> from comm_hooks.checkpoints.rank_files import load_rank_files, save_rank_file
        >>> state = register(ddp_model, "topk")
        >>> with tempfile.TemporaryDirectory() as checkpoint:
        ...     save_rank_file(state, checkpoint)
        ...     load_rank_files(state, checkpoint)
        True
    """
    exchange = exchange_of(state)
    exchange.compare_replicas()
    path, problem = _path(folder, exchange.transport.own_name), None
    try:
        (write or _write)(entry_of(state), path)
    except Exception as error:  # the other ranks must hear of any error
        problem = f"{path} cannot be written ({first_line(error)})"
    raise_together(state, problem)


def load_rank_files(
    state: RankState,
    folder: str | os.PathLike[str],
    *,
    step: int | None = None,
    read: Read | None = None,
) -> bool:
    """Restore the states that :func:`save_rank_file` wrote.  Every rank must call it.

    On the same ranks as at the save, each rank restores its own state; otherwise each rank reads
    the files of all ranks that saved, and merges them.

    Args:
        state: an object of the class that was saved, with any number of ranks.
        folder: the folder of the files.
        step: if given, the number of exchanges after which the files must have been saved.
        read: replaces :func:`torch.load`: returns a path's dict or raises ``FileNotFoundError``.

    Returns:
        Whether there were files.  If not, a warning says so and nothing is changed.

    Raises:
        ValueError: on all ranks alike, if files are missing, damaged or of different checkpoints
            (then nothing is changed), or do not fit the model and settings.
    """
    load = read or _read
    storage = Storage(
        name=os.fspath(folder),
        name_of=lambda rank: _path(folder, rank),
        read=lambda rank: load(_path(folder, rank)),
    )
    found = restore(state, storage, step=step)
    if not found:
        warnings.warn(
            f"{storage.name} has no files of comm_hooks: residuals start from zero", stacklevel=2
        )
    return found


def _path(folder: str | os.PathLike[str], rank: int) -> str:
    # Joined by hand: the folder may be a URL.
    return f"{os.fspath(folder)}/rank{rank}.pt"


def _write(state: dict[str, Any], path: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, f"{path}.tmp")
    os.replace(f"{path}.tmp", path)


def _read(path: str) -> dict[str, Any]:
    return torch.load(path, map_location="cpu", weights_only=True)

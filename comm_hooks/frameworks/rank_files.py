"""One file per rank beside a checkpoint: residuals differ, and one file of rank 0's loses them."""

import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from comm_hooks.collectives.requests import AllGatherObject
from comm_hooks.exchange import Exchange
from comm_hooks.hook import CompressionState

Write = Callable[[dict[str, Any], str], object]
Read = Callable[[str], dict[str, Any]]


def save_rank_file(
    state: CompressionState | Exchange,
    folder: str | os.PathLike[str],
    *,
    write: Write | None = None,
) -> None:
    """Write this rank's state to ``folder/rank<r>.pt``.  Every rank must call it.

    A file appears under its name only when it is complete.  Files of more ranks that an earlier
    run left in the folder are not read.

    Args:
        state: a :class:`~comm_hooks.CompressionState`, or the exchange of an optimizer.
        folder: made if it is not there.  It need not be shared between nodes, unless the run is to
            go on with another number of ranks.
        write: takes the place of :func:`torch.save`, with the path as a string: for filesystems
            that are not local.

    Example::

        >>> import tempfile
        >>> from comm_hooks import register
        >>> from comm_hooks.frameworks.rank_files import load_rank_files, save_rank_file
        >>> state = register(ddp_model, "topk")
        >>> with tempfile.TemporaryDirectory() as checkpoint:
        ...     save_rank_file(state, checkpoint)
        ...     load_rank_files(state, checkpoint)
        True
    """
    rank = _exchange(state).transport.rank
    (write or _write)(state.state_dict(), _path(folder, rank))


def load_rank_files(
    state: CompressionState | Exchange,
    folder: str | os.PathLike[str],
    *,
    step: int | None = None,
    read: Read | None = None,
) -> bool:
    """Restore what the ranks saved with :func:`save_rank_file`.  Every rank must call it.

    1. every rank reads its own file, and all ranks compare what they found;
    2. on as many ranks as then, each restores its own state;
    3. on another number, each reads the files of all ranks; see
       :meth:`~comm_hooks.Exchange.load_state_dicts`.

    Args:
        state: as it was when it was saved, with any number of ranks.
        folder: where the files are.
        step: the number of exchanges that the files must have been saved after, if known.
        read: takes the place of :func:`torch.load`; raises ``FileNotFoundError``.

    Returns:
        Whether there were files.  If not, a warning says so and nothing is changed.

    Raises:
        ValueError: on all ranks alike, if files are missing, damaged or of different checkpoints;
            nothing is changed.
    """
    exchange = _exchange(state)
    rank, ranks = exchange.transport.rank, exchange.transport.world_size

    def compare(finding: Any) -> list[Any]:
        return exchange.transport.perform(AllGatherObject(finding))

    own = _try(read or _read, _path(folder, rank))
    found = compare(own if isinstance(own, str) else (own["world_size"], own["step"]))
    if all(finding == _MISSING for finding in found):
        warnings.warn(
            f"{os.fspath(folder)} has no files of comm_hooks: residuals start from zero",
            stacklevel=2,
        )
        return False
    # What rank 0 saved last decides: other files may be left from a run with more ranks.
    if isinstance(found[0], str):
        raise ValueError(f"{_path(folder, 0)} {found[0]}")
    saved_ranks, saved_step = found[0]
    if step is not None and saved_step != step:
        raise ValueError(
            f"{os.fspath(folder)} was saved after {saved_step} exchanges, but the checkpoint after "
            f"{step}: it belongs to another one"
        )
    if saved_ranks == ranks:
        _require_all(found, (saved_ranks, saved_step), folder)
        assert not isinstance(own, str)
        state.load_state_dict(own)
        return True
    states = [_try(read or _read, _path(folder, other)) for other in range(saved_ranks)]
    findings = [s if isinstance(s, str) else (s["world_size"], s["step"]) for s in states]
    for of_one_rank in compare(findings):
        _require_all(of_one_rank, (saved_ranks, saved_step), folder)
    state.load_state_dicts([s for s in states if not isinstance(s, str)])
    return True


_MISSING = "is missing"


def _require_all(findings: list[Any], expected: tuple[int, int], folder: Any) -> None:
    for rank, finding in enumerate(findings):
        if finding != expected:
            what = finding if isinstance(finding, str) else "is of another checkpoint than rank 0's"
            raise ValueError(
                f"{_path(folder, rank)} {what}: residuals of all {expected[0]} ranks are needed, "
                "or none (remove the folder to start them from zero)"
            )


def _try(read: Read, path: str) -> dict[str, Any] | str:
    """Return what is in a file, or what is wrong with it."""
    try:
        state = read(path)
        return state if {"world_size", "step"} <= state.keys() else "is no file of comm_hooks"
    except FileNotFoundError:
        return _MISSING
    except Exception as error:  # whatever it is, the other ranks must hear of it
        return f"cannot be read ({(str(error) or repr(error)).splitlines()[0]})"


def _exchange(state: CompressionState | Exchange) -> Exchange:
    return state if isinstance(state, Exchange) else state.exchange


def _path(folder: str | os.PathLike[str], rank: int) -> str:
    # Joined by hand: the folder may be a URL.
    return f"{os.fspath(folder)}/rank{rank}.pt"


def _write(state: dict[str, Any], path: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, f"{path}.tmp")
    os.replace(f"{path}.tmp", path)


def _read(path: str) -> dict[str, Any]:
    return torch.load(path, map_location="cpu", weights_only=True)

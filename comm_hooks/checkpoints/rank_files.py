"""One file per rank beside a checkpoint: residuals differ, and one file of rank 0's loses them."""

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from comm_hooks.checkpoints.saved_state import (
    LOCAL_STEPS,
    RANKS,
    STATE,
    content_of,
    exchange_of,
    require_one_partition,
    tell_all,
)
from comm_hooks.collectives.requests import AllGatherObject
from comm_hooks.exchange import Exchange
from comm_hooks.exchange.sealing import require_seal, sealed

Write = Callable[[dict[str, Any], str], object]
Read = Callable[[str], dict[str, Any]]


class RankState(Protocol):
    """What has an exchange and saves its state with more: :class:`~comm_hooks.CompressionState`."""

    @property
    def exchange(self) -> Exchange:
        """Whose transport tells this rank and the others."""

    def state_dict(self) -> dict[str, Any]:
        """Return the exchange's state, and what is to be saved with it under other keys."""

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Restore what this rank saved, or raise ``ValueError``, without a collective."""

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]], /) -> None:
        """Restore what all ranks saved, or raise ``ValueError``, without a collective."""


def save_rank_file(
    state: RankState | Exchange,
    folder: str | os.PathLike[str],
    *,
    write: Write | None = None,
) -> None:
    """Write this rank's state to ``folder/rank<r>.pt``.  Every rank must call it.

    A rank is called what it is called among all ranks of the run, also where it exchanges with
    some of them only (the replicas of a shard, with FSDP2): all of them may share a folder.  A file
    appears under its name only when it is complete.  Files of more ranks that an earlier run left
    in the folder are not read.

    Args:
        state: a :class:`~comm_hooks.CompressionState`, the exchange of an optimizer, or
            :class:`~comm_hooks.optim.LocalRounds`.
        folder: made if it is not there.  It need not be shared between nodes, unless the run is to
            go on with another number of ranks.
        write: takes the place of :func:`torch.save`, with the path as a string: for filesystems
            that are not local.

    Raises:
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
    transport = exchange_of(state).transport
    path, problem = _path(folder, transport.own_name), None
    try:
        (write or _write)(sealed(content_of(state, transport)), path)
    except Exception as error:  # whatever it is, the other ranks must hear of it
        problem = f"{path} cannot be written ({_line(error)})"
    _raise_together(state, problem)


def load_rank_files(
    state: RankState | Exchange,
    folder: str | os.PathLike[str],
    *,
    step: int | None = None,
    read: Read | None = None,
) -> bool:
    """Restore what the ranks saved with :func:`save_rank_file`.  Every rank must call it.

    1. every rank reads its own file, and all ranks compare what they found, those that hold other
       parts of a sharded model as well;
    2. among the same ranks as then, each restores its own state;
    3. among others, or if a rank's own state does not fit (shards that these settings do not have),
       each reads the files of all that exchanged then; see
       :meth:`~comm_hooks.Exchange.load_state_dicts`.

    Args:
        state: as it was when it was saved, with any number of ranks.
        folder: where the files are.
        step: the number of exchanges that the files must have been saved after, if known.
        read: takes the place of :func:`torch.load`; raises ``FileNotFoundError``.

    Returns:
        Whether there were files.  If not, a warning says so and nothing is changed.

    Raises:
        ValueError: on all ranks alike, if files are missing, damaged or of different checkpoints
            (then nothing is changed), or do not fit.
    """
    transport = exchange_of(state).transport
    ranks, read = list(transport.ranks), read or _read

    def compare(finding: Any) -> list[Any]:
        return transport.perform(AllGatherObject(finding))

    own = _try(read, _path(folder, transport.own_name))
    found, problem, saved = compare(_finding(own)), None, None
    try:
        saved = _saved(found, ranks, folder, step)
    except ValueError as error:
        problem = str(error)
    # Ranks that hold other parts of the model have found files of their own.
    outcomes = tell_all(state, [problem, saved and saved[1]])
    for other, _ in outcomes:
        if other is not None:
            raise ValueError(other)
    if len({saved_step for _, saved_step in outcomes}) > 1:
        raise ValueError(
            f"{os.fspath(folder)} has files of all ranks of some parts of the sharded model, and "
            "of others none, or those of another step: all are needed, or none (remove the folder "
            "to start residuals from zero)"
        )
    if saved is None:
        warnings.warn(
            f"{os.fspath(folder)} has no files of comm_hooks: residuals start from zero",
            stacklevel=2,
        )
        return False
    saved_ranks, _ = saved
    if saved_ranks == ranks:
        assert not isinstance(own, str)
        # On other nodes, or without the owners of shards that there were, nobody has an own one.
        if all(compare(exchange_of(state).continues([own[STATE]]))):
            problem = _problem_of(state.load_state_dict, own[STATE])
            if not any(compare(problem)):
                _raise_together(state, None)
                return True
    files = [_try(read, _path(folder, other)) for other in saved_ranks]
    try:
        for of_one_rank in compare([_finding(file) for file in files]):
            _require_all(of_one_rank, found[0], folder)
        complete = [file[STATE] for file in files if not isinstance(file, str)]
        problem = _problem_of(state.load_state_dicts, complete)
    except ValueError as error:
        problem = str(error)
    _raise_together(state, problem)
    return True


def _saved(
    found: list[Any], ranks: list[int], folder: Any, step: int | None
) -> tuple[list[int], int] | None:
    """Return among whom and when a checkpoint was saved; None if there is none.

    Args:
        found: of each rank's file.
        ranks: those that exchange now.
        folder, step: see :func:`load_rank_files`.

    Raises:
        ValueError: if the files are not those of one checkpoint, or it is not that of the step.
    """
    if all(finding == _MISSING for finding in found):
        return None
    # What the first rank saved last decides: other files may be left from a run with more ranks.
    if isinstance(found[0], str):
        raise ValueError(f"{_path(folder, ranks[0])} {found[0]}")
    saved_ranks, saved_step, _ = found[0]
    if step is not None and saved_step != step:
        raise ValueError(
            f"{os.fspath(folder)} was saved after {saved_step} exchanges, but the checkpoint after "
            f"{step}: it belongs to another one"
        )
    if saved_ranks == ranks:
        _require_all(found, found[0], folder)
    require_one_partition(saved_ranks, [f[0] for f in found if f[1:] == found[0][1:]])
    return saved_ranks, saved_step


_MISSING = "is missing"


def _finding(file: dict[str, Any] | str) -> Any:
    """Return what ranks compare of a file: among whom and when it was saved, or its problem."""
    if isinstance(file, str):
        return file
    return [file[RANKS], file[STATE]["step"], file.get(LOCAL_STEPS)]


def _require_all(findings: list[Any], expected: list[Any], folder: Any) -> None:
    """Raise ``ValueError`` unless all files of the ranks of one checkpoint are there.

    Args:
        findings: of the file of each of them.
        expected: what the first rank's says.
        folder: for messages.
    """
    ranks = expected[0]
    for rank, finding in zip(ranks, findings, strict=True):
        if finding != expected:
            what = f"is of another checkpoint than rank {ranks[0]}'s"
            raise ValueError(
                f"{_path(folder, rank)} {finding if isinstance(finding, str) else what}: residuals "
                f"of all {len(ranks)} ranks are needed, or none (remove the folder to start them "
                "from zero)"
            )


def _problem_of(load: Callable[[Any], None], state: Any) -> str | None:
    try:
        load(state)
    except Exception as error:  # whatever it is, the other ranks must hear of it
        return str(error) if isinstance(error, ValueError) else f"it does not fit ({_line(error)})"
    return None


def _raise_together(state: RankState | Exchange, problem: str | None) -> None:
    """Raise ``ValueError`` on all ranks if there is a problem on one."""
    for other in tell_all(state, problem):
        if other is not None:
            raise ValueError(other)


def _try(read: Read, path: str) -> dict[str, Any] | str:
    """Return what is in a file, or what is wrong with it."""
    try:
        file = read(path)
        kinds = {STATE: Mapping, RANKS: list}
        if not isinstance(file, Mapping) or not all(
            isinstance(file.get(key), kind) for key, kind in kinds.items()
        ):
            return "is no file of comm_hooks"
        require_seal(file)
        return dict(file)
    except FileNotFoundError:
        return _MISSING
    except Exception as error:  # whatever it is, the other ranks must hear of it
        return f"cannot be read ({_line(error)})"


def _line(error: Exception) -> str:
    return (str(error) or repr(error)).splitlines()[0]


def _path(folder: str | os.PathLike[str], rank: int) -> str:
    # Joined by hand: the folder may be a URL.
    return f"{os.fspath(folder)}/rank{rank}.pt"


def _write(state: dict[str, Any], path: str) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    torch.save(state, f"{path}.tmp")
    os.replace(f"{path}.tmp", path)


def _read(path: str) -> dict[str, Any]:
    return torch.load(path, map_location="cpu", weights_only=True)

"""Restore the states of all ranks from any storage: one algorithm for files and for DCP."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from comm_hooks.checkpoints.protocol import (
    RankState,
    exchange_of,
    gather_findings,
    local_steps,
    whole_state,
)
from comm_hooks.checkpoints.sealing import require_seal, sealed
from comm_hooks.collectives.requests import AllGatherObject

_STATE, _RANKS, _LOCAL_STEPS = "state", "ranks", "local_steps"
_MISSING = "is missing"


@dataclass(frozen=True)
class Storage:
    """A storage of saved states, with one entry for each rank.

    Args:
        name: the name of the storage, for messages.
        name_of: returns the name of a rank's entry, for messages.
        read: returns the entry of a rank; raises ``FileNotFoundError`` if there is none.
    """

    name: str
    name_of: Callable[[int], str]
    read: Callable[[int], Mapping[str, Any]]

    def entry(self, rank: int) -> dict[str, Any] | str:
        """Return the entry of a rank, or, if it cannot be used, the reason as text."""
        try:
            entry = self.read(rank)
            kinds = {_STATE: Mapping, _RANKS: list}
            if not isinstance(entry, Mapping) or not all(
                isinstance(entry.get(key), kind) for key, kind in kinds.items()
            ):
                return "is no file of comm_hooks"
            require_seal(entry)
            return dict(entry)
        except FileNotFoundError:
            return _MISSING
        except Exception as error:  # the other ranks must hear of any error
            return f"cannot be read ({first_line(error)})"


def entry_of(state: RankState) -> dict[str, Any]:
    """Return the entry that this rank stores: its state, the ranks that exchange, a checksum."""
    ranks = list(exchange_of(state).transport.ranks)
    own = whole_state(state.state_dict())
    return sealed({_STATE: own, _RANKS: ranks, _LOCAL_STEPS: local_steps(state)})


def restore(state: RankState, storage: Storage, *, step: int | None = None) -> bool:
    """Restore the states that all ranks stored.  Every rank must call it.

    1. Every rank reads its own entry, and all ranks compare them, the ranks that hold other parts
       of a sharded model as well.
    2. On the same ranks as at the save, each rank restores its own state.
    3. On other ranks, or if the state of a rank does not fit the settings, each rank reads the
       entries of all ranks that saved (``load_state_dicts``).

    Args:
        step: if given, the number of exchanges after which the states must have been saved.

    Returns:
        Whether there were entries.  If not, nothing is changed.

    Raises:
        ValueError: on all ranks alike, if entries are missing, damaged or of different checkpoints
            (then nothing is changed), or do not fit the model and settings.
    """
    exchange = exchange_of(state)
    transport = exchange.transport
    ranks = list(transport.ranks)

    def compare(finding: Any) -> list[Any]:
        return transport.perform(AllGatherObject(finding))

    own = storage.entry(transport.own_name)
    found, problem, saved = compare(_finding(own)), None, None
    try:
        saved = _saved(found, ranks, storage, step)
    except ValueError as error:
        problem = str(error)
    # Ranks that hold other parts of the model have found entries of their own.
    outcomes = gather_findings(state, [problem, saved and saved[1]])
    for other, _ in outcomes:
        if other is not None:
            raise ValueError(other)
    if len({saved_step for _, saved_step in outcomes}) > 1:
        raise ValueError(
            f"{storage.name} has the files of some parts of the sharded model, but no files of "
            "other parts, or files of another step: all are needed, or none (remove the folder to "
            "start residuals from zero)"
        )
    if saved is None:
        return False
    saved_ranks, _ = saved
    if saved_ranks == ranks:
        assert not isinstance(own, str)
        if all(compare(exchange.continues([own[_STATE]]))):
            problem = _problem_of(state.load_state_dict, own[_STATE])
            if not any(compare(problem)):
                raise_together(state, None)
                return True
    entries = [storage.entry(other) for other in saved_ranks]
    try:
        for of_one_rank in compare([_finding(entry) for entry in entries]):
            _require_all(of_one_rank, found[0], storage)
        complete = [entry[_STATE] for entry in entries if not isinstance(entry, str)]
        problem = _problem_of(state.load_state_dicts, complete)
    except ValueError as error:
        problem = str(error)
    raise_together(state, problem)
    return True


def raise_together(state: RankState, problem: str | None) -> None:
    """Raise ``ValueError`` on all ranks if any rank passes a problem (text) instead of None."""
    for other in gather_findings(state, problem):
        if other is not None:
            raise ValueError(other)


def first_line(error: Exception) -> str:
    """Return the first line of an error's message; its ``repr`` if the message is empty."""
    return (str(error) or repr(error)).splitlines()[0]


def _saved(
    found: list[Any], ranks: list[int], storage: Storage, step: int | None
) -> tuple[list[int], int] | None:
    """Return the ranks and the step of a saved checkpoint; None if no rank has an entry.

    ``found`` holds, for each of ``ranks``, the :func:`_finding` about the entry that it read.
    """
    if all(finding == _MISSING for finding in found):
        return None
    # The first rank's entry decides: others may be left from a run with more ranks.
    if isinstance(found[0], str):
        raise ValueError(f"{storage.name_of(ranks[0])} {found[0]}")
    saved_ranks, saved_step, *_ = found[0]
    if step is not None and saved_step != step:
        raise ValueError(
            f"{storage.name} was saved after {saved_step} exchanges, but the checkpoint after "
            f"{step}: it belongs to another checkpoint: load both from the same one"
        )
    if saved_ranks == ranks:
        _require_all(found, found[0], storage)
    for other in (f[0] for f in found if f[1:3] == found[0][1:3]):
        if set(other).isdisjoint(saved_ranks):
            raise ValueError(
                f"these ranks exchanged in several groups when they saved, ranks {saved_ranks} and "
                f"ranks {other} among them: residuals of several groups cannot be merged. Make the "
                "same process groups as in the run that saved"
            )
    return saved_ranks, saved_step


def _finding(entry: dict[str, Any] | str) -> Any:
    """Return what ranks compare of an entry (ranks, steps, run), or its problem as text."""
    if isinstance(entry, str):
        return entry
    state = entry[_STATE]
    return [entry[_RANKS], state["step"], entry.get(_LOCAL_STEPS), state.get("run")]


def _require_all(findings: list[Any], expected: list[Any], storage: Storage) -> None:
    """Raise ``ValueError`` unless the entries of all ranks are present and of one checkpoint."""
    ranks = expected[0]
    for rank, finding in zip(ranks, findings, strict=True):
        if finding != expected:
            problem = f"is of another checkpoint than rank {ranks[0]}'s"
            raise ValueError(
                f"{storage.name_of(rank)} {finding if isinstance(finding, str) else problem}: "
                f"residuals of all {len(ranks)} ranks are needed, or none (remove the folder to "
                "start them from zero)"
            )


def _problem_of(load: Callable[[Any], None], state: Any) -> str | None:
    try:
        load(state)
    except Exception as error:  # the other ranks must hear of any error
        if isinstance(error, ValueError):
            return str(error)
        return f"the saved state does not fit ({first_line(error)})"
    return None

"""What an exchange saves, and what it may load.

A rank loads its own state, or those of all ranks of a run that had another number of them.
"""

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import torch

from comm_hooks.exchange.sealing import SEAL, require_seal, sealed
from comm_hooks.memory.base import Memory, Remainder

State = Mapping[str, Any]


class Provenance(Protocol):
    """Says what an exchange's state is made of, where not every state may be loaded."""

    def saved(self) -> Mapping[str, Any]:
        """Return that, as plain values, to be saved with the state."""

    def check(self, found: object) -> None:
        """Raise ``ValueError`` unless a state that says this, or nothing (None), may be loaded."""

    def adopt(self, found: object) -> None:
        """Note that a state that says this is being loaded."""


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_name(value: object) -> bool:
    return isinstance(value, str)


def _is_mapping(value: object) -> bool:
    return isinstance(value, Mapping)  # of which memories, or who answers for it, see the rest


def _are_numels(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and _is_count(numel) and numel for name, numel in value.items()
    )


def _are_buckets(value: object) -> bool:
    return isinstance(value, list | tuple) and all(
        isinstance(bucket, list | tuple) and all(map(_is_name, bucket)) for bucket in value
    )


# The keys of an exchange's or a hook's state: a test of each value, and its name in messages.  What
# optimizers and engines save beside it has other keys.
_SCHEMA: dict[str, tuple[Callable[[object], bool], str]] = {
    "step": (_is_count, "a number of steps"),
    "rank": (_is_count, "a rank"),
    "world_size": (_is_count, "a number of ranks"),
    "collective": (_is_name, "a name"),
    "ranks_per_node": (lambda value: _is_count(value) and bool(value), "a number of ranks"),
    "memory_type": (_is_name, "a name"),
    "memory": (_is_mapping, "a dictionary of vectors"),
    "server_memory": (_is_mapping, "a dictionary of vectors"),
    "numels": (_are_numels, "a dictionary of numbers of elements"),
    "buckets": (_are_buckets, "lists of names"),
    "provenance": (_is_mapping, "a dictionary"),
}
_ALWAYS = ("step", "rank", "world_size", "collective")
_WITH_MEMORY = ("memory_type", "memory", "server_memory", "numels")


class Remembered:
    """What a rank remembers for an exchange.

    Args:
        memory: of what this rank did not send; None if nothing is remembered.

    Attributes:
        memory: see above.
        server: of what it did not pass on as an owner of shards; None without a memory.
        numels: the number of elements of each parameter that they may know.
    """

    def __init__(self, memory: Memory | None) -> None:
        self.memory = memory
        self.server = memory.for_server() if memory else None
        self.numels: dict[str, int] = {}

    def __copy__(self) -> "Remembered":
        """Return another of the same kind that remembers the same."""
        duplicate = Remembered(copy.deepcopy(self.memory))
        duplicate.server = copy.deepcopy(self.server)
        duplicate.numels = dict(self.numels)
        return duplicate

    def norm(self) -> float:
        """Return the Euclidean norm of all of it, in unscaled gradient units."""
        memories = [memory for memory in (self.memory, self.server) if memory]
        return float(sum(memory.norm() ** 2 for memory in memories) ** 0.5)

    def state_dict(self) -> dict[str, Any]:
        """Return what is saved of it."""
        if self.memory is None or self.server is None:
            return {}
        return {
            "memory_type": type(self.memory).__name__,
            "memory": self.memory.state_dict(),
            "server_memory": self.server.state_dict(),
            "numels": dict(self.numels),
        }

    def load_state_dict(self, state: State) -> None:
        """Restore what :meth:`state_dict` returned, which :func:`check_memory` has looked at."""
        if self.memory and self.server:
            count = state.get("ranks_per_node") or 1
            widths = _shards(state["numels"], count)
            self.memory.load_state_dict(state["memory"], widths)
            self.server.load_state_dict(
                state["server_memory"], _shards(widths, state["world_size"] // count)
            )
            self._know(state["numels"])

    def load_merged(
        self, states: Sequence[State], place: int, ranks_per_node: int | None, scale: float
    ) -> None:
        """Restore what ranks of another number have saved.

        Args:
            states: of all of them.
            place: of this rank in its node.
            ranks_per_node: None where nodes do not matter.
            scale: by which what the mean over ranks has still to receive is multiplied.
        """
        if self.memory and self.server:
            numels = _numels_in(states)
            merged, widths = merge_memories(states, self.memory, self.server, scale), numels
            if ranks_per_node is not None:
                merged = cut_memory(merged, self.memory, numels, place, ranks_per_node)
                widths = _shards(numels, ranks_per_node)
            self.memory.load_state_dict(merged, widths)
            self.server.load_state_dict({})
            self._know(numels)

    def load_of_owners(self, states: Sequence[State], rank: int, ranks: int, scale: float) -> None:
        """Restore what owners of other shards have saved, where nobody else remembers anything.

        Args:
            states: of all ranks that there were.
            rank: of this owner.
            ranks: the number of shards that there are now.
            scale: see :meth:`load_merged`.
        """
        if self.memory and self.server:
            numels = _numels_in(states)
            unsent, widths = _unsent(states, self.server, numels), _shards(numels, ranks)
            owned = {n: _shard(row, rank, widths[n]) for n, row in unsent.items()}
            self.memory.load_state_dict({})
            merged = self.server.merge([], owned, widths, scale=scale)
            self.server.load_state_dict(merged, widths)
            self._know(numels)

    def _know(self, numels: Mapping[str, int]) -> None:
        self.numels.clear()
        self.numels.update(numels)


def seal_own(state: State) -> dict[str, Any]:
    """Return a state with a seal on what is an exchange's in it."""
    return {**state, SEAL: sealed({key: state[key] for key in _SCHEMA if key in state})[SEAL]}


def check_whole(state: object) -> None:
    """Raise ``ValueError`` unless a state is as an exchange has saved it."""
    if not isinstance(state, Mapping):
        raise ValueError(
            f"the state must be what state_dict() returned, got {type(state).__name__}"
        )
    require_seal({key: state[key] for key in (*_SCHEMA, SEAL) if key in state})
    needed = _ALWAYS + _WITH_MEMORY * ("memory" in state)
    for key, (fits, words) in _SCHEMA.items():
        if key in needed and key not in state:
            raise ValueError(f"the state is not one of an exchange: it has no {key}")
        if key in state and not fits(state[key]):
            raise ValueError(
                f"the state is not one of an exchange: its {key} must be {words}, got "
                f"{type(state[key]).__name__}"
            )


def check_own(state: State, rank: int, world_size: int, ranks_per_node: int | None) -> None:
    """Raise ``ValueError`` unless ``state`` was saved by this rank of as many ranks and nodes."""
    expected = {"rank": rank, "world_size": world_size, "ranks_per_node": ranks_per_node}
    for setting, value in expected.items():
        if state.get(setting) != value:
            raise ValueError(
                f"this state was saved with {setting} {state.get(setting)}, but this is "
                f"{setting} {value}: every rank loads the state that it saved itself, or, on "
                "another number of ranks or nodes, those of all ranks with load_state_dicts()"
            )


def check_memory(state: State, memory: Memory | None, known: Collection[str] | None) -> None:
    """Raise ``ValueError`` if a state cannot be that of a memory.

    Args:
        memory: what is to load it; None if nothing is remembered.
        known: the names of the parameters that there are, if they are known.
    """
    if ("memory" in state) != (memory is not None):
        raise ValueError(
            "the state was saved "
            + ("with" if "memory" in state else "without")
            + " a memory, but this exchange is configured the other way"
        )
    if memory is None:
        return
    here = type(memory).__name__
    if state["memory_type"] != here:
        raise ValueError(
            f"the state was saved with {state['memory_type']!r}, but this exchange has {here!r}, "
            "which cannot go on with it: give the exchange the memory that it had"
        )
    memory.check(state["memory"])
    memory.for_server().check(state["server_memory"])
    strangers = memory.parameters_in(state["memory"]) - set(known if known is not None else ())
    if known is not None and strangers:
        raise ValueError(
            "the state has residuals of parameters that this model does not have: "
            f"{', '.join(sorted(strangers)[:3])}"
        )
    for name, row in state["memory"].items():
        if row.is_floating_point() and not row.isfinite().all():
            raise ValueError(
                f"the residual of {name!r} is not finite, and would make all gradients NaN for "
                "ever: load an older state"
            )


def check_complete(states: Sequence[State]) -> None:
    """Raise ``ValueError`` unless ``states`` are those of all ranks, in order, at one step."""
    if not states:
        raise ValueError("no states were given: pass those of all ranks that saved one")
    for state in states:
        check_whole(state)
    ranks, sizes = [s.get("rank") for s in states], {s.get("world_size") for s in states}
    if ranks != list(range(len(states))) or sizes != {len(states)}:
        raise ValueError(
            f"the states must be those of all ranks in rank order, got ranks {ranks} of "
            f"{', '.join(map(str, sizes))}"
        )
    counts = {state.get("ranks_per_node") for state in states}
    if len(counts) > 1:
        raise ValueError(f"the states were saved with different ranks_per_node: {counts}")
    if any(count and len(states) % count for count in counts):
        raise ValueError(
            f"the states are of {len(states)} ranks, which nodes of {counts.pop()} cannot have been"
        )
    steps = [state["step"] for state in states]
    if len(set(steps)) > 1:
        raise ValueError(f"the states were saved at different steps: {steps}")


def merge_memories(
    states: Sequence[State], memory: Memory, server_memory: Remainder, scale: float
) -> dict[str, torch.Tensor]:
    """Return the memory that each of any number of ranks goes on with, given complete states.

    Args:
        states: of all ranks, in rank order.
        memory, server_memory: of the kind that the states are of.
        scale: by which what the mean over ranks has still to receive is multiplied.

    Raises:
        ValueError: if the states are of another kind of memory.
    """
    numels = _numels_in(states)
    count = states[0].get("ranks_per_node")
    if count is None:
        return _merge(states, memory, server_memory, numels, scale)
    # Ranks at the same place in their node have the same shard of each parameter.
    widths = _shards(numels, count)
    shards = [
        _as_floats(
            _merge(states[place::count], memory, server_memory, widths, scale), memory, widths
        )
        for place in range(count)
    ]
    joined = {}
    for key in dict.fromkeys(key for shard in shards for key in shard):
        width, numel = (lengths[_parameter(key, memory)] for lengths in (widths, numels))
        pieces = [shard.get(key, torch.zeros(width, dtype=torch.float32)) for shard in shards]
        joined[key] = torch.cat(pieces)[:numel]
    return _from_floats(joined, memory, numels)


def cut_memory(
    state: Mapping[str, torch.Tensor],
    memory: Memory,
    numels: Mapping[str, int],
    place: int,
    ranks_per_node: int,
) -> dict[str, torch.Tensor]:
    """Return what the rank at ``place`` in each node remembers, given the memory of whole vectors.

    Args:
        state: as :func:`merge_memories` returns it.
        memory: of the kind that the state is of.
        numels: the number of elements of each whole parameter.
        place, ranks_per_node: see :class:`~comm_hooks.exchange.routes.hierarchical.Hierarchical`.
    """
    widths = _shards(numels, ranks_per_node)
    cut = {
        key: _shard(row, place, widths[_parameter(key, memory)])
        for key, row in _as_floats(state, memory, numels).items()
    }
    return _from_floats(cut, memory, widths)


def _numels_in(states: Sequence[State]) -> dict[str, int]:
    return {name: numel for state in states for name, numel in state["numels"].items()}


def _shards(numels: Mapping[str, int], count: int) -> dict[str, int]:
    """Return how many elements one of so many equal shards of each parameter has."""
    return {name: -(-numel // count) for name, numel in numels.items()}


def _shard(vector: torch.Tensor, place: int, width: int) -> torch.Tensor:
    """Return one of the shards of a vector, padded with zeros to its width."""
    shard = vector[place * width : (place + 1) * width]
    return torch.nn.functional.pad(shard, (0, width - len(shard)))


def _merge(
    states: Sequence[State],
    memory: Memory,
    server_memory: Remainder,
    numels: Mapping[str, int],
    scale: float,
) -> dict[str, torch.Tensor]:
    unsent = _unsent(states, server_memory, numels)
    return memory.merge([state["memory"] for state in states], unsent, numels, scale=scale)


def _unsent(
    states: Sequence[State], server_memory: Remainder, numels: Mapping[str, int]
) -> dict[str, torch.Tensor]:
    """Return what the owners of shards had not passed on, (numel,) float32 per parameter."""
    # Rank j's server memory is about the j-th of as many equal ranges of each parameter.
    widths = _shards(numels, len(states))
    shards = [server_memory.vectors(state["server_memory"], widths) for state in states]
    return {
        name: torch.cat(
            [
                shard[name] if name in shard else torch.zeros(widths[name], dtype=torch.float32)
                for shard in shards
            ]
        )[: numels[name]]
        for name in dict.fromkeys(name for shard in shards for name in shard)
    }


def _parameter(key: str, memory: Memory) -> str:
    (name,) = memory.parameters_in({key: torch.empty(0, dtype=torch.float32)})
    return name


def _as_floats(
    state: Mapping[str, torch.Tensor], memory: Memory, numels: Mapping[str, int]
) -> dict[str, torch.Tensor]:
    """Return a state's rows with one float32 per element of a parameter."""
    return memory.vectors(state, numels) if isinstance(memory, Remainder) else dict(state)


def _from_floats(
    rows: dict[str, torch.Tensor], memory: Memory, numels: Mapping[str, int]
) -> dict[str, torch.Tensor]:
    """Undo :func:`_as_floats`."""
    return memory.merge([], rows, numels) if isinstance(memory, Remainder) else rows

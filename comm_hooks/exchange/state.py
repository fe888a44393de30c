"""The state of an exchange on one rank: residuals, step and traffic."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from comm_hooks.exchange.merging import (
    cut_memory,
    cut_shard,
    merge_memories,
    numels_in,
    residuals_of_shards,
    shard_widths,
)
from comm_hooks.exchange.saved_state import (
    Position,
    State,
    check_complete,
    check_memory,
    check_own,
    check_whole,
    seal_own,
)
from comm_hooks.memory.base import Memory
from comm_hooks.wire.stamp import digest


@dataclass
class Traffic:
    """The bytes that this rank has exchanged since the start, without transport headers.

    Attributes:
        sent: the bytes sent; the ring algorithms of gloo and NCCL receive as many.
        between_nodes: the part of ``sent`` that left the node.
        uncompressed: the bytes that all-reduces in the dtype of the tensors would have sent.
    """

    sent: int = 0
    between_nodes: int = 0
    uncompressed: int = 0


class Provenance(Protocol):
    """Describes the training that made a state, and decides which states may be loaded."""

    def saved(self) -> Mapping[str, Any]:
        """Return the description as plain values; it is saved with the state."""

    def check(self, found: object) -> None:
        """Raise ``ValueError`` unless a state with this description (None: none) may be loaded."""

    def adopt(self, found: object) -> None:
        """Record that a state with this description is being loaded."""


class ExchangeState:
    """The state of an exchange on one rank that lasts between rounds and is saved and loaded.

    Args:
        memory: keeps the residuals of this rank's vectors; None in an exchange without a memory.

    Attributes:
        memory: keeps the residuals of this rank's vectors; None without a memory.
        server_memory: keeps the residuals of the shard that this rank owns; None without a memory.
        numels: the number of elements of each parameter that may have a residual.
        step: the number of steps exchanged so far.
        loaded_at: the step of the last loaded state; None if none was loaded.
        loaded_from: the identity of the exchange that saved it; None if it had none.
        provenance: describes and checks states; set by private training.
        only_shards: whether the owners of shards hold all residuals; set by private training.
        is_of_sums: whether the receiver turns means into sums over ranks: on another number of
            ranks the sum of the residuals is kept, not their mean.
    """

    def __init__(self, memory: Memory | None) -> None:
        self.memory = memory
        self.server_memory = memory.for_server() if memory else None
        self.numels: dict[str, int] = {}
        self.step = 0
        self.loaded_at: int | None = None
        self.loaded_from: str | None = None
        self.provenance: Provenance | None = None
        self.only_shards = self.is_of_sums = False

    def __copy__(self) -> ExchangeState:
        """Return the same state with copies of the residuals."""
        duplicate = object.__new__(ExchangeState)
        duplicate.__dict__.update(self.__dict__)
        duplicate.memory = copy.deepcopy(self.memory)
        duplicate.server_memory = copy.deepcopy(self.server_memory)
        duplicate.numels = dict(self.numels)
        return duplicate

    @property
    def loads(self) -> int:
        """A number that tells when and from which run a state was loaded; 0 if none was."""
        if self.loaded_at is None:
            return 0
        return digest(self.step - self.loaded_at, self.loaded_from)

    def residual_norm(self) -> float:
        """Return the Euclidean norm of all residuals, in unscaled gradient units."""
        memories = [memory for memory in (self.memory, self.server_memory) if memory]
        return float(sum(memory.norm() ** 2 for memory in memories) ** 0.5)

    def state_dict(self, position: Position, identity: str | None) -> dict[str, Any]:
        """Return the state of the rank at this position as plain values and tensors.

        Args:
            position: the place of this rank.
            identity: the exchange's, None before its first round.
        """
        run = identity or self.loaded_from or "new"
        state = {**position.saved(), "step": self.step, "run": run}
        if self.provenance:
            state["provenance"] = dict(self.provenance.saved())
        if self.memory and self.server_memory:
            state |= {
                "memory_type": type(self.memory).__name__,
                "memory": self.memory.state_dict(),
                "server_memory": self.server_memory.state_dict(),
                "numels": dict(self.numels),
            }
        return seal_own(state)

    def load_state_dict(
        self, state: State, position: Position, names: Collection[str] | None
    ) -> None:
        """Restore the state that this rank saved itself.

        Args:
            names: the names of all parameters; None if they are unknown.

        Raises:
            ValueError: as :meth:`Exchange.load_state_dict`; nothing is changed.
        """
        check_whole(state)
        check_own(state, position)
        self._check([state], names)
        if self.memory and self.server_memory:
            count = state.get("ranks_per_node") or 1
            widths = shard_widths(state["numels"], count)
            self.memory.load_state_dict(state["memory"], widths)
            self.server_memory.load_state_dict(
                state["server_memory"], shard_widths(widths, state["world_size"] // count)
            )
            self._note(state["numels"])
        self._adopt([state])

    def load_state_dicts(
        self, states: Sequence[State], position: Position, names: Collection[str] | None
    ) -> None:
        """Restore this rank's state from those of all ranks of a saved run, of any size.

        See :meth:`Exchange.load_state_dicts`.
        """
        check_complete(states)
        if position.continues(states):
            self.load_state_dict(states[position.rank], position, names)
            return
        self._check(states, names)
        if self.memory and self.server_memory:
            numels, ranks, rank = numels_in(states), position.world_size, position.rank
            scale = len(states) / ranks if self.is_of_sums else 1.0
            if self.only_shards:
                whole = residuals_of_shards(states, self.server_memory, numels)
                widths = shard_widths(numels, ranks)
                owned = {name: cut_shard(row, rank, widths[name]) for name, row in whole.items()}
                self.memory.load_state_dict({})
                merged = self.server_memory.merge([], owned, widths, scale=scale)
                self.server_memory.load_state_dict(merged, widths)
            else:
                merged = merge_memories(states, self.memory, self.server_memory, scale)
                widths, count = numels, position.ranks_per_node
                if count is not None:
                    merged = cut_memory(merged, self.memory, numels, rank % count, count)
                    widths = shard_widths(numels, count)
                self.memory.load_state_dict(merged, widths)
                self.server_memory.load_state_dict({})
            self._note(numels)
        self._adopt(states)

    def _check(self, states: Sequence[State], names: Collection[str] | None) -> None:
        for state in states:
            check_memory(state, self.memory, names)
            if self.provenance:
                self.provenance.check(state.get("provenance"))

    def _adopt(self, states: Sequence[State]) -> None:
        for state in states if self.provenance else ():
            assert self.provenance
            self.provenance.adopt(state["provenance"])
        self.step = self.loaded_at = states[0]["step"]
        self.loaded_from = states[0]["run"]

    def _note(self, numels: Mapping[str, int]) -> None:
        # In place: the buckets add to the same dictionary.
        self.numels.clear()
        self.numels.update(numels)

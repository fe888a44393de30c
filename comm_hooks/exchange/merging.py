"""Merge the residuals that all ranks of a run saved, for another number of ranks or nodes."""

from collections.abc import Mapping, Sequence

import torch

from comm_hooks.exchange.saved_state import State
from comm_hooks.exchange.shards import shard_width
from comm_hooks.memory.base import Memory

Vectors = dict[str, torch.Tensor]


def numels_in(states: Sequence[State]) -> dict[str, int]:
    """Return the number of elements of each parameter that occurs in the saved states."""
    return {name: numel for state in states for name, numel in state["numels"].items()}


def shard_widths(numels: Mapping[str, int], count: int) -> dict[str, int]:
    """Return the number of elements of one of ``count`` equal shards of each parameter."""
    return {name: shard_width(numel, count) for name, numel in numels.items()}


def merge_memories(
    states: Sequence[State], memory: Memory, server_memory: Memory, scale: float
) -> Vectors:
    """Return the merged error-feedback state of all ranks of a run, for every rank of a new run.

    Args:
        states: the states that all ranks of the run saved, in rank order.
        memory, server_memory: error-feedback memories of the saved classes, for the vectors of a
            rank and for the shard that it owns.
        scale: the factor by which the residual of the mean over ranks is multiplied.

    Raises:
        ValueError: if a memory of another class or with other settings saved the states.
    """
    numels = numels_in(states)
    count = states[0].get("ranks_per_node")
    if count is None:
        return _merge(states, memory, server_memory, numels, scale)
    # Ranks at the same place in their node have the same shard of each parameter.
    widths = shard_widths(numels, count)
    merged = (
        _merge(states[place::count], memory, server_memory, widths, scale) for place in range(count)
    )
    shards = [memory.vectors(state, widths) for state in merged]
    return memory.stored(_joined(shards, memory, numels))


def cut_memory(
    state: Mapping[str, torch.Tensor],
    memory: Memory,
    numels: Mapping[str, int],
    place: int,
    ranks_per_node: int,
) -> Vectors:
    """Return the shard of a merged error-feedback state for the rank at ``place`` in each node.

    Args:
        state: the result of :func:`merge_memories`.
        memory: an error-feedback memory of the saved class.
        numels: the number of elements of each whole parameter.
        place, ranks_per_node: see :class:`~comm_hooks.exchange.routes.hierarchical.Hierarchical`.
    """
    widths = shard_widths(numels, ranks_per_node)
    cut = {
        key: cut_shard(row, place, widths[_parameter(key, memory)])
        for key, row in memory.vectors(state, numels).items()
    }
    return memory.stored(cut)


def cut_shard(vector: torch.Tensor, place: int, width: int) -> torch.Tensor:
    """Return shard number ``place`` of a vector, padded with zeros to ``width`` elements."""
    shard = vector[place * width : (place + 1) * width]
    return torch.nn.functional.pad(shard, (0, width - len(shard)))


def residuals_of_shards(
    states: Sequence[State], server_memory: Memory, numels: Mapping[str, int]
) -> Vectors:
    """Return each parameter's residual, (numel,), float32, joined from those of its shards."""
    # Rank j owned the j-th of as many equal ranges of each parameter.
    widths = shard_widths(numels, len(states))
    shards = [server_memory.vectors(state["server_memory"], widths) for state in states]
    return _joined(shards, server_memory, numels)


def _merge(
    states: Sequence[State],
    memory: Memory,
    server_memory: Memory,
    numels: Mapping[str, int],
    scale: float,
) -> Vectors:
    of_shards = residuals_of_shards(states, server_memory, numels)
    return memory.merge([state["memory"] for state in states], of_shards, numels, scale=scale)


def _joined(shards: Sequence[Vectors], memory: Memory, numels: Mapping[str, int]) -> Vectors:
    """Return vectors joined from equal shards; a vector that a shard lacks is zero there."""
    joined = {}
    for key in dict.fromkeys(key for shard in shards for key in shard):
        numel = numels[_parameter(key, memory)]
        empty = torch.zeros(shard_width(numel, len(shards)), dtype=torch.float32)
        joined[key] = torch.cat([shard.get(key, empty) for shard in shards])[:numel]
    return joined


def _parameter(key: str, memory: Memory) -> str:
    (name,) = memory.parameters_in({key: torch.empty(0, dtype=torch.float32)})
    return name

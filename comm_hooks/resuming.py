"""What a rank may load: its own state, or those of all ranks of a run that had another number."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from comm_hooks.memory.base import Memory, Remainder

State = Mapping[str, Any]


def check_own(state: State, rank: int, world_size: int) -> None:
    """Raise ``ValueError`` unless ``state`` was saved by this rank of as many ranks."""
    for setting, value in {"rank": rank, "world_size": world_size}.items():
        if state.get(setting) != value:
            raise ValueError(
                f"this state was saved with {setting} {state.get(setting)}, but this is "
                f"{setting} {value}: every rank loads the state that it saved itself, or, on "
                "another number of ranks, those of all ranks with load_state_dicts()"
            )


def check_memory(state: State, memory: Memory | None) -> None:
    """Raise ``ValueError`` if only one of state and exchange has a memory."""
    if ("memory" in state) != (memory is not None):
        raise ValueError(
            "the state was saved "
            + ("with" if "memory" in state else "without")
            + " a memory, but this exchange is configured the other way"
        )


def check_complete(states: Sequence[State]) -> None:
    """Raise ``ValueError`` unless ``states`` are those of all ranks, in order, at one step."""
    if not states:
        raise ValueError("no states were given: pass those of all ranks that saved one")
    ranks, sizes = [s.get("rank") for s in states], {s.get("world_size") for s in states}
    if ranks != list(range(len(states))) or sizes != {len(states)}:
        raise ValueError(
            f"the states must be those of all ranks in rank order, got ranks {ranks} of "
            f"{', '.join(map(str, sizes))}"
        )
    steps = [state["step"] for state in states]
    if len(set(steps)) > 1:
        raise ValueError(f"the states were saved at different steps: {steps}")


def merge_memories(
    states: Sequence[State], memory: Memory, server_memory: Remainder
) -> dict[str, torch.Tensor]:
    """Return the memory that each of any number of ranks goes on with, given complete states.

    Raises:
        ValueError: if the states are of another kind of memory.
    """
    numels: dict[str, int] = {}
    for state in states:
        numels.update(state["numels"])
    # Rank j's server memory is about the j-th of as many equal ranges of each parameter.
    widths = {name: -(-numel // len(states)) for name, numel in numels.items()}
    shards = [server_memory.vectors(state["server_memory"], widths) for state in states]
    unsent = {
        name: torch.cat(
            [shard[name] if name in shard else torch.zeros(widths[name]) for shard in shards]
        )[: numels[name]]
        for name in dict.fromkeys(name for shard in shards for name in shard)
    }
    return memory.merge([state["memory"] for state in states], unsent, numels)

"""The format of a saved exchange, and the checks that a state passes before it is loaded."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from comm_hooks.checkpoints.sealing import SEAL, require_seal, sealed
from comm_hooks.memory.base import Memory

State = Mapping[str, Any]


@dataclass(frozen=True)
class Position:
    """The place of a rank among the ranks that exchange; saved with a state.

    Args:
        rank, world_size: the rank and the number of ranks of the transport.
        collective: the collective in the settings of the exchange.
        ranks_per_node: None unless the collective is ``"hierarchical"``.
        can_shard: whether a round may divide vectors into shards.
    """

    rank: int
    world_size: int
    collective: str
    ranks_per_node: int | None
    can_shard: bool

    def saved(self) -> dict[str, Any]:
        """Return the part of a saved state that describes the position."""
        state: dict[str, Any] = {
            "rank": self.rank,
            "world_size": self.world_size,
            "collective": self.collective,
        }
        if self.collective == "hierarchical":
            state["ranks_per_node"] = self.ranks_per_node
        return state

    def sends_residuals_of(self, state: State) -> bool:
        """Return whether rounds of this run send the shard residuals in ``state``, if it has any.

        ``"auto"`` and ``"hierarchical"`` do not always divide vectors into shards; an exchange that
        has done it under a setting does it again under the same setting.
        """
        if not state.get("server_memory") or self.collective == "sharded":
            return True
        return self.collective == state.get("collective") and self.can_shard

    def continues(self, states: Sequence[State]) -> bool:
        """Return whether each rank of this run can load the state that the same rank saved."""
        return all(
            self.sends_residuals_of(state)
            and state.get("world_size") == self.world_size
            and state.get("ranks_per_node") == self.ranks_per_node
            for state in states
        )


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 63


def _is_name(value: object) -> bool:
    return isinstance(value, str)


def _is_mapping(value: object) -> bool:
    return isinstance(value, Mapping)  # the memory or the provenance checks the content


def _are_numels(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(name, str) and _is_count(numel) and numel for name, numel in value.items()
    )


def _are_buckets(value: object) -> bool:
    return isinstance(value, list | tuple) and all(
        isinstance(bucket, list | tuple) and all(map(_is_name, bucket)) for bucket in value
    )


# The keys of an exchange or a hook: a test of each value, and its name in messages.  Optimizers and
# engines save more under other keys.
_SCHEMA: dict[str, tuple[Callable[[object], bool], str]] = {
    "step": (_is_count, "a number of steps"),
    "rank": (_is_count, "a rank"),
    "world_size": (_is_count, "a number of ranks"),
    "collective": (_is_name, "a name"),
    "run": (_is_name, "a name"),
    "ranks_per_node": (lambda value: _is_count(value) and bool(value), "a number of ranks"),
    "memory_type": (_is_name, "a name"),
    "memory": (_is_mapping, "a dictionary of vectors"),
    "server_memory": (_is_mapping, "a dictionary of vectors"),
    "numels": (_are_numels, "a dictionary of numbers of elements"),
    "buckets": (_are_buckets, "lists of names"),
    "provenance": (_is_mapping, "a dictionary"),
}
_ALWAYS = ("step", "rank", "world_size", "collective", "run")
_WITH_MEMORY = ("memory_type", "memory", "server_memory", "numels")


def seal_own(state: State) -> dict[str, Any]:
    """Return a state with a seal, a checksum of its values that belong to the exchange."""
    return {**state, SEAL: sealed({key: state[key] for key in _SCHEMA if key in state})[SEAL]}


def check_whole(state: object) -> None:
    """Raise ``ValueError`` unless a state has the keys, types and checksum of a saved exchange."""
    if not isinstance(state, Mapping):
        raise ValueError(
            f"the state must be what state_dict() returned, got {type(state).__name__}"
        )
    require_seal({key: state[key] for key in (*_SCHEMA, SEAL) if key in state})
    needed = _ALWAYS + _WITH_MEMORY * ("memory" in state)
    for key, (fits, words) in _SCHEMA.items():
        if key in needed and key not in state:
            raise ValueError(
                f"the state is not one of an exchange: it has no {key}; load what state_dict() of "
                "an exchange, hook or optimizer returned"
            )
        if key in state and not fits(state[key]):
            raise ValueError(
                f"the state is not one of an exchange: its {key} must be {words}, got "
                f"{type(state[key]).__name__}"
            )


def check_own(state: State, position: Position) -> None:
    """Raise ``ValueError`` unless a rank at this position saved the state."""
    for setting in ("rank", "world_size", "ranks_per_node"):
        value = getattr(position, setting)
        if state.get(setting) != value:
            raise ValueError(
                f"this state was saved with {setting} {state.get(setting)}, but this is "
                f"{setting} {value}: every rank loads the state that it saved itself, or, on "
                "another number of ranks or nodes, those of all ranks with load_state_dicts()"
            )
    if not position.sends_residuals_of(state):
        raise ValueError(
            "the state has residuals of shards, and was saved with "
            f"collective={state['collective']!r}: {position.collective!r} may have no shards, so "
            "load the states of all ranks with load_state_dicts()"
        )


def check_memory(state: State, memory: Memory | None, known: Collection[str] | None) -> None:
    """Raise ``ValueError`` if an error-feedback memory cannot load the residuals in a state.

    Args:
        memory: the memory; None in an exchange without error feedback.
        known: the names of all parameters; None if they are unknown.
    """
    if ("memory" in state) != (memory is not None):
        raise ValueError(
            "the state was saved "
            + ("with" if "memory" in state else "without")
            + " a memory (residuals), but this exchange is configured the other way: set memory to "
            "what it was when the state was saved"
        )
    if memory is None:
        return
    here = type(memory).__name__
    if state["memory_type"] != here:
        raise ValueError(
            f"the state was saved with {state['memory_type']!r}, but this exchange has {here!r}, "
            "which cannot load its residuals: set memory to what it was when the state was saved"
        )
    memory.check(state["memory"])
    memory.for_server().check(state["server_memory"])
    strangers = memory.parameters_in(state["memory"]) - set(known if known is not None else ())
    if known is not None and strangers:
        raise ValueError(
            "the state has residuals of parameters that this model does not have: "
            f"{', '.join(sorted(strangers)[:3])}; load a state of this model"
        )
    for name, row in state["memory"].items():
        if row.is_floating_point() and not row.isfinite().all():
            raise ValueError(
                f"the error-feedback residual of {name!r} is not finite, and would make all "
                "gradients NaN for ever: load an older state"
            )


def check_complete(states: Sequence[State]) -> None:
    """Raise ``ValueError`` unless the states of all ranks are given, in rank order, of one step."""
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
        raise ValueError(f"load the states of one run, not with different ranks_per_node: {counts}")
    if any(count and len(states) % count for count in counts):
        raise ValueError(
            f"the states are of {len(states)} ranks, which nodes of {counts.pop()} cannot have "
            "been: load the states of all ranks of one save"
        )
    steps = [state["step"] for state in states]
    if len(set(steps)) > 1:
        raise ValueError(
            f"the states were saved at different steps: {steps}; load those of one step"
        )
    if len({state["run"] for state in states}) > 1:
        raise ValueError("the states are of different runs: load those that one run has saved")

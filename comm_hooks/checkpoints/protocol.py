"""The protocol of objects with a state that every rank saves for itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from comm_hooks.collectives.model_parallel import gather_from_all


class RankState(Protocol):
    """An object with a state that differs between ranks, so that every rank saves its own.

    :class:`~comm_hooks.Exchange`, :class:`~comm_hooks.CompressionState`,
    :class:`~comm_hooks.optim.LocalRounds` and
    :class:`~comm_hooks.checkpoints.optimizer_state.OptimizerState` implement it.  None of the three
    methods uses a collective.
    """

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank as plain values and tensors, with its ``step``."""

    def load_state_dict(self, state: Mapping[str, Any], /) -> None:
        """Restore the state that this rank saved; raise ``ValueError`` if it does not fit."""

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]], /) -> None:
        """Restore all ranks' saved states, in rank order; ``ValueError`` if they do not fit."""


CARRIED = "comm_hooks"
"""The key in the first group of a saved optimizer that :func:`comm_hooks.replace` returned.

The group has the whole state under it, so that an AdamW that loads the state keeps all of it.
"""


def whole_state(saved: dict[str, Any]) -> dict[str, Any]:
    """Return the whole state that the first group of a saved optimizer carries, or the state."""
    groups = saved.get("param_groups")
    return groups[0].get(CARRIED, saved) if groups else saved


def exchange_of(state: Any) -> Any:
    """Return the exchange of a :class:`RankState`: its ``exchange``, or the object itself."""
    return getattr(state, "exchange", state)


def has_clients(state: Any) -> bool:
    """Return whether ranks run several clients in turn, so that their step counts may differ."""
    return getattr(state, "participation", None) is not None


def local_steps(state: Any) -> int | None:
    """Return the number of local steps taken; None without any, or if ranks may differ in it."""
    return None if has_clients(state) else getattr(state, "steps", None)


def gather_findings(state: RankState, finding: Any) -> list[Any]:
    """Return the values of ``finding`` on all ranks of the run, in the same order on all ranks.

    Ranks that hold other parts of a sharded model (``model_parallel_groups`` of the state or of the
    owner of its exchange) are included: a checkpoint is restored as a whole or not at all.

    Args:
        finding: the plain values of this rank.
    """
    exchange = exchange_of(state)
    owner = state if hasattr(state, "model_parallel_groups") else exchange.owner
    return gather_from_all(exchange.transport, getattr(owner, "model_parallel_groups", ()), finding)

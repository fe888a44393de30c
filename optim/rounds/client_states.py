"""The residuals and inner optimizer states of a rank's clients, kept between their turns."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from comm_hooks.memory.base import Memory
from comm_hooks.optim.base import parameters_of


class ClientStates:
    """The residual and the inner optimizer's state of every client that this rank runs.

    A round works on copies, which replace the states at its end (:meth:`commit`), or are dropped
    (:meth:`discard`): so a saved or loaded state stays as it was.

    Args:
        inner: the optimizer of all clients; its state is replaced at every turn.
        memory: the template of each client's error-feedback memory; None without error feedback.
        keep_inner: whether a client's inner optimizer state is kept until its next turn.
    """

    def __init__(self, inner: Optimizer, memory: Memory | None, *, keep_inner: bool) -> None:
        self._inner = inner
        self._template = memory
        self._keep_inner = keep_inner
        self._states: dict[int, dict[Any, Any]] = {}
        self._memories: dict[int, Memory] = {}
        self._new_states: dict[int, dict[Any, Any]] = {}
        self._new_memories: dict[int, Memory] = {}

    def enter(self, client: int) -> None:
        """Replace the inner optimizer's state by a copy of this client's."""
        kept = self._states.get(client, {})
        self._inner.state.clear()
        self._inner.state.update({p: _copied(state, p.device) for p, state in kept.items()})

    def leave(self, client: int, *, keep: bool) -> None:
        """Store the inner optimizer's state as this client's if ``keep``; clear it in any case."""
        self._new_states[client] = dict(self._inner.state) if self._keep_inner and keep else {}
        # Between turns the optimizer must not show the last client's.
        self._inner.state.clear()

    def memory(self, client: int) -> Memory | None:
        """Return this client's error-feedback memory for this round; None without any."""
        if self._template is None:
            return None
        if client not in self._new_memories:
            kept = self._memories.get(client)
            self._new_memories[client] = copy.deepcopy(kept) if kept else self._template.fresh()
        return self._new_memories[client]

    def commit(self) -> None:
        """Store the states that the clients have at the end of a round."""
        self._memories.update(self._new_memories)
        self._states.update(self._new_states)
        self._states = {client: state for client, state in self._states.items() if state}
        self._end_round()

    def discard(self) -> None:
        """Drop the states of the current round, and keep those before it."""
        self._inner.state.clear()
        self._end_round()

    def _end_round(self) -> None:
        self._new_states, self._new_memories = {}, {}

    def state_dict(self) -> dict[int, dict[str, Any]]:
        """Return each client's inner optimizer state, by parameter index, and its residuals."""
        places = {p: place for place, p in enumerate(parameters_of(self._inner.param_groups))}
        return {
            client: {
                "inner": {
                    places[parameter]: dict(state)
                    for parameter, state in self._states.get(client, {}).items()
                },
                "memory": self._memories[client].state_dict() if client in self._memories else {},
            }
            for client in sorted({*self._states, *self._memories})
        }

    def load_state_dict(self, state: Mapping[int, Mapping[str, Any]]) -> None:
        """Replace all states by the result of :meth:`state_dict`.

        Raises:
            ValueError: if residuals were saved by another class of memory; nothing is changed.
        """
        parameters = parameters_of(self._inner.param_groups)
        memories: dict[int, Memory] = {}
        for client, saved in state.items():
            if self._template and saved["memory"]:
                memories[client] = self._template.fresh()
                memories[client].load_state_dict(saved["memory"])
        self._memories = memories
        self._states = {
            client: {parameters[place]: dict(own) for place, own in saved["inner"].items()}
            for client, saved in state.items()
            if saved["inner"]
        }


def _copied(state: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Return a copy of a parameter's state on ``device``; scalars stay on their own device."""
    return {
        key: value.to(device, copy=True)
        if isinstance(value, torch.Tensor) and value.dim()
        else copy.deepcopy(value)
        for key, value in state.items()
    }

"""What every rank saves of an optimizer that owns its exchange."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from comm_hooks.exchange import Exchange
from comm_hooks.shards import whole
from comm_hooks.wire.checksum import fingerprint
from comm_hooks.wire.stamp import digest

Tensors = Sequence[torch.Tensor]


class OptimizerState:
    """The state of an exchanging optimizer that every rank saves for itself.

    That is its exchange's, and what of the optimizer's own differs between ranks: all of it where
    ranks hold parts of the parameters (FSDP2).  The model and the optimizer's ``state_dict()``,
    equal on all ranks, are saved once and loaded *before* this, which makes sure that they are
    those that it was saved with.

    Args:
        optimizer: a :class:`~comm_hooks.optim.exchanging.ExchangingOptimizer`.
        set_parameters: gives the model the values of the optimizer's parameters; by default they
            are the model's.

    Example::

        >>> import tempfile
        >>> from comm_hooks import Exchange, Sign, skip_hook
        >>> from comm_hooks.checkpoints.optimizer_state import OptimizerState
        >>> from comm_hooks.checkpoints.rank_files import load_rank_files, save_rank_file
        >>> from comm_hooks.optim import LocalVarianceAdam
        >>> ddp_model.register_comm_hook(None, skip_hook)
        >>> state = OptimizerState(LocalVarianceAdam(model.named_parameters(), Exchange(Sign())))
        >>> with tempfile.TemporaryDirectory() as checkpoint:
        ...     save_rank_file(state, checkpoint)
        ...     load_rank_files(state, checkpoint)
        True
    """

    def __init__(
        self, optimizer: Any, set_parameters: Callable[[Tensors], None] | None = None
    ) -> None:
        self.optimizer = optimizer
        self._set_parameters = set_parameters or self._set_own_parameters

    @property
    def exchange(self) -> Exchange:
        """The optimizer's."""
        exchange: Exchange = self.optimizer.exchange
        return exchange

    def stats(self) -> dict[str, float]:
        """Return what this rank moved; see :meth:`~comm_hooks.Exchange.stats`."""
        return self.exchange.stats()

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank must save; plain values and tensors."""
        return {**self.exchange.state_dict(), "optimizer": self.own()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what this rank saved, or raise ``ValueError``, without a collective."""
        self.check([state["optimizer"]])
        self.exchange.load_state_dict(state)
        self.load_own(state["optimizer"])

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restore what the ranks of a run with any number of them saved, without a collective."""
        if len(states) == self.exchange.transport.world_size:
            own = states[self.exchange.transport.rank]["optimizer"]
            self.check([own])
            self.exchange.load_state_dicts(states)
            self.load_own(own)
        else:
            parts = [state["optimizer"] for state in states]
            self.check(parts)
            self.exchange.load_state_dicts(states)
            self.load_parts(parts)

    def own(self) -> dict[str, Any]:
        """Return what of the optimizer differs between ranks, and a checksum of all the rest."""
        optimizer = self.optimizer
        state: dict[str, Any] = {"type": type(optimizer).__name__, "checksum": self._checksum()}
        if not optimizer.is_synchronized:
            state["optimizer"] = optimizer.state_dict()
            state["parameters"] = [p.detach() for p in self._parameters()]
        elif self._has_shards():
            state["optimizer"] = optimizer.state_dict()
        if keys := optimizer.own_state:
            states = [optimizer.state[p] for p in self._parameters()]
            state["own"] = [{key: s[key] for key in keys if key in s} for s in states]
        return state

    def load_own(self, own: Mapping[str, Any]) -> None:
        """Restore what :meth:`own` returned on this rank."""
        if "optimizer" in own:
            self.optimizer.load_state_dict(own["optimizer"])
        if "parameters" in own:
            self._set_parameters(own["parameters"])
        self._set_own(own.get("own", []))

    def load_parts(self, parts: Sequence[Mapping[str, Any]]) -> None:
        """Restore what :meth:`own` returned on another number of ranks, in rank order.

        What was each rank's own starts from the mean.
        """
        if "optimizer" in parts[0]:
            self.optimizer.load_state_dict(parts[0]["optimizer"])
        self._set_own(
            [_mean(saved) for saved in zip(*(p.get("own", []) for p in parts), strict=True)]
        )

    def check(self, parts: Sequence[Mapping[str, Any]]) -> None:
        """Raise ``ValueError`` unless this model and optimizer are those that were saved.

        Args:
            parts: what :meth:`own` returned, on this rank or on all of another number of ranks.
        """
        here = type(self.optimizer).__name__
        if others := sorted({str(part.get("type")) for part in parts} - {here}):
            raise ValueError(f"it was saved by {', '.join(others)}, not by {here}")
        if "parameters" in parts[0] and len(parts) == 1:
            return  # which brings all of it along
        if any("parameters" in part for part in parts):
            raise ValueError(
                f"it was saved between synchronizations, when its {len(parts)} ranks had different "
                "parameters: load it on as many ranks, call synchronize() on the optimizer, and "
                "save"
            )
        checksum = self._checksum()
        first = self.exchange.transport.rank if len(parts) == 1 else 0
        wrong = [str(i) for i, part in enumerate(parts, first) if part["checksum"] != checksum]
        if wrong:
            raise ValueError(
                f"the model and the optimizer are not those that rank {', '.join(wrong)} had when "
                "it saved: load them first, and from the same checkpoint"
            )

    def _parameters(self) -> list[torch.Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _has_shards(self) -> bool:
        """Return whether parameters are parts of sharded ones, which no other rank here holds."""
        return any(whole(p) is not p for p in self._parameters())

    def _checksum(self) -> int:
        """Return a fingerprint of what is loaded before this: what ranks share."""
        parameters = self._parameters()
        tensors = [p.detach() for p in parameters]
        for parameter in [] if self._has_shards() else parameters:
            state = self.optimizer.state.get(parameter, {})
            shared = (t for key, t in state.items() if key not in self.optimizer.own_state)
            tensors += filter(torch.is_tensor, shared)
        # Counters of steps are on the CPU, wherever parameters are.
        by_device: dict[torch.device, list[torch.Tensor]] = {}
        for tensor in tensors:
            by_device.setdefault(tensor.device, []).append(tensor)
        return digest([int(fingerprint(group)) for group in by_device.values()])

    def _set_own_parameters(self, values: Tensors) -> None:
        with torch.no_grad():
            for parameter, value in zip(self._parameters(), values, strict=True):
                parameter.copy_(value)

    def _set_own(self, own: Sequence[Mapping[str, torch.Tensor]]) -> None:
        for parameter, saved in zip(self._parameters(), own, strict=bool(own)):
            for key, value in saved.items():
                self.optimizer.state[parameter][key] = value.to(parameter.device, copy=True)


def _mean(saved: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {key: torch.stack([s[key] for s in saved]).mean(0) for key in saved[0]}

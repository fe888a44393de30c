"""The state of an optimizer with an exchange that every rank saves for itself."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from comm_hooks.shards import whole
from comm_hooks.wire.checksum import fingerprint
from comm_hooks.wire.stamp import digest

Tensors = Sequence[torch.Tensor]


class OptimizerState:
    """Saves the exchange of an optimizer, and the part of its state that differs between ranks.

    All of the optimizer's state differs where ranks hold parts of the parameters (FSDP2).  Save the
    model and the optimizer's ``state_dict()``, equal on all ranks, once, and load them *before*
    this state: a checksum compares them with the model and the optimizer at the save.

    Args:
        optimizer: a :class:`~comm_hooks.optim.exchanging.ExchangingOptimizer`.
        set_parameters: copies values of the optimizer's parameters to the model; by default the
            optimizer's parameters are the model's.

    Example::

        >>> from comm_hooks import Exchange, Sign, skip_hook
        >>> from comm_hooks.checkpoints.optimizer_state import OptimizerState
        >>> from comm_hooks.optim import LocalVarianceAdam
        >>> ddp_model.register_comm_hook(None, skip_hook)
        >>> state = OptimizerState(LocalVarianceAdam(model.named_parameters(), Exchange(Sign())))
        >>> state.load_state_dict(state.state_dict())
    """

    def __init__(
        self, optimizer: Any, set_parameters: Callable[[Tensors], None] | None = None
    ) -> None:
        self.optimizer = optimizer
        self._set_parameters = set_parameters or self._set_own_parameters

    @property
    def exchange(self) -> Any:
        """The :class:`~comm_hooks.Exchange` of the optimizer."""
        return self.optimizer.exchange

    def stats(self) -> dict[str, float]:
        """Return the traffic of this rank; see :meth:`~comm_hooks.Exchange.stats`."""
        stats: dict[str, float] = self.exchange.stats()
        return stats

    def state_dict(self) -> dict[str, Any]:
        """Return the exchange's state and this rank's part of the optimizer's state."""
        return {**self.exchange.state_dict(), "optimizer": self._part()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore this rank's state; ``ValueError`` if model or optimizer differ from the save."""
        self._check([state["optimizer"]])
        self.exchange.load_state_dict(state)
        self._load([state["optimizer"]])

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restore the states of all ranks that saved, on any number of ranks.

        On another number of ranks the tensors that differ between ranks start from their mean.
        """
        transport = self.exchange.transport
        same = len(states) == transport.world_size
        parts = [s["optimizer"] for s in ([states[transport.rank]] if same else states)]
        self._check(parts)
        self.exchange.load_state_dicts(states)
        self._load(parts)

    def _part(self) -> dict[str, Any]:
        """Return the optimizer's state that differs between ranks, and a checksum of the rest."""
        optimizer = self.optimizer
        state: dict[str, Any] = {"type": type(optimizer).__name__, "checksum": self._checksum()}
        if not optimizer.is_synchronized:
            state["optimizer"] = optimizer.state_dict()
            values = [p.detach() for p in self._parameters()]
            state["parameters"] = dict(zip(self._names(), values, strict=True))
        elif self._has_shards():
            state["optimizer"] = optimizer.state_dict()
        if keys := optimizer.own_state:
            states = [optimizer.state[p] for p in self._parameters()]
            own = [{key: s[key] for key in keys if key in s} for s in states]
            state["own"] = dict(zip(self._names(), own, strict=True))
        return state

    def _load(self, parts: Sequence[Mapping[str, Any]]) -> None:
        """Restore one rank's :meth:`_part`, or the mean of the parts of all ranks that saved."""
        first, names = parts[0], self._names()
        if "optimizer" in first:
            self.optimizer.load_state_dict(first["optimizer"])
        if "parameters" in first:
            self._set_parameters([first["parameters"][name] for name in names])
        for name, parameter in zip(names, self._parameters(), strict=True):
            saved = [part["own"][name] for part in parts if "own" in part]
            for key, value in _mean(saved).items():
                self.optimizer.state[parameter][key] = value.to(parameter.device, copy=True)

    def _check(self, parts: Sequence[Mapping[str, Any]]) -> None:
        """Raise ``ValueError`` unless the parts were saved with this model and this optimizer."""
        here = type(self.optimizer).__name__
        if others := sorted({str(part.get("type")) for part in parts} - {here}):
            raise ValueError(f"{here}: the state was saved by {others[0]}: load it into that class")
        if "parameters" in parts[0] and len(parts) == 1:
            return  # it has the parameters and the optimizer
        if any("parameters" in part for part in parts):
            raise ValueError(
                f"{here}: the state was saved between synchronizations, when its {len(parts)} "
                "ranks had different parameters: load it on as many ranks, call synchronize() on "
                "the optimizer, and save"
            )
        checksum = self._checksum()
        first = self.exchange.transport.rank if len(parts) == 1 else 0
        wrong = [str(i) for i, part in enumerate(parts, first) if part["checksum"] != checksum]
        if wrong:
            raise ValueError(
                f"{here}: the model and the optimizer are not those that rank {', '.join(wrong)} "
                "had when it saved: load them first, and from the same checkpoint"
            )

    def _parameters(self) -> list[torch.Tensor]:
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _names(self) -> list[str]:
        names = [n for group in self.optimizer.param_groups for n in group.get("param_names", ())]
        count = len(self._parameters())
        return names if len(names) == count else [str(index) for index in range(count)]

    def _has_shards(self) -> bool:
        """Return whether any of the optimizer's parameters is the local part of a DTensor."""
        return any(whole(p) is not p for p in self._parameters())

    def _checksum(self) -> int:
        """Return a fingerprint of the parameters and the optimizer's state that ranks share."""
        of_name = dict(zip(self._names(), self._parameters(), strict=True))
        parameters = [of_name[name] for name in sorted(of_name)]
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


def _mean(saved: Sequence[Mapping[str, torch.Tensor]]) -> Mapping[str, torch.Tensor]:
    if len(saved) < 2:
        return saved[0] if saved else {}
    return {key: torch.stack([s[key] for s in saved]).mean(0) for key in saved[0]}

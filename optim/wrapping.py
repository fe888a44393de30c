"""The base class of optimizers that wrap another optimizer."""

import inspect
from collections import defaultdict
from typing import Any, NoReturn

import torch
from torch.optim import Optimizer

from comm_hooks.optim.base import SteppingOptimizer


class WrappingOptimizer(SteppingOptimizer):
    """An optimizer that extends the step of an inner optimizer and shows its groups and state.

    So a scheduler of this optimizer sets the learning rates of the inner optimizer, and code that
    requires an optimizer (Accelerate, Lightning, a ``GradScaler``, hooks before and after steps,
    the profiler) accepts it.  ``load_state_dict`` may replace the inner optimizer's groups and
    state: both are looked up at every use.

    Args:
        inner: the wrapped optimizer, over the same parameters.

    Raises:
        ValueError: for an inner optimizer that needs a closure, as ``LBFGS`` does.

    Not supported: adding parameters after construction; copies.
    """

    _compiles = False

    def __init__(self, inner: Optimizer) -> None:
        closure = inspect.signature(type(inner).step).parameters.get("closure")
        if closure is not None and closure.default is inspect.Parameter.empty:
            raise ValueError(
                f"{type(self).__name__}: {type(inner).__name__} computes gradients several times "
                "in a step, which is not supported: use an inner optimizer that computes them "
                "once per step, such as AdamW"
            )
        self.inner = inner
        # Not Optimizer.__init__, which makes groups and a state.  All else an optimizer gets, too,
        # when it comes out of a pickle without them.
        self.__setstate__({})

    def __getstate__(self) -> NoReturn:
        self._refuse_copies()

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The parameter groups of the inner optimizer."""
        return self.inner.param_groups

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:  # type: ignore[override]
        """The state of the inner optimizer, by parameter."""
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The default hyperparameters of the inner optimizer."""
        return self.inner.defaults

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parameters."""
        self.inner.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> NoReturn:
        """Raise ``ValueError``: no parameters can be added after construction."""
        raise ValueError(
            f"{type(self).__name__}: parameters cannot be added: make a new inner optimizer of all "
            f"parameters, and a new {type(self).__name__}"
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state to save: plain numbers and tensors."""
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        state = self._state_to_save()
        for after in self._optimizer_state_dict_post_hooks.values():
            replaced = after(self, state)
            state = state if replaced is None else replaced
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`."""
        state = dict(state_dict)
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            replaced = before(self, state)
            state = state if replaced is None else replaced
        self._restore(state)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)

    def _state_to_save(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def _restore(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)

"""What optimizers have in common that update parameters together, not one after the other."""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, overload

import torch

from comm_hooks.optim.exact_state import ExactStateOptimizer
from comm_hooks.optim.hyperparameters import check_gradient


class BatchedOptimizer(ExactStateOptimizer):
    """An optimizer that updates parameters of one device and dtype together.

    A subclass implements :meth:`_check_group` and :meth:`_update`.  Parameters without a gradient
    stay as they are.
    """

    @abstractmethod
    def _check_group(self, settings: dict[str, Any]) -> None:
        """Raise ``ValueError`` for hyperparameters of a parameter group that are out of range."""

    @abstractmethod
    def _update(self, parameters: list[torch.Tensor], group: dict[str, Any]) -> None:
        """Update parameters of one device and dtype, all of which have a gradient."""

    def _check_step(self, gradients: Sequence[torch.Tensor]) -> None:
        """Raise for what makes a step impossible; called before it changes anything."""
        for gradient in gradients:
            check_gradient(self, gradient)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters, with hyperparameters of its own or else the defaults.

        Raises:
            ValueError: for hyperparameters out of range; nothing is changed.
        """
        self._check_group({key: param_group.get(key, self.defaults[key]) for key in self.defaults})
        super().add_param_group(param_group)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take a step with the parameters that have a gradient; the others stay as they are.

        Args:
            closure: computes the gradients anew and returns the loss.

        Raises:
            ValueError: for sparse or complex gradients; nothing is changed.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work = [
            (group, [p for p in group["params"] if p.grad is not None])
            for group in self.param_groups
        ]
        self._check_step([p.grad for _, parameters in work for p in parameters])
        for group, parameters in work:
            alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
            for parameter in parameters:
                alike.setdefault((parameter.device, parameter.dtype), []).append(parameter)
            for members in alike.values():
                self._update(members, group)
        return loss


def widened(tensors: Sequence[torch.Tensor | None], dtype: torch.dtype) -> list[torch.Tensor]:
    """Return tensors in ``dtype``; no copies where they have it already."""
    return [tensor.to(dtype) for tensor in tensors if tensor is not None]


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a parameter of ``dtype`` is computed: float32 or wider."""
    return torch.promote_types(dtype, torch.float32)

"""Gradients of data that nobody has to protect."""

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from comm_hooks.optim.private.batches import LossFunction
from comm_hooks.optim.private.per_sample import unwrapped
from comm_hooks.requirements import require_callable, require_kind


class PublicGradients:
    """The mean gradient of one public batch after the other, without end.

    What ``public_gradients`` of :class:`~comm_hooks.optim.private.AdaDPS` and the baselines calls
    once per step.  ``p.grad`` and the hooks of DDP are left alone.

    Ranks must see the same batches: let the loader shuffle with a generator whose seed they share.
    The data must be public, and similar to the private data; 1 % as much is enough in the paper's
    experiments (Li et al., ICML 2022, Table 10).

    Args:
        model: the one that is trained; may be a ``DistributedDataParallel``.
        loss_function: of the model, unwrapped, and a batch; returns the loss of each sample, or
            their mean.
        batches: public batches; iterated over again when they end.

    Raises:
        ValueError: in a call, if there are no batches.

    Example::

        >>> from comm_hooks.optim.private.public_gradients import PublicGradients
        >>> gradients = PublicGradients(
        ...     model, lambda model, batch: model(batch).square().mean(), [torch.ones(4, 8)]
        ... )
        >>> {name: tuple(gradient.shape) for name, gradient in gradients().items()}
        {'weight': (8, 8), 'bias': (8,)}
    """

    def __init__(
        self,
        model: nn.Module,
        loss_function: LossFunction,
        batches: Iterable[Any],
    ) -> None:
        require_kind(self, "model", model, nn.Module)
        require_callable(self, "loss_function", loss_function)
        require_kind(self, "batches", batches, Iterable)
        self._parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        # DDP's forward pass broadcasts buffers and prepares a reduction that would not come.
        self._module = unwrapped(model)
        self._loss_function = loss_function
        self._batches = _forever(batches)

    def __call__(self) -> dict[str, torch.Tensor]:
        """Return the gradient of the next batch by parameter name; zeros for unused parameters."""
        with torch.enable_grad():
            loss = self._loss_function(self._module, next(self._batches))
            gradients = torch.autograd.grad(
                loss.mean(), list(self._parameters.values()), materialize_grads=True
            )
        return dict(zip(self._parameters, gradients, strict=True))


def _forever(batches: Iterable[Any]) -> Iterator[Any]:
    while True:
        empty = True
        for batch in batches:
            empty = False
            yield batch
        if empty:
            raise ValueError(
                "PublicGradients: no public batches: pass a loader, or a list that can be iterated "
                "over again"
            )

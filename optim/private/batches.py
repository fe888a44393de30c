"""What all ways to per-sample gradients have in common: one loss function, one call per batch."""

from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from comm_hooks.optim.private.clipping import SampleClipper
from comm_hooks.requirements import require_callable, require_kind, require_positive

LossFunction = Callable[[nn.Module, Any], torch.Tensor]


class BatchClipper(SampleClipper):
    """Clips the gradients of a batch's samples and adds them up, one micro-batch after the other.

    Args:
        model: the one that is trained.
        loss_function: ``loss_function(model, batch)`` returns the loss of each sample, ``(B,)``.
        parameters, max_grad_norm: see :class:`~comm_hooks.optim.private.clipping.SampleClipper`.
        micro_batch_size: how many samples to pass to the loss function at a time; by default the
            whole batch.

    Raises:
        ValueError: for a setting of another kind, or out of range.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_function: LossFunction,
        parameters: list[torch.nn.Parameter],
        max_grad_norm: float,
        micro_batch_size: int | None,
    ) -> None:
        require_kind(self, "model", model, nn.Module)
        require_callable(
            self,
            "loss_function",
            loss_function,
            "; loss_function(model, batch) returns the loss of each sample",
        )
        if micro_batch_size is not None:
            require_positive(self, "micro_batch_size", micro_batch_size)
        super().__init__(parameters, max_grad_norm)
        self._model = model
        self._loss_function = loss_function
        self.micro_batch_size = micro_batch_size

    def samples_in(self, batch: Any) -> int:
        """Return the common leading dimension of a batch's tensors.

        Raises:
            ValueError: if there is none.
        """
        leaves = pytree.tree_leaves(batch)
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                raise ValueError(
                    "a batch must consist of tensors in tuples, lists and dicts, found "
                    f"{type(leaf).__name__}"
                )
        shapes = [tuple(leaf.shape) for leaf in leaves]
        if len({shape[:1] for shape in shapes}) != 1 or () in shapes:
            raise ValueError(
                f"the tensors of a batch must have a common leading dimension, got shapes {shapes}"
            )
        return int(shapes[0][0])

    def backward(self, batch: Any) -> torch.Tensor:
        """Add the clipped gradients of a batch to the sum.

        May be called several times per step.  ``p.grad`` is neither read nor written.  If a
        micro-batch fails, the step's sum starts anew.

        Args:
            batch: tensors with a common leading dimension, in tuples, lists and dicts.

        Returns:
            The mean loss, detached, a scalar: NaN for an empty batch.  It is *not* noised.

        Raises:
            ValueError: if the batch has no common leading dimension, the loss has another shape,
                or the forward pass does not use a parameter.
            PrivacyError: for what this class says it refuses.
        """
        size = self.samples_in(batch)
        if size == 0:
            return torch.full((), torch.nan, device=self.parameters[0].device)
        leaves, structure = pytree.tree_flatten(batch)
        parts = [leaf.split(self.micro_batch_size or size) for leaf in leaves]
        losses = []
        try:
            for part in zip(*parts, strict=True):
                filled = pytree.tree_unflatten(list(part), structure)
                losses.append(self._add_batch(filled, len(part[0])))
        except BaseException:
            # Who runs out of memory may try the same batch again: no sample may count twice.
            self._start()
            raise
        return torch.cat(losses).mean()

    @abstractmethod
    def _add_batch(self, batch: Any, size: int) -> torch.Tensor:
        """Add the clipped gradients of a micro-batch; return its losses, ``(size,)``, detached."""

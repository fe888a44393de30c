"""Clipping of the gradients of a batch's samples, in one micro-batch after another."""

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils import _pytree as pytree

from comm_hooks.optim.private.data.tickets import Read
from comm_hooks.optim.private.errors import PrivacyError
from comm_hooks.optim.private.gradients.alone import AloneCheck
from comm_hooks.optim.private.gradients.clipping import LossFunction, SampleClipper
from comm_hooks.optim.private.gradients.model_checks import unwritten
from comm_hooks.requirements import require_callable, require_positive


class BatchClipper(SampleClipper):
    """A base class that clips the gradients of a batch's samples in one micro-batch after another.

    Args:
        model: the model that is trained.
        loss_function: ``loss_function(model, batch)`` returns the loss of each sample, ``(B,)``.
        parameters, max_grad_norm: see :class:`SampleClipper`.
        micro_batch_size: the number of samples that the loss function receives at a time; by
            default the whole batch.

    Raises:
        ValueError: for arguments of a wrong type or out of range.
    """

    _has_hooks: ClassVar[bool] = False
    """Whether layers find gradients by hooks, which see them in training mode only."""

    def __init__(
        self,
        model: nn.Module,
        loss_function: LossFunction,
        parameters: list[torch.nn.Parameter],
        max_grad_norm: float,
        micro_batch_size: int | None,
    ) -> None:
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
        self._is_first = True
        self._check = AloneCheck(
            model,
            self._losses,
            self._differentiate,
            self.parameters,
            lambda: 0.0 if self.transform else self.max_grad_norm,  # C is of what it makes
            keeps_layers=self._has_hooks,
        )

    def samples_in(self, batch: Any) -> int:
        """Return the number of samples in a batch: the common leading dimension of its tensors."""
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

    def backward(self, batch: Any, read: Read | None = None) -> torch.Tensor:
        """Add the clipped gradients of a batch to the sum.

        May be called several times per step.  ``p.grad`` is neither read nor written.  If a
        micro-batch fails, the sum of the step is reset to zero.

        Args:
            batch: tensors with a common leading dimension, in tuples, lists and dicts.
            read: reads a sample of the batch again, by its row, as a batch of its own; by default
                the row stands for it.

        Returns:
            The mean loss, detached, a scalar: NaN for an empty batch.  It is *not* noised.

        Raises:
            ValueError: if the batch has no common leading dimension, the loss has another shape,
                or the forward pass does not use a parameter.
            PrivacyError: if samples depend on each other, or on those of earlier batches.
        """
        size = self.samples_in(batch)
        if size == 0:
            return torch.full((), torch.nan, device=self.parameters[0].device, dtype=torch.float32)
        leaves, structure = pytree.tree_flatten(batch)
        parts = [leaf.split(self.micro_batch_size or size) for leaf in leaves]
        losses: list[torch.Tensor] = []
        try:
            for part in zip(*parts, strict=True):
                filled = pytree.tree_unflatten(list(part), structure)
                start = sum(map(len, losses))
                losses.append(self._add_batch(filled, len(part[0]), read and _later(read, start)))
        except BaseException as error:
            # After running out of memory the same batch may be tried again: count no sample twice.
            self._start()
            if "more than 1 value per channel" in str(error):
                raise PrivacyError(
                    "batch normalization is in training mode, and mixes the samples of a batch: "
                    "use GroupNorm or LayerNorm, or eval() for its modules"
                ) from error
            raise
        return torch.cat(losses).mean()

    def _add_batch(self, batch: Any, size: int, read: Read | None) -> torch.Tensor:
        """Add the clipped gradients of a micro-batch; return its losses, ``(size,)``, detached."""
        with unwritten(self._model, in_first_pass=True) if self._is_first else nullcontext():
            if self._is_first:
                self._look_at(batch, size)
            losses, gradients = self._check.differentiate(batch, size, read)
        self._is_first = False
        self._add_samples(gradients)
        return losses

    @abstractmethod
    def _look_at(self, batch: Any, size: int) -> None:
        """Check a loss function with the first micro-batch, before samples are compared."""

    @abstractmethod
    def _losses(self, batch: Any, size: int) -> torch.Tensor:
        """Return the loss of each sample, ``(size,)``."""

    @abstractmethod
    def _differentiate(self, batch: Any, size: int) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """Return the losses, ``(size,)``, and gradients of all samples, ``(size, ...)`` each."""


def _later(read: Read, start: int) -> Read:
    """Return a function that reads a sample of a micro-batch, whose first row is ``start``."""
    return lambda row: read(start + row)

"""Per-sample gradients by the hooks of Opacus.  Needs ``comm-hooks[dp]``."""

import warnings
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn

from comm_hooks.optim.private.gradients.batches import BatchClipper
from comm_hooks.optim.private.gradients.clipping import LossFunction
from comm_hooks.optim.private.gradients.model_checks import padding_rows, unwritten
from comm_hooks.optim.private.gradients.per_sample import is_recurrent, require_used, unwrapped
from comm_hooks.optim.private.random_states import random_states_kept
from comm_hooks.requirements import require_kind

try:
    from opacus.grad_sample import GradSampleHooks
    from opacus.grad_sample.gsm_base import AbstractGradSampleHooks
except ImportError as error:
    raise ImportError('Opacus is not installed: pip install "comm-hooks[dp]"') from error

# Raised by a first layer, since its inputs need no gradient.
warnings.filterwarnings("ignore", message="Full backward hook is firing when gradients")


class OpacusGradients(BatchClipper):
    """The sum of clipped per-sample gradients that the hooks of Opacus compute.

    In one backward pass of the sum of the losses the hooks compute every sample's gradient, which
    is transformed, clipped and added as in ``SampleClipper``.  The loss function may call the model
    several times, on the same samples in the same order.

    The hooks are enabled in :meth:`backward` only, so that the model can be called and
    differentiated elsewhere as usual.  Every batch is checked for writes of the forward pass to the
    model, and for the number of rows in every layer.  A batch of one sample is differentiated as
    usual.

    Args:
        module: the model, as it is, in ``DistributedDataParallel``, or in a wrapper of Opacus.
            Hooks are attached to it; those of an earlier training are replaced.
        loss_function, max_grad_norm, micro_batch_size: see
            :class:`~comm_hooks.optim.private.gradients.batches.BatchClipper`.  The loss function
            gets the model inside of all wrappers.

    Raises:
        ValueError: for C out of range, layers that Opacus's hooks do not see, or a model without
            trainable parameters.
        PrivacyError: in :meth:`backward` for samples that depend on each other, for layers that get
            samples in another order, and for a forward pass that writes to the model.
        NotImplementedError: by Opacus, for layers that Opacus does not support.
    """

    _has_hooks = True

    def __init__(
        self,
        module: "nn.Module | AbstractGradSampleHooks",
        loss_function: LossFunction,
        max_grad_norm: float,
        *,
        micro_batch_size: int | None = None,
    ) -> None:
        require_kind(self, "module", module, nn.Module, AbstractGradSampleHooks)
        while isinstance(module, AbstractGradSampleHooks):
            module = cast(nn.Module, module._module)
        model = unwrapped(module)
        for name, layer in model.named_modules():
            # Of several matrices, which the hooks do not see.
            is_compound = isinstance(layer, nn.RNNBase | nn.MultiheadAttention)
            is_hidden = is_compound or isinstance(layer, nn.EmbeddingBag)
            if is_hidden and any(p.requires_grad for p in layer.parameters()):
                kind = type(layer).__name__
                ways = [f"opacus.layers.DP{kind}"] * is_compound
                ways += ['grad_sample_mode="functorch"'] * (not is_recurrent(layer))
                raise ValueError(
                    f"layer {name!r}: Opacus's hooks cannot find per-sample gradients of {kind}: "
                    f"use {' or '.join(ways)}"
                )
        detach(model)
        self._hooks: Any = GradSampleHooks(model, loss_reduction="sum")
        named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        super().__init__(
            model, loss_function, list(named.values()), max_grad_norm, micro_batch_size
        )
        self._names = list(named)
        self._padding: list[tuple[Any, int]] = padding_rows(model)
        self._forget()
        self._hooks.disable_hooks()

    def _look_at(self, batch: Any, size: int) -> None:
        for name, layer in self._model.named_modules():
            if not layer.training and any(p.requires_grad for p in layer.parameters(False)):
                raise ValueError(
                    f"{name or 'the model'} is in eval() mode, in which Opacus's hooks do not see "
                    'it: call train() and eval() its dropout, or take grad_sample_mode="functorch"'
                )
        with random_states_kept([p.device for p in self.parameters[:1]]), torch.no_grad():
            self._losses(batch, size)

    def _losses(self, batch: Any, size: int) -> torch.Tensor:
        with unwritten(self._model):
            losses = self._loss_function(self._model, batch)
        if not isinstance(losses, torch.Tensor) or losses.shape != (size,):
            got = tuple(losses.shape) if isinstance(losses, torch.Tensor) else type(losses).__name__
            raise ValueError(
                f"loss_function must return the loss of each sample, shape ({size},), got {got}: "
                'use reduction="none", and the mean over the parts of a sample'
            )
        return losses

    def _differentiate(self, batch: Any, size: int) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        found: Sequence[Any]
        with torch.enable_grad():
            if size == 1:  # hooks might miss a use of a weight: a plain gradient does not
                losses = self._losses(batch, size)
                found = self._gradient(losses)
                require_used(self._names, found)
                return losses.detach(), [cast(torch.Tensor, each)[None] for each in found]
            try:
                self._forget()
                self._hooks.enable_hooks()
                losses = self._losses(batch, size)
                self._gradient(losses)
                self._hooks.disable_hooks()
                found = [cast(Any, p).grad_sample for p in self.parameters]
                self._require_rows(found, size)
                for weight, row in self._padding:  # which Opacus overlooks
                    weight.grad_sample[:, row] = 0
                return losses.detach(), found
            finally:
                self._hooks.disable_hooks()
                self._forget()

    def _gradient(self, losses: torch.Tensor) -> Sequence[torch.Tensor | None]:
        if not losses.requires_grad:
            require_used(self._names, [None] * len(self._names))
        return torch.autograd.grad(losses.sum(), self.parameters, allow_unused=True)

    def _require_rows(self, found: list[Any], size: int) -> None:
        """Raise ``ValueError`` unless every layer has seen every sample once, in one row."""
        for name, layer in self._model.named_modules():
            if vars(layer).get("activations"):
                raise ValueError(
                    f"{name or 'the model'} was called with gradients that the loss does not use, "
                    "so Opacus cannot match its calls: use torch.no_grad() for calls that are not "
                    "differentiated, and no activation checkpointing"
                )
        require_used(self._names, found)
        rows = zip(self._names, map(len, found), strict=True)
        if others := [f"{name}: {count}" for name, count in rows if count != size]:
            raise ValueError(
                f"layers have seen other numbers of rows than the batch has samples, {size}, so "
                "their gradients cannot be matched: "
                f"{', '.join(others)}. The first dimension must be the sample in every layer: "
                "freeze layers of another (embeddings of positions), or take "
                'grad_sample_mode="functorch"'
            )

    def _forget(self) -> None:
        """Remove Opacus's per-batch state from layers and parameters, also after a failed pass."""
        for layer in self._hooks.iterate_submodules(self._model):
            vars(layer).pop("activations", None)
            vars(layer).pop("max_batch_len", None)
        for parameter in self.parameters:
            vars(parameter).pop("_current_grad_sample", None)
            kept = cast(Any, parameter)
            kept.grad_sample = None
            kept._forward_counter = 0


def detach(module: nn.Module) -> None:
    """Remove Opacus's hooks from a model: with them it could not be called under ``vmap``."""
    hooks = [hook for layer in module.modules() for hook in layer._forward_hooks.values()]
    for owner in [getattr(hook, "__self__", None) for hook in hooks]:
        if isinstance(owner, AbstractGradSampleHooks):
            owner.cleanup()

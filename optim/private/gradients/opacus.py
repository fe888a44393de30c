"""Per-sample gradients by the hooks of Opacus.  Needs ``comm-hooks[dp]``."""

import math
import warnings
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn

from comm_hooks.optim.private.errors import PrivacyError
from comm_hooks.optim.private.gradients.clipping import (
    BatchClipper,
    LossFunction,
    sample_norms,
)
from comm_hooks.optim.private.gradients.independence import IndependenceProbe, sample_losses
from comm_hooks.optim.private.gradients.per_sample import require_used, unwrapped
from comm_hooks.requirements import require_kind

try:
    from opacus.grad_sample import GradSampleHooks
    from opacus.grad_sample.gsm_base import AbstractGradSampleHooks
except ImportError as error:
    raise ImportError('Opacus is not installed: pip install "comm-hooks[dp]"') from error

# Raised by a first layer, since its inputs need no gradient.
warnings.filterwarnings("ignore", message="Full backward hook is firing when gradients")

# The number of samples of the first batch for which Opacus's norm is compared with their own.
_COMPARED = 8


class OpacusGradients(BatchClipper):
    """The sum of clipped per-sample gradients that the hooks of Opacus compute.

    In one backward pass of the sum of the losses the hooks compute every sample's gradient, which
    is transformed, clipped and added as in ``SampleClipper``.  The loss function may call the model
    several times, on the same samples in the same order.

    The hooks are enabled in :meth:`backward` only, so that the model can be called and
    differentiated elsewhere as usual.  The loss function is checked: in the first batch of two
    samples by :class:`~comm_hooks.optim.private.gradients.independence.IndependenceProbe`, and by
    comparing Opacus's norms with those of the samples' own gradients; in every batch by the writes
    of the forward pass to the model, and by the number of rows in every layer.

    Args:
        module: the model, as it is, in ``DistributedDataParallel``, or in a wrapper of Opacus.
            Hooks are attached to it; those of an earlier training are replaced.
        loss_function, max_grad_norm, micro_batch_size: see
            :class:`~comm_hooks.optim.private.gradients.clipping.BatchClipper`.  The loss function
            gets the model inside of all wrappers.

    Raises:
        ValueError: for C out of range, layers that Opacus's hooks do not see, or a model without
            trainable parameters.
        PrivacyError: in :meth:`backward` for samples that depend on each other, for layers that get
            samples in another order, and for a forward pass that writes to the model.
        NotImplementedError: by Opacus, for layers that Opacus does not support.
    """

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
            if is_compound and any(p.requires_grad for p in layer.parameters()):
                kind = type(layer).__name__
                raise ValueError(
                    f"layer {name!r}: Opacus's hooks cannot find per-sample gradients of {kind}: "
                    f'use grad_sample_mode="functorch", or opacus.layers.DP{kind}'
                )
        detach(model)
        self._hooks: Any = GradSampleHooks(model, loss_reduction="sum")
        named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        super().__init__(
            model, loss_function, list(named.values()), max_grad_norm, micro_batch_size
        )
        self._names = list(named)
        self._probe = IndependenceProbe(model, loss_function)
        self._is_compared = False
        self._forget()
        self._hooks.disable_hooks()

    def _add_batch(self, batch: Any, size: int) -> torch.Tensor:
        must_compare = self._probe.look(batch) and not self._is_compared
        try:
            with torch.enable_grad():
                self._forget()
                self._hooks.enable_hooks()
                losses = sample_losses(self._model, self._loss_function, batch, size)
                if not losses.requires_grad:
                    require_used(self._names, [None] * len(self._names))
                torch.autograd.grad(
                    losses.sum(), self.parameters, retain_graph=must_compare, allow_unused=True
                )
                self._hooks.disable_hooks()
                gradients = [cast(Any, p).grad_sample for p in self.parameters]
                self._require_rows(gradients, size)
                if must_compare:
                    self._compare(losses, gradients)
                self._add_samples(gradients)
        finally:
            self._hooks.disable_hooks()
            self._forget()
        return losses.detach()

    def _compare(self, losses: torch.Tensor, gradients: Sequence[torch.Tensor]) -> None:
        """Raise ``PrivacyError`` if rows of Opacus's gradients belong to other samples."""
        norms = sample_norms([gradient.detach().float() for gradient in gradients])
        norms = norms.to(losses.device)
        if len(losses) < 2 or not bool((losses.isfinite() & norms.isfinite()).all()):
            return  # 0 x infinity, of another sample, would spoil the gradient of one
        # Norms are added up in float32, whatever the gradients are.
        tolerance = 4 * math.sqrt(max(self._probe.epsilon, torch.finfo(torch.float32).eps))
        for row in range(min(len(losses), _COMPARED)):
            own = torch.autograd.grad(
                losses[row], self.parameters, retain_graph=True, materialize_grads=True
            )
            expected = float(sample_norms([gradient[None].float() for gradient in own]))
            if abs(float(norms[row]) - expected) > tolerance * expected + 1e-30:
                raise PrivacyError(
                    f"the gradient of a sample has norm {expected:g}, and Opacus finds "
                    f"{float(norms[row]):g}, so it would be clipped wrongly: every layer must get "
                    'the samples in the order of the batch. Or set grad_sample_mode="functorch"'
                )
        self._is_compared = True

    def _require_rows(self, found: list[Any], size: int) -> None:
        """Raise ``ValueError`` unless every layer has seen every sample once, in one row."""
        for name, layer in self._model.named_modules():
            if vars(layer).get("activations"):
                raise ValueError(
                    f"{name or 'the model'} was called with gradients that the loss does not use, "
                    "so Opacus cannot match its calls: use torch.no_grad() for calls that are not "
                    "differentiated"
                )
        require_used(self._names, found)
        rows = [len(samples) for samples in found]
        if any(count != size for count in rows):
            listed = ", ".join(f"{n}: {r}" for n, r in zip(self._names, rows, strict=True))
            raise ValueError(
                f"layers have seen other numbers of rows than the batch has samples, {size}, so "
                f"their gradients cannot be matched: {listed}. The first dimension must be the "
                "sample in every layer"
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

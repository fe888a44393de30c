"""Per-sample gradients by Opacus: its hooks, and ghost clipping.  Needs ``comm-hooks[dp]``."""

import math
import warnings
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar, cast

import torch
from torch import nn
from torch.utils import _pytree as pytree

from comm_hooks.optim.private.errors import PrivacyError
from comm_hooks.optim.private.gradients.clipping import (
    BatchClipper,
    LossFunction,
    clip_factors,
    sample_norms,
)
from comm_hooks.optim.private.gradients.independence import IndependenceProbe, sample_losses
from comm_hooks.optim.private.gradients.per_sample import require_used, unwrapped
from comm_hooks.requirements import require_kind

try:
    from opacus.grad_sample import GradSampleHooks, GradSampleHooksFastGradientClipping
    from opacus.grad_sample.gsm_base import AbstractGradSampleHooks
except ImportError as error:
    raise ImportError('Opacus is not installed: pip install "comm-hooks[dp]"') from error

# Raised by a first layer, since its inputs need no gradient.
warnings.filterwarnings("ignore", message="Full backward hook is firing when gradients")

# The number of samples of the first batch for which Opacus's norm is compared with their own.
_COMPARED = 8

_COMPOUND: dict[type[nn.Module], str] = {
    nn.RNN: "DPRNN",
    nn.GRU: "DPGRU",
    nn.LSTM: "DPLSTM",
    nn.MultiheadAttention: "DPMultiheadAttention",
}
"""Layers of several matrices, which Opacus's hooks cannot take, and Opacus's replacements."""


class HookedGradients(BatchClipper):
    """The base of both Opacus modes: clipped sums of gradients that Opacus's hooks compute.

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
        PrivacyError: in :meth:`backward` for samples that depend on each other, or are not where
            Opacus expects them, and for a forward pass that writes to the model.
        NotImplementedError: by Opacus, for layers that it cannot take.
    """

    _hooks_class: ClassVar[type]

    def __init__(
        self,
        module: "nn.Module | AbstractGradSampleHooks",
        loss_function: LossFunction,
        max_grad_norm: float,
        *,
        micro_batch_size: int | None = None,
    ) -> None:
        require_kind(self, "module", module, nn.Module, AbstractGradSampleHooks)
        self._hooks = _hooks_of(module, self._hooks_class)
        model = cast(nn.Module, self._hooks._module)
        named = {n: p for n, p in model.named_parameters() if p.requires_grad}
        super().__init__(
            model, loss_function, list(named.values()), max_grad_norm, micro_batch_size
        )
        self._names = list(named)
        self._probe = IndependenceProbe(model, loss_function)
        self._is_compared = False
        self._forget()
        self._hooks.disable_hooks()

    @abstractmethod
    def _differentiate(self, losses: torch.Tensor, scalar: torch.Tensor) -> torch.Tensor:
        """Differentiate the scalar by Opacus; return the norm of each sample's gradient, (B,)."""

    @abstractmethod
    def _add_losses(self, losses: torch.Tensor, norms: torch.Tensor) -> None:
        """Clip the gradients of the batch that was just differentiated, and add them to the sum."""

    def _add_batch(self, batch: Any, size: int) -> torch.Tensor:
        is_shown = self._probe.look(batch)
        try:
            with torch.enable_grad():
                with self._hooked():
                    losses = sample_losses(self._model, self._loss_function, batch, size)
                    if not losses.requires_grad:
                        require_used(self._names, [None] * len(self._names))
                    norms = self._differentiate(losses, losses.sum())
                if is_shown and not self._is_compared:
                    self._compare(losses, norms)
                self._add_losses(losses, norms)
        finally:
            self._forget()
        return losses.detach()

    def _compare(self, losses: torch.Tensor, norms: torch.Tensor) -> None:
        """Compare Opacus's norms with those of the first samples' own gradients; raise if wrong."""
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
                    f"{float(norms[row]):g}, so it would be clipped wrongly: every layer must "
                    'get the samples in the order of the batch. Valid instead: "functorch"'
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

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        self._forget()
        self._hooks.enable_hooks()
        try:
            yield
        finally:
            self._hooks.disable_hooks()

    def _forget(self) -> None:
        """Remove Opacus's per-batch state from layers and parameters, also after a failed pass."""
        for layer in self._hooks.iterate_submodules(self._model):
            vars(layer).pop("activations", None)
            vars(layer).pop("max_batch_len", None)
        for parameter in self.parameters:
            vars(parameter).pop("_current_grad_sample", None)
            kept = cast(Any, parameter)
            kept.grad_sample = kept._norm_sample = None
            kept._forward_counter = 0


class OpacusGradients(HookedGradients):
    """The sum of clipped per-sample gradients that the hooks of Opacus compute.

    In one backward pass of the sum of the losses the hooks compute every sample's gradient, which
    is transformed, clipped and added as in ``SampleClipper``.  The loss function may call the model
    several times, on the same samples in the same order.

    Arguments and errors are those of :class:`HookedGradients`.

    Example::

        >>> import torch
        >>> from comm_hooks.optim.private.gradients.opacus import OpacusGradients
        >>> def loss_function(model, batch):
        ...     return model(batch).square().sum(1)
        >>> gradients = OpacusGradients(model, loss_function, max_grad_norm=1.0)
        >>> loss = gradients.backward(torch.randn(16, 8))
        >>> gradients.take().samples
        16
    """

    _hooks_class = GradSampleHooks

    def _differentiate(self, losses: torch.Tensor, scalar: torch.Tensor) -> torch.Tensor:
        torch.autograd.grad(
            scalar, self.parameters, retain_graph=not self._is_compared, allow_unused=True
        )
        found = [cast(Any, p).grad_sample for p in self.parameters]
        self._require_rows(found, len(losses))
        if self._is_compared:
            return torch.empty(0)
        norms = sample_norms([gradient.detach().float() for gradient in found])
        return norms.to(losses.device)

    def _add_losses(self, losses: torch.Tensor, norms: torch.Tensor) -> None:
        self._add_samples([cast(Any, p).grad_sample for p in self.parameters])


class OpacusGhostGradients(HookedGradients):
    """The sum of clipped gradients by ghost clipping, without a gradient of any single sample.

    1. n <- the norm of each sample's gradient, which Opacus computes from the inputs and output
       gradients of each layer (Li et al. 2022), in one backward pass
    2. sum <- sum + the gradient of sum_i min(1, C / n_i) loss_i, in a second one

    This saves memory, and with large layers time.

    Arguments are those of :class:`HookedGradients`.

    Raises:
        ValueError: in :meth:`backward` for a :attr:`transform`.
        PrivacyError: in :meth:`backward` for sequences, and for 16 bits (see below).
        NotImplementedError: by Opacus, also for layers that share parameters, or are called more
            than once.
        RuntimeError: in :meth:`backward`, if the norms of all samples are finite and a derivative
            is not.

    Samples with a loss or norm that is not finite are left out, and the others passed to the loss
    function again.

    Not supported: :attr:`transform`.  Sequences, that is, an ``nn.Linear`` or ``nn.Embedding`` that
    a sample passes more than once: their norm is a sum of terms of both signs, in the model's
    dtype, and where the gradients of a sample's positions nearly cancel, it is too small, and the
    sample is hardly clipped (in a constructed case, to 690 C).  bfloat16 and float16, as the dtype
    of parameters or by autocast: the second pass adds up a batch in them, and one more sample
    changes the rounding of the whole sum, by up to 4.7 C with 4,096 samples.

    Example::

        >>> import torch
        >>> from comm_hooks.optim.private.gradients.opacus import OpacusGhostGradients
        >>> def loss_function(model, batch):
        ...     return model(batch).square().sum(1)
        >>> gradients = OpacusGhostGradients(model, loss_function, max_grad_norm=1.0)
        >>> loss = gradients.backward(torch.randn(16, 8))
        >>> gradients.take().samples
        16
    """

    _hooks_class = GradSampleHooksFastGradientClipping

    def backward(self, batch: Any) -> torch.Tensor:
        if self.transform is not None:
            raise ValueError(
                "ghost clipping never computes the gradient of a sample, so it cannot be "
                "transformed before it is clipped: use PerSampleGradients or OpacusGradients"
            )
        return super().backward(batch)

    def _differentiate(self, losses: torch.Tensor, scalar: torch.Tensor) -> torch.Tensor:
        torch.autograd.grad(scalar, self.parameters, retain_graph=True, allow_unused=True)
        found = [cast(Any, p)._norm_sample for p in self.parameters]
        self._require_rows(found, len(losses))
        norms = torch.stack([norm.to(losses.device) for norm in found])
        return torch.linalg.vector_norm(norms, dim=0, dtype=torch.float64)

    def _add_batch(self, batch: Any, size: int) -> torch.Tensor:
        try:
            return super()._add_batch(batch, size)
        except _NotFinite as found:
            # Their derivatives would spoil the sum with any factor: 0 x NaN is NaN.
            kept = found.finite.nonzero().flatten()
            self._count(0, size - len(kept))
            if len(kept):
                rest = pytree.tree_map(lambda leaf: leaf[kept.to(leaf.device)], batch)
                self._add_batch(rest, len(kept))
            return found.losses

    def _add_losses(self, losses: torch.Tensor, norms: torch.Tensor) -> None:
        finite = norms.isfinite() & losses.detach().isfinite()
        if not bool(finite.all()):
            raise _NotFinite(finite, losses.detach())
        factors = clip_factors(norms, self.max_grad_norm)
        weights = _rounded_down(factors, losses.dtype)
        gradients = torch.autograd.grad((weights * losses).sum(), self.parameters)
        if not all(bool(gradient.isfinite().all()) for gradient in gradients):
            raise RuntimeError(
                "the derivatives of a sample are not finite, though its norm is, and ghost "
                "clipping cannot leave it out: use PerSampleGradients or OpacusGradients, which can"
            )
        for total, gradient in zip(self._sums, gradients, strict=True):
            total.add_(gradient)
        self._count(len(losses), 0)

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        handles = [
            layer.register_forward_pre_hook(_refuse_sequences)
            for layer in self._model.modules()
            if isinstance(layer, nn.Linear | nn.Embedding)
        ]
        handles += [
            layer.register_forward_hook(_refuse_16_bits)
            for layer in self._model.modules()
            if any(p.requires_grad for p in layer.parameters(recurse=False))
        ]
        try:
            with super()._hooked():
                yield
        finally:
            for handle in handles:
                handle.remove()


class _NotFinite(Exception):
    """Raised internally, if a batch has samples with losses or norms that are not finite."""

    def __init__(self, finite: torch.Tensor, losses: torch.Tensor) -> None:
        super().__init__()
        self.finite, self.losses = finite, losses


def _refuse_sequences(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Raise ``PrivacyError`` for inputs with several rows per sample, as sequences have."""
    rows = inputs[0].dim() - (1 if isinstance(layer, nn.Linear) else 0)
    if torch.is_grad_enabled() and layer.weight.requires_grad and rows > 1:
        raise PrivacyError(
            f"ghost clipping of sequences: {type(layer).__name__} gets {tuple(inputs[0].shape)}, "
            "and where the gradients of a sample's positions nearly cancel, its norm is too small "
            'to clip it. Valid instead: grad_sample_mode="hooks" or "functorch"'
        )


def _refuse_16_bits(layer: nn.Module, inputs: tuple[Any, ...], outputs: Any) -> None:
    """Raise ``PrivacyError`` for a layer with gradients that are added up in 16-bit floats."""
    if not torch.is_grad_enabled():
        return
    trained = [p for p in layer.parameters(recurse=False) if p.requires_grad]
    # By outputs, a layer that casts inside of itself.
    seen = [t for t in pytree.tree_leaves(outputs) if isinstance(t, torch.Tensor)]
    dtypes = {t.dtype for t in (*trained, *seen) if t.is_floating_point()}
    kinds = {p.device.type for p in trained}
    dtypes |= {torch.get_autocast_dtype(k) for k in kinds if torch.is_autocast_enabled(k)}
    coarsest = min(dtypes, key=lambda dtype: torch.finfo(dtype).bits)
    if torch.finfo(coarsest).bits < 32:
        raise PrivacyError(
            f"ghost clipping in {coarsest}: the samples of a batch are added up in it, and one "
            "more sample changes the rounding of the whole sum by more than C. Valid instead: "
            'grad_sample_mode="hooks" or "functorch", or float32'
        )


def _refuse_compound_layers(model: nn.Module) -> None:
    """Raise ``ValueError`` for layers with parameters that Opacus's hooks cannot observe."""
    for name, layer in model.named_modules():
        kind = next((k for k in _COMPOUND if isinstance(layer, k)), None)
        if kind and any(p.requires_grad for p in layer.parameters()):
            raise ValueError(
                f"layer {name!r}: Opacus's hooks cannot find per-sample gradients of "
                f'{type(layer).__name__}: use grad_sample_mode="functorch", or '
                f"opacus.layers.{_COMPOUND[kind]}"
            )


def _hooks_of(module: "nn.Module | AbstractGradSampleHooks", kind: type) -> Any:
    """Attach Opacus's hooks of class ``kind`` to the unwrapped model, and remove all others."""
    while isinstance(module, AbstractGradSampleHooks):
        module = cast(nn.Module, module._module)
    model = unwrapped(module)
    _refuse_compound_layers(model)
    detach(model)
    return kind(model, loss_reduction="sum")


def detach(module: nn.Module) -> None:
    """Remove Opacus's hooks from a model: with them it could not be called under ``vmap``."""
    hooks = [hook for layer in module.modules() for hook in layer._forward_hooks.values()]
    for owner in [getattr(hook, "__self__", None) for hook in hooks]:
        if isinstance(owner, AbstractGradSampleHooks):
            owner.cleanup()


def _rounded_down(factors: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return nonnegative factors converted to ``dtype``, rounded down."""
    rounded = factors.to(dtype)
    info = torch.finfo(dtype)
    step = (rounded.abs() * info.eps).clamp(min=info.smallest_normal * info.eps)
    return torch.where(rounded.double() > factors.double(), (rounded - step).clamp(min=0), rounded)

"""Clipped sums of per-sample gradients, computed by ``torch.func``."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, cast

import torch
from torch import nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from comm_hooks.frameworks.ddp.model import is_replicated
from comm_hooks.optim.private.gradients.batches import BatchClipper
from comm_hooks.optim.private.gradients.clipping import LossFunction
from comm_hooks.requirements import require_kind


class PerSampleGradients(BatchClipper):
    """The sum of clipped per-sample gradients of a model, one sample at a time under ``vmap``.

    For each sample x of a batch

    1. g <- the gradient of ``loss_function(model, x)``, where x keeps a leading dimension of 1
    2. g <- scale g + shift, if :attr:`transform` is set
    3. sum <- sum + min(1, C / norm of g) g, in float32, the norm over all parameters

    as in DP-SGD (Abadi et al. 2016).  A sample with a gradient that is not finite, or a norm that
    overflows, is left out and counted; the first time with a warning.

    Parameters that modules share get one gradient, the sum over all uses.  In a half-precision
    model, gradients are computed in its dtype, clipped and added in float32.  Under
    ``DistributedDataParallel`` the wrapped model is called, so that DDP averages nothing.

    Args:
        model: the model; its parameters with ``requires_grad`` at this moment are trained.  Not
            changed: a forward pass gets copies of the buffers.
        loss_function: ``loss_function(model, batch)`` returns the loss of each sample, ``(B,)``.
            Its batches are of one sample, so it may return their mean, a scalar, as well.  It gets
            the unwrapped model.
        max_grad_norm: C, the norm to which each sample's gradient is clipped.
        micro_batch_size: the number of samples that are differentiated at once, with as many copies
            of the gradient; by default the whole batch.

    Raises:
        ValueError: if C is not a finite number of at least 1e-10, ``micro_batch_size`` is not
            positive, nothing in the model is trainable, or only a submodule is wrapped in DDP; with
            the first sample, if the forward pass writes to a buffer.

    Not supported: modules that mix the samples of a batch (see
    :func:`~comm_hooks.optim.private.check_model`), control flow that depends on the values of a
    sample, modules without a rule for ``vmap`` (``nn.GRU``), sharded parameters.

    Example::

        >>> import torch
        >>> from comm_hooks.optim.private.gradients.per_sample import PerSampleGradients
        >>> def loss_function(model, batch):
        ...     inputs, labels = batch
        ...     return torch.nn.functional.cross_entropy(model(inputs), labels, reduction="none")
        >>> gradients = PerSampleGradients(model, loss_function, max_grad_norm=1.0)
        >>> loss = gradients.backward((torch.randn(16, 8), torch.randint(8, (16,))))
        >>> gradients.take().samples
        16
    """

    def __init__(
        self,
        model: nn.Module,
        loss_function: LossFunction,
        max_grad_norm: float,
        *,
        micro_batch_size: int | None = None,
    ) -> None:
        require_kind(self, "model", model, nn.Module)
        loss = _Loss(unwrapped(model), loss_function)
        named = {n: p for n, p in loss.named_parameters() if p.requires_grad}
        super().__init__(
            loss.model, loss_function, list(named.values()), max_grad_norm, micro_batch_size
        )
        self._loss = loss
        self._names = list(named)
        self._vmapped = vmap(
            grad_and_value(self._sample_loss), (None, None, 0), randomness="different"
        )

    def _losses(self, batch: Any, size: int) -> torch.Tensor:
        loss: torch.Tensor = functional_call(self._loss, self._buffers(), (batch,))
        return loss

    def _differentiate(self, batch: Any, size: int) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        values = {n: p.detach() for n, p in zip(self._names, self.parameters, strict=True)}
        # On CPU, vmap would call the fused kernel for one sample after the other, with a warning.
        on_cpu = self.parameters[0].device.type == "cpu"
        with self._explaining(), sdpa_kernel(SDPBackend.MATH) if on_cpu else nullcontext():
            gradients, losses = self._vmapped(values, self._buffers(), batch)
        return losses.detach(), [gradients[name] for name in self._names]

    @contextmanager
    def _explaining(self) -> Iterator[None]:
        """Turn an error of ``vmap`` into one with a way out: one sample passed without it."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            text = " ".join(str(error).split())
            if "memory" in text:
                raise
            recurrent = {type(m).__name__ for m in self._model.modules() if is_recurrent(m)}
            layers = ", ".join(f"opacus.layers.DP{kind}" for kind in sorted(recurrent))
            ways = [way for part, way in _WAYS_OUT.items() if part in text]
            way = ways[0] if ways else (layers and f"use {layers}") or _OTHER_MODE
            raise ValueError(
                "torch.func.vmap, which finds gradients of single samples, cannot run this model "
                f"or loss function ({text.partition('. ')[0][:100]}): {way}"
            ) from error

    def _sample_loss(
        self, values: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor], sample: Any
    ) -> torch.Tensor:
        batch_of_one = pytree.tree_map(lambda tensor: tensor.unsqueeze(0), sample)
        loss = functional_call(self._loss, {**values, **buffers}, (batch_of_one,))
        return loss.squeeze(0) if loss.dim() else loss

    def _buffers(self) -> dict[str, torch.Tensor]:
        # Copies, so that a forward pass cannot keep anything of a sample.
        return {name: buffer.clone() for name, buffer in self._loss.named_buffers()}

    def _look_at(self, batch: Any, size: int) -> None:
        """Check a pass of one sample, without ``vmap``, whose errors would be harder to read."""
        buffers = self._buffers()
        with torch.enable_grad():
            loss = functional_call(
                self._loss, buffers, (pytree.tree_map(lambda leaf: leaf[:1], batch),)
            )
        if not isinstance(loss, torch.Tensor) or loss.shape not in ((), (1,)):
            got = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ValueError(
                "loss_function must return the loss of each sample, for one sample at a time a "
                f"tensor of shape (1,) or (), got {got}"
            )
        written = [name.removeprefix("model.") for name, b in buffers.items() if b._version > 0]
        if written:
            raise ValueError(
                "the forward pass writes to buffers, which would keep a trace of samples without "
                f"noise: {', '.join(written)}. Use modules that do not, or eval() for those that "
                "write in training only"
            )
        used: Sequence[torch.Tensor | None] = [None] * len(self.parameters)
        if loss.requires_grad:
            used = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        require_used(self._names, used, "model.")


class _Loss(nn.Module):
    """A loss function as a module, so that ``functional_call`` can replace model parameters."""

    def __init__(self, model: nn.Module, loss_function: LossFunction) -> None:
        super().__init__()
        self.model = model
        self._loss_function = loss_function

    def forward(self, batch: Any) -> torch.Tensor:
        return self._loss_function(self.model, batch)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside DDP and ``torch.compile``; refuse submodules that are in DDP."""
    while isinstance(model, DistributedDataParallel) or hasattr(model, "_orig_mod"):
        is_ddp = isinstance(model, DistributedDataParallel)
        model = cast(nn.Module, model.module if is_ddp else model._orig_mod)
    for module in model.modules():
        if isinstance(module, DistributedDataParallel) or is_replicated(module):
            raise ValueError(
                f"DDP on the submodule {type(module).__name__} would average raw gradients of "
                "single samples: wrap the whole model in DistributedDataParallel or nothing"
            )
    return model


_OTHER_MODE = 'take grad_sample_mode="hooks"'

# Ways out of errors of vmap, by a part of their texts.
_WAYS_OUT = {
    "data-dependent": (
        "it branches on values of a tensor: use torch.where or masks, and a comparison with "
        "torch.arange for F.one_hot. Models of transformers look "
        "at their attention_mask: pass one of 4 dimensions, True where there is attention, in the "
        f'loss function, or attn_implementation="eager" for GPT-2; or {_OTHER_MODE}'
    ),
    "dynamic shape": (
        "it picks as many elements as there are: multiply by a mask, or use torch.where; or "
        f"{_OTHER_MODE}"
    ),
    "saved tensor hooks": (
        "activation checkpointing does not go with it: leave it out (model."
        "gradient_checkpointing_disable()), and bound the memory by micro_batch_size"
    ),
    "inplace arithmetic": (
        "it writes samples into a tensor that was made without them: use operations that return a "
        f"new tensor, or make it by new_zeros of a sample; or {_OTHER_MODE}"
    ),
    "setup_context": (
        "an autograd.Function needs a setup_context(), and generate_vmap_rule=True; or "
        f"{_OTHER_MODE}"
    ),
    "generate_vmap_rule": f"set generate_vmap_rule=True in its class; or {_OTHER_MODE}",
    "data pointer": f"it reads values by numpy() or tolist(): stay in torch; or {_OTHER_MODE}",
}


def is_recurrent(module: nn.Module) -> bool:
    """Return whether a module is a recurrent layer that ``vmap`` has no rule for."""
    has_rule = isinstance(module, nn.LSTM) and not module.proj_size
    return isinstance(module, nn.RNNBase) and not has_rule


def require_used(names: list[str], gradients: Any, prefix: str = "") -> None:
    """Raise ``ValueError`` if parameters have no gradient, with their names without ``prefix``."""
    unused = [
        name.removeprefix(prefix)
        for name, gradient in zip(names, gradients, strict=True)
        if gradient is None
    ]
    if unused:
        raise ValueError(
            "parameters that the forward pass does not use would receive pure noise: freeze them "
            "with requires_grad_(False), or leave out activation checkpointing, if that hides them "
            f"(micro_batch_size bounds the memory): {', '.join(unused)}"
        )

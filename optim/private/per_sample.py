"""Per-sample gradients by torch.func, with nothing but PyTorch."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from comm_hooks.compressors.base import (
    require_callable,
    require_flag,
    require_kind,
    require_positive,
)
from comm_hooks.ddp import is_replicated
from comm_hooks.optim.private.clipping import SampleClipper

LossFunction = Callable[[nn.Module, Any], torch.Tensor]


class PerSampleGradients(SampleClipper):
    """The sum of clipped per-sample gradients of a model, one sample at a time under ``vmap``.

    For each sample x of a batch

    1. g <- the gradient of ``loss_function(model, x)``, where x keeps a leading dimension of 1
    2. g <- scale g + shift, if :attr:`transform` is set
    3. sum <- sum + min(1, C / norm of g) g, in float32, the norm over all parameters

    as in DP-SGD (Abadi et al. 2016).  A sample whose gradient is not finite, or whose norm
    overflows, is left out and counted; the first time with a warning.

    Parameters that modules share get one gradient, the sum over all uses.  In a half-precision
    model, gradients are computed in its dtype, clipped and added in float32.  Under
    ``DistributedDataParallel`` the wrapped model is called, so that DDP averages nothing.

    Args:
        model: whose parameters with ``requires_grad`` at this moment are trained.  Not changed: a
            forward pass sees copies of the buffers.
        loss_function: ``loss_function(model, batch)`` returns the mean loss over a batch, a scalar.
            The model it is given is the unwrapped one.
        max_grad_norm: C.
        micro_batch_size: how many samples to differentiate at once, which takes as many copies of
            the gradient; by default the whole batch.
        compile: whether ``torch.compile`` does step 1.  Every micro-batch is then filled up to
            ``micro_batch_size``, which must be given, so that one compilation is enough.

    Raises:
        ValueError: if C is not a finite number of at least 1e-10, ``micro_batch_size`` is not
            positive, or missing for ``compile=True``, nothing in the model is trainable, or a part
            of the model is under DDP.

    Not supported: modules that mix the samples of a batch (see
    :func:`~comm_hooks.optim.private.model_checks.check_model`), control flow that depends on the
    values of a sample, what has no rule for ``vmap`` (``nn.LSTM``, ``nn.GRU``), sharded parameters.

    Example::

        >>> import torch
        >>> from comm_hooks.optim.private.per_sample import PerSampleGradients
        >>> def loss_function(model, batch):
        ...     inputs, labels = batch
        ...     return torch.nn.functional.cross_entropy(model(inputs), labels)
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
        compile: bool = False,
    ) -> None:
        require_kind(self, "model", model, nn.Module)
        require_flag(self, "compile", compile)
        require_callable(self, "loss_function", loss_function)
        if micro_batch_size is not None:
            require_positive(self, "micro_batch_size", micro_batch_size)
        if compile and micro_batch_size is None:
            raise ValueError(
                "PerSampleGradients: compile=True needs a micro_batch_size, because every other "
                "number of samples would be compiled anew"
            )
        self._loss = _Loss(unwrapped(model), loss_function)
        named = {n: p for n, p in self._loss.named_parameters() if p.requires_grad}
        super().__init__(list(named.values()), max_grad_norm)
        self._names = list(named)
        self.micro_batch_size = micro_batch_size
        self._checked = False
        per_sample = vmap(
            grad_and_value(self._sample_loss), (None, None, 0), randomness="different"
        )
        self._differentiate = torch.compile(per_sample) if compile else per_sample
        self._fill = compile

    def samples_in(self, batch: Any) -> int:
        """Return the common leading dimension of a batch's tensors."""
        return _common_size(pytree.tree_leaves(batch))

    def backward(self, batch: Any) -> torch.Tensor:
        """Add the clipped gradients of a batch to the sum.

        May be called several times per step.  ``p.grad`` is neither read nor written.  If a
        micro-batch fails, the step's sum starts anew.

        Args:
            batch: tensors with a common leading dimension, in tuples, lists and dicts.

        Returns:
            The mean loss, detached, a scalar: NaN for an empty batch.  It is *not* noised.

        Raises:
            ValueError: if the batch has no common leading dimension; with the first sample, also
                if the loss is not a scalar, or the forward pass does not use a parameter or
                writes to a buffer.
        """
        leaves, structure = pytree.tree_flatten(batch)
        size = _common_size(leaves)
        if size == 0:
            return torch.full((), torch.nan, device=self.parameters[0].device)
        if not self._checked:
            self._check(pytree.tree_unflatten([leaf[:1] for leaf in leaves], structure))
            self._checked = True
        values = {n: p.detach() for n, p in zip(self._names, self.parameters, strict=True)}
        buffers = self._buffers()
        losses = []
        parts = [leaf.split(self.micro_batch_size or size) for leaf in leaves]
        try:
            for part in zip(*parts, strict=True):
                filled = pytree.tree_unflatten([self._filled(leaf) for leaf in part], structure)
                with self._attention():
                    gradients, loss = self._differentiate(values, buffers, filled)
                # Fillings are at the end.
                samples = len(part[0])
                self._add_samples([gradients[name][:samples] for name in self._names])
                losses.append(loss.detach()[:samples])
        except BaseException:
            # Who runs out of memory may try the same batch again: no sample may count twice.
            self._start()
            raise
        return torch.cat(losses).mean()

    def _attention(self) -> AbstractContextManager[None]:
        # On CPU, vmap would call the fused kernel for one sample after the other, with a warning.
        on_cpu = self.parameters[0].device.type == "cpu"
        return sdpa_kernel(SDPBackend.MATH) if on_cpu else nullcontext()

    def _filled(self, samples: torch.Tensor) -> torch.Tensor:
        missing = (self.micro_batch_size or 0) - len(samples)
        if not self._fill or not missing:
            return samples
        return torch.cat([samples, samples[:1].expand(missing, *samples.shape[1:])])

    def _sample_loss(
        self, values: dict[str, torch.Tensor], buffers: dict[str, torch.Tensor], sample: Any
    ) -> torch.Tensor:
        batch_of_one = pytree.tree_map(lambda tensor: tensor.unsqueeze(0), sample)
        return functional_call(self._loss, {**values, **buffers}, (batch_of_one,))

    def _buffers(self) -> dict[str, torch.Tensor]:
        # Copies, so that a forward pass cannot keep anything of a sample.
        return {name: buffer.clone() for name, buffer in self._loss.named_buffers()}

    def _check(self, batch_of_one: Any) -> None:
        """Raise ``ValueError`` for what ``vmap`` would let pass, or complain of in other words."""
        buffers = self._buffers()
        with torch.enable_grad():
            loss = functional_call(self._loss, buffers, (batch_of_one,))
        if not isinstance(loss, torch.Tensor) or loss.dim() > 0:
            got = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ValueError(
                f"loss_function must return the mean loss of the batch, a tensor of no dimensions, "
                f"got {got}"
            )
        written = [name.removeprefix("model.") for name, b in buffers.items() if b._version > 0]
        if written:
            raise ValueError(
                "the forward pass writes to buffers, which would keep what it has seen without "
                f"noise: {', '.join(written)}. Use modules that do not, or eval() for those that "
                "write in training only"
            )
        used: Sequence[torch.Tensor | None] = [None] * len(self.parameters)
        if loss.requires_grad:
            used = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        require_used(self._names, used, "model.")


class _Loss(nn.Module):
    """A loss function as a module, so that whatever it calls of the model sees the parameters."""

    def __init__(self, model: nn.Module, loss_function: LossFunction) -> None:
        super().__init__()
        self.model = model
        self._loss_function = loss_function

    def forward(self, batch: Any) -> torch.Tensor:
        return self._loss_function(self.model, batch)


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside ``DistributedDataParallel`` and ``torch.compile``."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        inner = model.module if isinstance(model, DistributedDataParallel) else inner
        if inner is None:
            break
        model = inner
    for module in model.modules():
        if isinstance(module, DistributedDataParallel) or is_replicated(module):
            raise ValueError(
                "DDP would average raw gradients of one sample: wrap the whole model in "
                f"DistributedDataParallel or nothing, not {type(module).__name__} inside of it"
            )
    return model


def require_used(names: list[str], gradients: Any, prefix: str = "") -> None:
    """Raise ``ValueError`` naming parameters that have no gradient."""
    unused = [
        name.removeprefix(prefix)
        for name, gradient in zip(names, gradients, strict=True)
        if gradient is None
    ]
    if unused:
        raise ValueError(
            "parameters that the forward pass does not use would receive nothing but noise: freeze "
            f"them with requires_grad_(False): {', '.join(unused)}"
        )


def _common_size(leaves: list[Any]) -> int:
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

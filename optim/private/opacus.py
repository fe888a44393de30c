"""Per-sample gradients of Opacus: its hooks, and ghost clipping.  Needs ``comm-hooks[dp]``."""

from typing import Any, cast

import torch
from torch import nn

from comm_hooks.optim.private.clipped_sum import ClippedSum
from comm_hooks.optim.private.clipping import SampleClipper, clip_factors
from comm_hooks.optim.private.errors import PrivacyError
from comm_hooks.optim.private.independence import IndependenceProbe
from comm_hooks.optim.private.per_sample import require_used

try:
    from opacus.grad_sample import (
        GradSampleHooks,
        GradSampleHooksFastGradientClipping,
        GradSampleModule,
        GradSampleModuleExpandedWeights,
        GradSampleModuleFastGradientClipping,
    )
except ImportError as error:
    raise ImportError('Opacus is not installed: pip install "comm-hooks[dp]"') from error


class OpacusGradients(SampleClipper):
    """The sum of clipped per-sample gradients that the hooks of Opacus have computed.

    After ``loss.backward()`` call :meth:`accumulate`, or :meth:`take` at once.  They take
    ``p.grad_sample`` of every parameter, which Opacus has scaled to be each sample's own gradient
    (times the batch size with ``loss_reduction="mean"``), transform, clip and add as
    :class:`~comm_hooks.optim.private.clipping.SampleClipper` says.

    Args:
        module: Opacus's ``GradSampleModule`` around the model, or the ``GradSampleHooks`` that are
            attached to it; also with ``force_functorch=True``.  Its ``loss_reduction`` must be that
            of the loss, or samples are clipped at another norm than C.
        max_grad_norm: C.

    Raises:
        ValueError: for a module without per-sample gradients, C out of range, or a model with
            nothing to train.
        PrivacyError: for ``grad_sample_mode="ew"``, which adds up the samples of several backward
            passes before they can be clipped, and cannot have an empty batch.

    Not supported: two forward passes on different samples before one backward pass.  Opacus adds
    the i-th of each into one.

    Example::

        >>> import torch
        >>> from opacus import GradSampleModule
        >>> from comm_hooks.optim.private.opacus import OpacusGradients
        >>> module = GradSampleModule(model)
        >>> gradients = OpacusGradients(module, max_grad_norm=1.0)
        >>> module(torch.randn(16, 8)).square().sum(1).mean().backward()
        >>> gradients.accumulate()
        16
        >>> gradients.take().samples
        16
    """

    def __init__(self, module: "nn.Module | GradSampleHooks", max_grad_norm: float) -> None:
        if isinstance(module, GradSampleModuleExpandedWeights):
            raise PrivacyError(
                'grad_sample_mode="ew" adds up the samples of several backward passes, so that '
                'clipping bounds none of them: use "hooks" or "functorch"'
            )
        self._names, parameters = _trainable(type(self).__name__, module, ghost=False)
        super().__init__(parameters, max_grad_norm)

    def samples_in(self, batch: Any) -> int:
        """Raise ``ValueError``: a batch is passed to the model."""
        return len(self.backward(batch))

    @property
    def pending(self) -> bool:
        """Whether ``loss.backward()`` has left something that :meth:`accumulate` is to add."""
        return bool(self._pending())

    def accumulate(self) -> int:
        """Add what the last backward pass has left, and clear it; ``p.grad`` as well.

        ``p.grad`` holds the raw gradient, which nobody needs.  To be called after every backward
        pass, which shows that it is of other samples: two losses on the same ones would let each
        count twice.

        Returns:
            How many samples the backward pass had.

        Raises:
            ValueError: if there was no backward pass, if it did not reach a parameter, or if
                parameters have seen different numbers of samples; the sum stays as it was.
            PrivacyError: if there were several, whose gradients are discarded.
        """
        # After several backward passes it is a list, with one tensor for each.
        found = self._pending()
        if not found:
            raise ValueError(
                "there are no per-sample gradients: call accumulate() after loss.backward(), "
                "before zero_grad(). An empty batch that was not passed through the model needs "
                "no accumulate()"
            )
        require_used(self._names, found)
        passes = [samples if isinstance(samples, list) else [samples] for samples in found]
        counts = [[len(samples) for samples in of_parameter] for of_parameter in passes]
        if any(count != counts[0] for count in counts):
            listed = ", ".join(f"{n}: {c}" for n, c in zip(self._names, counts, strict=True))
            raise ValueError(
                "parameters have seen different numbers of samples, so that it is not known which "
                f"gradients belong together: {listed}. The first dimension must be the sample in "
                "every layer, and every backward pass must reach every parameter"
            )
        self._clear()
        if len(counts[0]) > 1:
            raise PrivacyError(
                f"loss.backward() was called {len(counts[0])} times, and a sample may count once: "
                "add the losses up first, or call optimizer.accumulate(part, of=batch) after that "
                "of each part. Their gradients are discarded"
            )
        for gradients in zip(*passes, strict=True):
            self._add_samples(gradients)
        return counts[0][0]

    def take(self) -> ClippedSum:
        """Return the sum since the last call, and start a new one.

        What a backward pass has left is added first; see :meth:`accumulate` for what it raises.
        """
        if self._pending():
            self.accumulate()
        return super().take()

    def discard(self) -> bool:
        """Forget the sum since the last :meth:`take`, and what a backward pass has left."""
        is_pending = self.pending
        if is_pending:
            self._clear()
        return super().discard() or is_pending

    def _pending(self) -> list[Any]:
        found = [cast(Any, p).grad_sample for p in self.parameters]
        return [] if all(samples is None for samples in found) else found

    def _clear(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None
            cast(Any, parameter).grad_sample = None


class OpacusGhostGradients(SampleClipper):
    """The sum of clipped gradients by ghost clipping, without a gradient of any single sample.

    1. n <- the norm of each sample's gradient, which Opacus finds from what goes in and out of
       each layer (Li et al. 2022), in one backward pass
    2. sum <- sum + the gradient of sum_i min(1, C / n_i) loss_i, in a second one

    This saves memory, and with large layers time.  ``p.grad`` is neither read nor written.

    Args:
        module: Opacus's ``GradSampleModuleFastGradientClipping``, or the hooks of that name.  Its
            own ``max_grad_norm`` is not used.
        max_grad_norm: C.

    Raises:
        ValueError: for a module of another kind, C out of range, or a model with nothing to train.
        PrivacyError: in the forward pass, for sequences; see below.

    Not supported: :attr:`transform`, and parameters that layers share (Opacus raises).  Sequences,
    that is, an ``nn.Linear`` or ``nn.Embedding`` that a sample passes more than once: their norm is
    a sum of terms of both signs, in the model's dtype, and where the gradients of a sample's
    positions nearly cancel, it comes out too small, and the sample is hardly clipped (in a case
    made for it, to 690 C).  Use :class:`OpacusGradients` or
    :class:`~comm_hooks.optim.private.per_sample.PerSampleGradients` for sequences.

    The first batch shows whether samples are independent of each other, as far as
    :class:`~comm_hooks.optim.private.independence.IndependenceProbe` sees it.

    Example::

        >>> import torch
        >>> from opacus.grad_sample import GradSampleModuleFastGradientClipping
        >>> from comm_hooks.optim.private.opacus import OpacusGhostGradients
        >>> module = GradSampleModuleFastGradientClipping(model)
        >>> gradients = OpacusGhostGradients(module, max_grad_norm=1.0)
        >>> loss = gradients.backward(module(torch.randn(16, 8)).square().sum(1))
        >>> gradients.take().samples
        16
    """

    takes_losses = True

    def __init__(
        self, module: "nn.Module | GradSampleHooksFastGradientClipping", max_grad_norm: float
    ) -> None:
        self._names, parameters = _trainable(type(self).__name__, module, ghost=True)
        super().__init__(parameters, max_grad_norm)
        self._module: Any = module
        model = cast(nn.Module, self._module._module)
        for layer in model.modules():
            if isinstance(layer, nn.Linear | nn.Embedding):
                layer.register_forward_pre_hook(_refuse_sequences)
        self._probe = IndependenceProbe(model)

    def samples_in(self, batch: Any) -> int:
        """Return of how many samples these are the losses."""
        return len(getattr(batch, "loss_per_sample", batch))

    def backward(self, loss: Any) -> torch.Tensor:
        """Add the clipped gradients of a batch to the sum; may be called several times per step.

        Args:
            loss: the loss of each sample, ``(B,)``, or what Opacus's
                ``DPLossFastGradientClipping`` returns.

        Returns:
            The mean loss, detached, a scalar: NaN for an empty batch.  It is *not* noised.

        Raises:
            ValueError: if there is a :attr:`transform`, the loss is not one number per sample, or
                the forward pass does not use a parameter.
            PrivacyError: if the loss of a sample depends on others.
            RuntimeError: if the loss or a derivative of a sample is not finite, which spoils the
                sum and cannot be taken out of it; the sum stays as it was.
        """
        if self.transform is not None:
            raise ValueError(
                "ghost clipping never has the gradient of a sample, so that it cannot be "
                "transformed before it is clipped: use PerSampleGradients or OpacusGradients"
            )
        losses: torch.Tensor = getattr(loss, "loss_per_sample", loss)
        if losses.dim() != 1:
            raise ValueError(
                f"the loss must be one number per sample, shape (B,), got {tuple(losses.shape)}: "
                'use reduction="none", and the mean over what a sample consists of'
            )
        self._module.disable_hooks()
        try:
            self._probe.look(losses)
        finally:
            self._module.enable_hooks()
        # Also of an empty batch, after which Opacus would not let another forward pass begin.
        norms = self._norms(losses)
        finite = norms.isfinite() & losses.detach().isfinite()
        factors = torch.where(finite, clip_factors(norms, self.max_grad_norm), 0.0)
        clipped = (factors.to(losses) * torch.where(finite, losses, 0.0)).sum()
        self._module.disable_hooks()
        try:
            gradients = torch.autograd.grad(clipped, self.parameters)
        finally:
            self._module.enable_hooks()
        if not all(bool(gradient.isfinite().all()) for gradient in gradients):
            raise RuntimeError(
                "the derivatives of a sample are not finite, and ghost clipping cannot leave it "
                "out: use PerSampleGradients or OpacusGradients, which can"
            )
        for total, gradient in zip(self._sums, gradients, strict=True):
            total.add_(gradient)
        samples = int(finite.sum())
        self._count(samples, len(losses) - samples)
        return losses.detach().mean()

    def _norms(self, losses: torch.Tensor) -> torch.Tensor:
        for parameter in self.parameters:
            # Opacus leaves it there, and would use it again if the next pass sets none.
            cast(Any, parameter)._norm_sample = None
        loss = losses.mean() if self._module.loss_reduction == "mean" else losses.sum()
        torch.autograd.grad(loss, self.parameters, retain_graph=True, allow_unused=True)
        require_used(self._names, [cast(Any, p)._norm_sample for p in self.parameters])
        return self._module.get_norm_sample().double()


def _refuse_sequences(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Refuse more than one row per sample, where Opacus finds the norm by Gram matrices."""
    rows = inputs[0].dim() - (1 if isinstance(layer, nn.Linear) else 0)
    if torch.is_grad_enabled() and layer.weight.requires_grad and rows > 1:
        raise PrivacyError(
            f"ghost clipping of sequences: {type(layer).__name__} sees {tuple(inputs[0].shape)}, "
            "and where the gradients of a sample's positions nearly cancel, its norm comes out too "
            'small to clip it. Valid instead: grad_sample_mode="hooks" or "functorch"'
        )


def wrap(
    module: nn.Module, max_grad_norm: float, *, ghost: bool = False
) -> tuple[nn.Module, SampleClipper]:
    """Return a model with Opacus's hooks, and what takes its clipped gradients.

    Args:
        module: a model, or what Opacus has made of it in the same mode.
        max_grad_norm: C.
        ghost: whether by ghost clipping (:class:`OpacusGhostGradients`).

    Raises:
        ValueError: as :class:`OpacusGradients` and :class:`OpacusGhostGradients`.
        NotImplementedError: by Opacus, for layers that it cannot take.
    """
    if not isinstance(module, GradSampleHooks):
        module = (
            GradSampleModuleFastGradientClipping(module, max_grad_norm=max_grad_norm)
            if ghost
            else GradSampleModule(module)
        )
    kind = OpacusGhostGradients if ghost else OpacusGradients
    return module, kind(module, max_grad_norm)


def _trainable(
    name: str, module: object, *, ghost: bool
) -> tuple[list[str], list[torch.nn.Parameter]]:
    """Return the names and parameters to train of a model that Opacus has hooked into."""
    is_ghost = isinstance(module, GradSampleHooksFastGradientClipping)
    if not isinstance(module, GradSampleHooks) or is_ghost != ghost:
        wanted = "GradSampleModuleFastGradientClipping" if ghost else "GradSampleModule"
        other = "OpacusGradients" if ghost else "OpacusGhostGradients"
        raise ValueError(
            f"{name}: module must be Opacus's {wanted}, got {type(module).__name__}; "
            f"{other} is for the other mode"
        )
    model: nn.Module = cast(Any, module)._module
    named = {n: p for n, p in model.named_parameters() if p.requires_grad}
    return list(named), list(named.values())

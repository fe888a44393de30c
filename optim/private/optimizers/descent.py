"""Optimizers on noised gradients: the contract with the mechanism, and what they are made of."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from comm_hooks.config import unknown
from comm_hooks.optim.base import (
    BatchedOptimizer,
    ExactStateOptimizer,
    Group,
    Tensors,
    names_of,
    state_dtype,
    widened,
)
from comm_hooks.optim.hyperparameters import check_hyperparameters
from comm_hooks.optim.moments import descend_, momentum_, zeros
from comm_hooks.optim.private.gradients.clipping import PublicTransform

_HYPERPARAMETERS = ("lr", "betas", "eps", "momentum", "nesterov", "weight_decay")

PublicTensors = Mapping[str, torch.Tensor] | Sequence[torch.Tensor]
"""One for each parameter: by name, or in the order of the parameter groups."""


class NoisedOptimizer(ExactStateOptimizer):
    """An optimizer whose ``p.grad`` is a noised mean of clipped per-sample gradients.

    Everything it keeps is post-processing of what was released, so it may be saved and shown, as
    long as the gradients really are noised: :class:`~comm_hooks.optim.private.PrivacyEngine` sees
    to it.  Any :class:`torch.optim.Optimizer` can take this place; this class is for those that

    * use the variance of the noise (:attr:`noise_variance`), or
    * transform every sample's gradient before it is clipped (:meth:`transform`).

    What follows holds for those of this library; they tell where they differ.  The step is
    deterministic, so ranks that start alike and hold the same gradients stay alike, bit for bit.

    Args:
        params: parameters, named parameters or parameter groups; a group may have its own value of
            any number below.
        lr: learning rate.
        betas: decay of moments, each in [0, 1).
        eps: added to the denominator.
        momentum: heavy ball, in [0, 1).
        weight_decay: decoupled (AdamW), times ``lr``.  It depends on the parameters, not on the
            data: it costs no privacy, and is neither clipped nor noised.

    State per parameter: what a class lists, shaped like it, float32 or wider, and ``step``, a
    number on the CPU that counts the parameter's own steps.  float16 and bfloat16 parameters are
    updated in float32 and rounded once.

    Raises:
        ValueError: for hyperparameters out of range; for sparse or complex gradients; for a state
            of another optimizer.

    Not supported: a learning rate that is a tensor, ``torch.compile`` of the step, sharded
    parameters (DTensors).  Gradients that are not finite are not looked for.

    Attributes:
        noise_variance: of the noise in one coordinate of ``p.grad``, set before every step; None
            where compression made it unknown.
        needs_noise_variance: whether a step cannot do without.
    """

    needs_noise_variance: ClassVar[bool] = False
    noise_variance: float | None = None

    def transform(self) -> PublicTransform | None:
        """Return what to do to every sample's gradient of the coming step; None for nothing.

        Called once per step, before the first sample, with one tensor for each parameter in the
        order of the parameter groups.
        """
        return None


class BatchedNoisedOptimizer(BatchedOptimizer, NoisedOptimizer):
    """A noised optimizer that computes in float32 or wider; a subclass gives :meth:`_move`."""

    _beta_count: ClassVar[int] = 2

    @abstractmethod
    def _move(self, x: Tensors, gradients: Tensors, parameters: Tensors, group: Group) -> None:
        """Take a step.

        Args:
            x: the values of parameters of one group, device and dtype, to be updated.
            gradients: theirs, not to be overwritten.
            parameters: the keys of their states.
            group: with the hyperparameters.
        """

    def _update(self, parameters: Tensors, group: Group) -> None:
        dtype = state_dtype(parameters[0].dtype)
        x = widened(parameters, dtype)
        self._move(x, widened([p.grad for p in parameters], dtype), parameters, group)
        if dtype != parameters[0].dtype:
            torch._foreach_copy_(parameters, x)

    def _check_group(self, settings: Group) -> None:
        known = {key: settings[key] for key in _HYPERPARAMETERS if key in settings}
        check_hyperparameters(self, beta_count=self._beta_count, **known)

    def _buffers(self, parameters: Iterable[torch.Tensor], name: str) -> Tensors:
        """Return a tensor of each parameter's state; zeros at first."""
        found = []
        for parameter in parameters:
            dtype = state_dtype(parameter.dtype)
            found += zeros([self.state[parameter]], name, [parameter], dtype)
        return found

    def _steps(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the number of a parameter's steps, a tensor on the CPU."""
        return self.state[parameter].setdefault("step", torch.tensor(0.0, dtype=torch.float32))

    def _count(self, parameters: Tensors) -> list[int]:
        """Count a step, and return how many each parameter has taken."""
        counts = [self._steps(p) for p in parameters]
        torch._foreach_add_(counts, 1)
        return [int(count) for count in counts]


class Descent(BatchedNoisedOptimizer):
    """Heavy-ball descent along directions that a subclass makes of the gradients.

    With u a parameter's direction, theta = (1 - lr weight_decay) theta - lr b, where
    b = momentum b + u; with ``nesterov`` u + momentum b takes the place of b.  ``eps`` must be
    positive.
    """

    def _directions(self, parameters: Tensors, gradients: Tensors, group: Group) -> Tensors:
        """Return where to go, for parameters of one group, device and dtype: the gradients.

        Args:
            parameters: all have a gradient.
            gradients: theirs, float32 or wider; not to be overwritten.
            group: with the hyperparameters.
        """
        return gradients

    def _begin_step(self) -> None:
        """Do what comes once per step, when it is sure to be taken and nothing has changed yet."""

    def _check_group(self, settings: Group) -> None:
        super()._check_group(settings)
        if "eps" in settings:
            check_positive(self, eps=settings["eps"])

    def _check_step(self, gradients: Sequence[torch.Tensor]) -> None:
        super()._check_step(gradients)
        self._begin_step()

    def _move(self, x: Tensors, gradients: Tensors, parameters: Tensors, group: Group) -> None:
        directions = self._directions(parameters, gradients, group)
        if momentum := group.get("momentum"):
            buffers = momentum_(self._buffers(parameters, "momentum_buffer"), directions, momentum)
            if group.get("nesterov"):
                directions = list(torch._foreach_add(directions, buffers, alpha=momentum))
            else:
                directions = buffers
        descend_(x, directions, group)

    def _in_order(
        self, what: str, values: PublicTensors, *, default: float | None = None
    ) -> Tensors:
        """Return a public tensor for each parameter, in its shape and dtype and on its device.

        Args:
            what: the values' name in messages.
            values: by parameter name, or in the order of the parameter groups; shapes may be such
                as broadcast to the parameters'.
            default: fills the tensors of those parameters that are not named; None if all must be.

        Raises:
            ValueError: for values that do not fit the parameters, or are not finite.
        """
        owner, parameters = type(self).__name__, self._parameters()
        names = names_of(self.param_groups)
        if isinstance(values, Mapping):
            if not all("param_names" in group for group in self.param_groups):
                raise ValueError(
                    f"{owner}: {what} goes by names: pass model.named_parameters() as params"
                )
            for name in values:
                if name not in names:
                    raise ValueError(f"{owner}: {what}: {unknown('parameter', name, names)}")
            missing = [name for name in names if name not in values]
            if missing and default is None:
                raise ValueError(f"{owner}: {what} has no tensor for {', '.join(missing)}")
            found = [
                values.get(name, torch.tensor(default or 0.0, dtype=torch.float32))
                for name in names
            ]
        else:
            found = list(values)
            names = [f"tensor {place}" for place in range(len(found))]
            if len(found) != len(parameters):
                raise ValueError(
                    f"{owner}: {what} has {len(found)} tensors for {len(parameters)} parameters"
                )
        ordered = []
        for name, value, parameter in zip(names, found, parameters, strict=True):
            value = value.detach().to(parameter.device, state_dtype(parameter.dtype))
            try:
                value = value.broadcast_to(parameter.shape)
            except RuntimeError:
                raise ValueError(
                    f"{owner}: {what}: {name} has shape {tuple(value.shape)}, the parameter "
                    f"{tuple(parameter.shape)}"
                ) from None
            ordered.append(value)
        # One number read back from the device, not one for each parameter.
        device = parameters[0].device
        if not torch.stack([v.isfinite().all().to(device) for v in ordered]).all():
            bad = [n for n, v in zip(names, ordered, strict=True) if not v.isfinite().all()]
            raise ValueError(f"{owner}: {what}: not finite in {', '.join(bad)}")
        return ordered


class TransformedDescent(Descent):
    """A :class:`Descent` whose gradients are transformed before they are clipped.

    A subclass implements :meth:`_transform`.  ``p.grad`` is then in the transformed space.
    """

    _is_transformed = False

    @abstractmethod
    def _transform(self, parameters: Tensors, group: Group) -> tuple[Tensors, Tensors | None]:
        """Return scale and shift for parameters of one group."""

    def _prepare(self) -> bool:
        """Do what comes once per step, before it; return whether there is anything to transform."""
        return True

    @torch.no_grad()
    def transform(self) -> PublicTransform | None:
        """Return what to do to every sample's gradient of the coming step; None for nothing.

        Raises:
            ValueError: if it would not be finite.
        """
        if not self._is_transformed:
            self._is_needed = self._prepare()
            self._is_transformed = True
        if not self._is_needed:
            return None
        scales: Tensors = []
        shifts: Tensors = []
        for group in self.param_groups:
            scale, shift = self._transform(group["params"], group)
            scales += scale
            shifts += shift or []
        return PublicTransform(scales, shifts or None)

    def _begin_step(self) -> None:
        if not self._is_transformed:
            raise RuntimeError(
                f"{type(self).__name__}: transform() was not called for this step, so p.grad is in "
                "another space: let PrivacyEngine compute it"
            )
        self._is_transformed = False


def check_positive(owner: object, **values: Any) -> None:
    """Raise ``ValueError`` for hyperparameters that are not positive and finite."""
    check_hyperparameters(owner, **values)
    for name, value in values.items():
        if not value:
            raise ValueError(f"{type(owner).__name__}: {name} must be positive, got {value!r}")

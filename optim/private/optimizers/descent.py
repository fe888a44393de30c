"""Base classes of optimizers on noised gradients: interface, descent, public preconditioner."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Literal, get_args

import torch
from torch.optim.optimizer import ParamsT

from comm_hooks.config import unknown
from comm_hooks.optim.base import (
    BatchedOptimizer,
    ExactStateOptimizer,
    Group,
    Tensors,
    names_of,
    parameters_of,
    state_dtype,
    widened,
)
from comm_hooks.optim.hyperparameters import check_hyperparameters
from comm_hooks.optim.moments import average_, average_squares_, descend_, momentum_, roots, zeros
from comm_hooks.optim.private.gradients.clipping import PublicTransform
from comm_hooks.requirements import require_callable, require_choice, require_kind, require_within

_HYPERPARAMETERS = ("lr", "betas", "eps", "momentum", "nesterov", "weight_decay")

Factors = tuple[Tensors, Tensors | None]
"""The scales and shifts of gradients, one tensor per parameter; None for no shifts."""

PublicTensors = Mapping[str, torch.Tensor]
"""A tensor for each parameter, by name."""

Accumulator = Literal["rmsprop", "adam", "adagrad"]


class NoisedOptimizer(ExactStateOptimizer):
    """An optimizer for a noised mean of clipped per-sample gradients in ``p.grad``.

    Its state is post-processing of released gradients, so it may be saved and published, as long as
    :class:`~comm_hooks.optim.private.PrivacyEngine` (or your own code) noises the gradients.  Any
    :class:`torch.optim.Optimizer` can take its place; this class is for optimizers that

    * use the variance of the noise (:attr:`noise_variance`), or
    * transform every sample's gradient before it is clipped (:meth:`transform`).

    The following holds for the subclasses of this library; each documents its differences.  The
    step is deterministic: ranks with equal parameters, state and gradients stay equal bit for bit.

    Args:
        params: parameters, named or not, or groups; a group may have its own value of any number.
        lr: learning rate.
        betas: decay rates of the moments, each in [0, 1).
        eps: added to the denominator.
        momentum: decay rate of the heavy-ball momentum, in [0, 1).
        weight_decay: decoupled as in AdamW, times ``lr``.  It depends on the parameters, not on the
            data: it costs no privacy, and is neither clipped nor noised.

    State per parameter: the tensors that a class lists, shaped like the parameter, float32 or
    wider, and ``step``, a number on the CPU that counts the parameter's own steps.  float16 and
    bfloat16 parameters are updated in float32 and rounded once.

    Raises:
        ValueError: for hyperparameters out of range; for sparse or complex gradients; for a state
            of another optimizer; for public gradients that do not fit or are not finite.
        RuntimeError: from :meth:`step` of an optimizer that scales gradients, if :meth:`transform`
            was not called for this step.

    Not supported: a learning rate that is a tensor, ``torch.compile`` of the step, sharded
    parameters (DTensors).  Gradients are not checked for NaN and infinity.

    Attributes:
        noise_variance: the variance of the noise in one coordinate of ``p.grad``, set before every
            step; None if compression makes it unknown.
        needs_noise_variance: whether a step raises without :attr:`noise_variance`.
    """

    needs_noise_variance: ClassVar[bool] = False
    noise_variance: float | None = None

    def transform(self) -> PublicTransform | None:
        """Return the transform of every sample's gradient in the coming step; None for none.

        Called once per step, before the first sample, with one tensor for each parameter in the
        order of the parameter groups.
        """
        return None


class Descent(BatchedOptimizer, NoisedOptimizer):
    """Heavy-ball descent along noised gradients: the base class of the published algorithms.

    A parameter theta with direction u moves to (1 - lr weight_decay) theta - lr b, where
    b = momentum b + u, zero at first; with ``nesterov`` u + momentum b takes the place of b.

    A subclass may scale gradients before they are clipped (:meth:`_factors`), or define other
    directions (:meth:`_directions`; by default the gradients) or another step (:meth:`_move`).

    Args:
        params: parameters, named parameters or parameter groups.
        **defaults: default hyperparameters of the groups.
    """

    _beta_count: ClassVar[int] = 2
    _positive: ClassVar[tuple[str, ...]] = ("eps",)
    _scales_before_clipping: ClassVar[bool] = False
    _is_observed = False

    def __init__(self, params: ParamsT, **defaults: Any) -> None:
        super().__init__(params, defaults)

    @torch.no_grad()
    def transform(self) -> PublicTransform | None:
        """Return the transform of the coming step; see :class:`NoisedOptimizer`."""
        if not self._scales_before_clipping:
            return None
        if not self._is_observed:
            self._observe()
            self._is_observed = True
        scales: Tensors = []
        shifts: Tensors = []
        for group in self.param_groups:
            factors = self._factors(group["params"], group)
            if factors is None:
                return None
            scales += factors[0]
            shifts += factors[1] or []
        return PublicTransform(scales, shifts or None)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the result of ``state_dict()``; see :class:`NoisedOptimizer`."""
        # torch adds defaults that are in no group.
        own = [key for key in self.param_groups[0] if key in self.defaults]
        for group in state_dict["param_groups"]:
            if missing := [key for key in own if key not in group]:
                raise ValueError(
                    f"{type(self).__name__}: the state has no {', '.join(missing)}: it was saved "
                    "by another optimizer"
                )
        super().load_state_dict(state_dict)

    def _observe(self) -> None:
        """Evaluate public gradients: once per step, before the state or parameters change."""

    def _factors(self, parameters: Tensors, group: Group) -> Factors | None:
        """Return scales and shifts of the gradients of one group; None for no scaling."""
        return None

    def _directions(self, parameters: Tensors, gradients: Tensors, group: Group) -> Tensors:
        """Return the directions of the step, for parameters of one group, device and dtype.

        ``gradients`` are float32 or wider, and must not be overwritten.
        """
        return gradients

    def _move(self, x: Tensors, gradients: Tensors, parameters: Tensors, group: Group) -> None:
        """Take a step: update ``x``, the values of parameters of one group, device and dtype."""
        directions = self._directions(parameters, gradients, group)
        if momentum := group.get("momentum"):
            b = momentum_(buffers(self, parameters, "momentum_buffer"), directions, momentum)
            if group.get("nesterov"):
                directions = list(torch._foreach_add(directions, b, alpha=momentum))
            else:
                directions = b
        descend_(x, directions, group)

    def _update(self, parameters: Tensors, group: Group) -> None:
        dtype = state_dtype(parameters[0].dtype)
        x = widened(parameters, dtype)
        self._move(x, widened([p.grad for p in parameters], dtype), parameters, group)
        if dtype != parameters[0].dtype:
            torch._foreach_copy_(parameters, x)

    def _check_group(self, settings: Group) -> None:
        known = {key: settings[key] for key in _HYPERPARAMETERS if key in settings}
        check_hyperparameters(self, beta_count=self._beta_count, **known)
        for key in self._positive:
            if key in settings:
                require_within(self, key, settings[key], "(0, inf)")

    def _check_step(self, gradients: Sequence[torch.Tensor]) -> None:
        super()._check_step(gradients)
        if not self._scales_before_clipping:
            self._observe()
        elif not self._is_observed:
            raise RuntimeError(
                f"{type(self).__name__}: transform() was not called for this step, so p.grad is "
                "not scaled by it: train with PrivacyEngine, which calls it"
            )
        self._is_observed = False

    def _steps(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the number of steps that a parameter has taken, a tensor on the CPU."""
        return self.state[parameter].setdefault("step", torch.tensor(0.0, dtype=torch.float32))

    def _count(self, parameters: Tensors) -> list[int]:
        counts = [self._steps(p) for p in parameters]
        torch._foreach_add_(counts, 1)
        return [int(count) for count in counts]


class PublicDescent(Descent):
    """Descent with gradients that public knowledge scales: the base of AdaDPS and its baselines.

    Args:
        params, public_gradients, side_information, preconditioner: see
            :class:`~comm_hooks.optim.private.AdaDPS`.
        **defaults: default hyperparameters of the groups.
    """

    def __init__(
        self,
        params: ParamsT,
        public_gradients: Callable[[], PublicTensors] | None,
        side_information: PublicTensors | None = None,
        preconditioner: Accumulator = "rmsprop",
        **defaults: Any,
    ) -> None:
        require_choice(self, "preconditioner", preconditioner, get_args(Accumulator))
        if (public_gradients is None) == (side_information is None):
            raise ValueError(
                f"{type(self).__name__}: pass either public_gradients or side_information"
            )
        if public_gradients is not None:
            require_callable(self, "public_gradients", public_gradients)
        super().__init__(params, **defaults)
        self._accumulator = preconditioner
        self._public_gradients = public_gradients
        self._fixed: dict[torch.Tensor, torch.Tensor] = {}
        if side_information is not None:
            self._fixed = in_order(self, "side_information", side_information, default=1.0)
            if not all(bool((value > 0).all()) for value in self._fixed.values()):
                raise ValueError(
                    f"{type(self).__name__}: side_information must be positive: it divides "
                    "gradients"
                )

    def _observe(self) -> None:
        if self._public_gradients is None:
            return
        self._public = in_order(self, "public_gradients", self._public_gradients())
        for group in self.param_groups:
            parameters, (beta1, *_, beta2) = group["params"], group["betas"]
            gradients = [self._public[p] for p in parameters]
            squares = buffers(self, parameters, "public_exp_avg_sq")
            if self._accumulator == "adagrad":
                torch._foreach_addcmul_(squares, gradients, gradients)
                continue
            average_squares_(squares, gradients, beta2)
            if self._accumulator == "adam":
                average_(buffers(self, parameters, "public_exp_avg"), gradients, beta1)

    def _factors(self, parameters: Tensors, group: Group) -> Factors:
        if self._fixed:
            return [1 / self._fixed[p] for p in parameters], None
        divisors = roots(buffers(self, parameters, "public_exp_avg_sq"), group["eps"])
        scales = list(torch._foreach_reciprocal(divisors))
        if self._accumulator != "adam":
            return scales, None
        beta1 = group["betas"][0]
        shifts = torch._foreach_mul(buffers(self, parameters, "public_exp_avg"), scales)
        torch._foreach_mul_(shifts, 1 - beta1)
        torch._foreach_mul_(scales, beta1)
        return scales, list(shifts)

    def _directions(self, parameters: Tensors, gradients: Tensors, group: Group) -> Tensors:
        if self._scales_before_clipping:
            return gradients
        scales, shifts = self._factors(parameters, group)
        directions = list(torch._foreach_mul(gradients, scales))
        if shifts is not None:
            torch._foreach_add_(directions, shifts)
        return directions


def buffers(
    optimizer: torch.optim.Optimizer, parameters: Iterable[torch.Tensor], name: str
) -> Tensors:
    """Return ``state[name]`` of each parameter, after adding zeros where it is missing."""
    found = []
    for parameter in parameters:
        dtype = state_dtype(parameter.dtype)
        found += zeros([optimizer.state[parameter]], name, [parameter], dtype)
    return found


def in_order(
    optimizer: torch.optim.Optimizer,
    what: str,
    values: PublicTensors,
    *,
    default: float | None = None,
) -> dict[torch.Tensor, torch.Tensor]:
    """Return a public tensor for each parameter, in its shape and dtype and on its device.

    Args:
        what: the name of the argument ``values`` in error messages.
        values: public tensors, in shapes that broadcast to those of the parameters.
        default: the value for parameters that are not named; None to require all names.

    Raises:
        ValueError: for values that do not fit the parameters, or are not finite.
    """
    owner, groups = type(optimizer).__name__, optimizer.param_groups
    parameters, names = parameters_of(groups), names_of(groups)
    require_kind(optimizer, what, values, Mapping)
    if not all("param_names" in group for group in groups):
        raise ValueError(f"{owner}: {what} goes by names: pass model.named_parameters() as params")
    for name in values:
        if name not in names:
            raise ValueError(f"{owner}: {what}: {unknown('parameter', name, names)}")
    missing = [name for name in names if name not in values]
    if missing and default is None:
        raise ValueError(f"{owner}: {what} has no tensor for {', '.join(missing)}")
    fill = torch.tensor(default or 0.0, dtype=torch.float32)
    ordered = []
    for name, parameter in zip(names, parameters, strict=True):
        value = values.get(name, fill).detach().to(parameter.device, state_dtype(parameter.dtype))
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
    return dict(zip(parameters, ordered, strict=True))

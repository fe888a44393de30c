"""What optimizers have in common that walk along something made of ``p.grad``."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar

import torch

from comm_hooks.config import unknown
from comm_hooks.optim.batched import BatchedOptimizer, state_dtype, widened
from comm_hooks.optim.hyperparameters import check_hyperparameters
from comm_hooks.optim.private.clipped_sum import PublicTransform
from comm_hooks.optim.private.noised_optimizer import NoisedOptimizer

PublicTensors = Mapping[str, torch.Tensor] | Sequence[torch.Tensor]
"""One for each parameter: by name, or in the order of the parameter groups."""


class Descent(BatchedOptimizer, NoisedOptimizer):
    """Heavy-ball descent along directions that a subclass makes of the gradients.

    With u a parameter's direction, theta = (1 - lr weight_decay) theta - lr b, where
    b = momentum b + u.  The decay is decoupled, and of the weights alone, so it costs no privacy.

    Parameter groups have ``lr``, ``weight_decay``, perhaps ``momentum``, and what the subclass
    needs; ``betas`` and ``eps``, which must be positive, are checked.
    """

    _beta_count: ClassVar[int] = 2

    @abstractmethod
    def _directions(
        self, parameters: list[torch.Tensor], gradients: list[torch.Tensor], group: dict[str, Any]
    ) -> list[torch.Tensor]:
        """Return where to go, for parameters of one group, device and dtype.

        Args:
            parameters: all have a gradient.
            gradients: theirs, float32 or wider; not to be overwritten.
            group: with the hyperparameters.
        """

    def _begin_step(self) -> None:
        """Do what comes once per step, when it is sure to be taken and nothing has changed yet."""

    def _check_group(self, settings: dict[str, Any]) -> None:
        known = ("lr", "betas", "eps", "momentum", "weight_decay")
        present = {key: settings[key] for key in known if key in settings}
        check_hyperparameters(self, beta_count=self._beta_count, **present)
        if "eps" in settings:
            check_positive(self, eps=settings["eps"])

    def _check_step(self, gradients: Sequence[torch.Tensor]) -> None:
        super()._check_step(gradients)
        self._begin_step()

    def _update(self, parameters: list[torch.Tensor], group: dict[str, Any]) -> None:
        dtype = state_dtype(parameters[0].dtype)
        x = widened(parameters, dtype)
        gradients = widened([p.grad for p in parameters], dtype)
        directions = self._directions(parameters, gradients, group)
        if group.get("momentum"):
            buffers = self._buffers(parameters, "momentum_buffer")
            torch._foreach_mul_(buffers, group["momentum"])
            torch._foreach_add_(buffers, directions)
            directions = buffers
        if group["weight_decay"]:
            torch._foreach_mul_(x, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(x, directions, alpha=-group["lr"])
        if dtype != parameters[0].dtype:
            torch._foreach_copy_(parameters, x)

    def _parameters(self) -> list[torch.Tensor]:
        """Return all parameters in the order of the groups."""
        return [p for group in self.param_groups for p in group["params"]]

    def _buffers(self, parameters: Iterable[torch.Tensor], name: str) -> list[torch.Tensor]:
        """Return a tensor of each parameter's state; zeros at first."""
        buffers = []
        for parameter in parameters:
            state = self.state[parameter]
            if name not in state:
                state[name] = torch.zeros_like(parameter, dtype=state_dtype(parameter.dtype))
            buffers.append(state[name])
        return buffers

    def _steps(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the number of a parameter's steps, a tensor on the CPU."""
        return self.state[parameter].setdefault("step", torch.tensor(0.0))

    def _in_order(
        self,
        what: str,
        values: PublicTensors,
        *,
        default: float | None = None,
    ) -> list[torch.Tensor]:
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
        names = [name for group in self.param_groups for name in group.get("param_names", ())]
        if isinstance(values, Mapping):
            if len(names) != len(parameters):
                raise ValueError(
                    f"{owner}: {what} goes by names: pass model.named_parameters() as params"
                )
            for name in values:
                if name not in names:
                    raise ValueError(f"{owner}: {what}: {unknown('parameter', name, names)}")
            missing = [name for name in names if name not in values]
            if missing and default is None:
                raise ValueError(f"{owner}: {what} has no tensor for {', '.join(missing)}")
            found = [values.get(name, torch.tensor(default or 0.0)) for name in names]
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
    def _transform(
        self, parameters: list[torch.Tensor], group: dict[str, Any]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
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
        scales: list[torch.Tensor] = []
        shifts: list[torch.Tensor] = []
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

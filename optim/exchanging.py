"""What optimizers that own the exchange have in common."""

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, ClassVar, overload

import torch
from torch.optim.optimizer import ParamsT

from comm_hooks.compressors.base import Compressor
from comm_hooks.exchange import Exchange
from comm_hooks.exchange.agreement import hyperparameters_of
from comm_hooks.optim.double_averaging import check_double_averaging
from comm_hooks.optim.exact_state import ExactStateOptimizer
from comm_hooks.requirements import require_kind


class ExchangingOptimizer(ExactStateOptimizer):
    """An optimizer whose ranks hold different gradients and exchange something else than those.

    A subclass implements :meth:`_step`: it turns this rank's gradients into a message, averages it
    with :meth:`_average` and updates the parameters from the mean, which is the same on all ranks.

    Whatever a subclass keeps in ``self.state`` must be the same on all ranks; what differs between
    ranks belongs into the exchange's memory, which every rank saves for itself.

    Ranks that start from different models or hyperparameters, or come to have others later on, get
    an error that names them (``comm_hooks.exchange.agreement.Owner``).

    DDP must not average: register :func:`~comm_hooks.skip_hook`, which the first step makes sure
    of.  FSDP always does, and is refused.  If any rank's message is not finite, all ranks skip the
    step, also under a ``GradScaler``.

    Args:
        params: parameters, or better ``model.named_parameters()``: saved residuals are then tied to
            names.
        defaults: of the parameter groups.
        exchange: how messages are averaged.
        settings: what else must be equal on all ranks, which the first round checks.

    Raises:
        ValueError: if ``exchange`` is not an Exchange.
    """

    # GradScaler then calls step() on every rank, instead of skipping it on those that overflowed
    # while the others wait for them, and passes grad_scale.
    _step_supports_amp_scaling = True

    _overwrites_gradients: ClassVar[bool] = True
    """Whether :meth:`_step` uses what it is given as a workspace, and so needs copies."""

    _knows_gradients = False
    """Whether it has been made sure that nobody else averages them."""

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        exchange: Exchange,
        settings: Mapping[str, Any],
    ) -> None:
        name = type(self).__name__
        require_kind(self, "exchange", exchange, Exchange)
        super().__init__(params, defaults)
        self.exchange = exchange
        exchange.agree_on({"optimizer": name, **settings})
        exchange.owner = self

    @abstractmethod
    def _step(self, gradients: list[torch.Tensor]) -> None:
        """Take a step.

        Args:
            gradients: this rank's gradients in float32, unscaled, in the order of
                :meth:`_parameters`; zeros where there is none.  Copies, if
                ``_overwrites_gradients`` says so.
        """

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take one step on all ranks together.

        Args:
            closure: re-evaluates the model and returns the loss.

        Raises:
            ValueError: for sparse gradients; in the first step, if DDP or FSDP has averaged them.
            ConfigMismatchError: in the first step, if ranks are configured differently or start
                from different models.
            PayloadError: if ranks have drifted apart since.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._step(self._gradients())
        return loss

    def hyperparameters(self) -> dict[str, Any]:
        """Return what the next step goes by, which every exchange compares between ranks."""
        return hyperparameters_of(self.param_groups)

    def replica(self) -> Sequence[torch.Tensor]:
        """Return what is the same on all ranks before every exchange: the parameters."""
        return self._parameters()

    def names(self) -> Collection[str]:
        """Return the names under which messages are exchanged: the parameters'."""
        return self._named(self._parameters())

    def _average(
        self, message: Mapping[str, torch.Tensor], *, compress: bool | Compressor = True
    ) -> bool:
        """Replace the message, in place, by its mean over ranks; return whether it is finite.

        Reads one number back from the device.  Where some rank's message is not finite, all
        elements are NaN on all ranks.
        """
        self.exchange.average_(message, compress=compress)
        first = next(iter(message.values()))
        return bool(torch.isfinite(first[(0,) * first.dim()]))

    def _parameters(self) -> list[torch.Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    def _groups(self) -> Iterator[tuple[slice, dict[str, Any]]]:
        """Yield each parameter group with the range of its parameters among all."""
        first = 0
        for group in self.param_groups:
            last = first + len(group["params"])
            yield slice(first, last), group
            first = last

    def _named(self, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return one tensor per parameter under the parameters' names, or else their numbers."""
        names = [name for group in self.param_groups for name in group.get("param_names", ())]
        if len(names) != len(tensors):
            names = [str(index) for index in range(len(tensors))]
        return dict(zip(names, tensors, strict=True))

    def _states(self, *keys: str) -> list[dict[str, torch.Tensor]]:
        """Return each parameter's state, made at first with float32 zeros under ``keys``."""
        states = [self.state[p] for p in self._parameters()]
        for parameter, state in zip(self._parameters(), states, strict=True):
            if not state:
                state["step"] = torch.tensor(0.0)
                for key in keys:
                    state[key] = torch.zeros_like(parameter, dtype=torch.float32)
        return states

    def _gradients(self) -> list[torch.Tensor]:
        """Return the gradients in float32, unscaled: copies where they may be changed."""
        grad_scale: torch.Tensor | None = getattr(self, "grad_scale", None)
        copy = self._overwrites_gradients or grad_scale is not None
        gradients = []
        for parameter in self._parameters():
            gradient = parameter.grad
            if gradient is None:
                gradients.append(torch.zeros_like(parameter, dtype=torch.float32))
                continue
            if gradient.is_sparse:
                raise ValueError(
                    f"{type(self).__name__} does not support sparse gradients: use sparse=False "
                    "in embeddings"
                )
            gradients.append(gradient.to(torch.float32, copy=copy))
        if not self._knows_gradients:
            check_double_averaging(self.exchange.transport, self._parameters(), gradients)
            self._knows_gradients = True
        if grad_scale is not None:
            torch._foreach_div_(gradients, grad_scale)
        return gradients

"""The base class of optimizers that exchange momenta or other messages instead of gradients."""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, NoReturn

import torch
import torch.distributed as dist
from torch.optim.optimizer import ParamsT

from comm_hooks.collectives.model_parallel import found_by_all
from comm_hooks.collectives.torch_distributed import TorchDistributed
from comm_hooks.compressors.base import Compressor
from comm_hooks.exchange import Exchange
from comm_hooks.exchange.agreement import hyperparameters_of
from comm_hooks.optim.already_averaged import require_unaveraged
from comm_hooks.optim.base import (
    ExactStateOptimizer,
    Group,
    States,
    Tensors,
    held,
    names_of,
    parameters_of,
    require_distinct_names,
)
from comm_hooks.optim.frozen import FrozenParameters, trains, without_frozen
from comm_hooks.optim.hyperparameters import (
    check_gradient,
    check_hyperparameters,
    check_own_settings,
)
from comm_hooks.optim.moments import descend_, momentum_, prepared, zeros
from comm_hooks.requirements import require_kind
from comm_hooks.shards import local_gradients, local_shards, require_part_for_all, shard_groups


class ExchangingOptimizer(ExactStateOptimizer):
    """An optimizer that exchanges its own messages, such as momenta, in place of gradients.

    A subclass implements :meth:`_step`: it turns this rank's gradients into a message, averages it
    with :meth:`_average` and updates the parameters from the mean, which is the same on all ranks.
    Subclasses document only their differences to the following.

    DDP must not average gradients: call ``register(model, optimizer)``; the first step checks it.
    FSDP always averages between the ranks that it shards over; these must be other ranks than those
    of the exchange: see :func:`~comm_hooks.shards.local_shards`.

    If any rank's message is not finite, all ranks skip the step, also under a ``GradScaler``.

    Parameters that are frozen (``requires_grad=False``) or empty when the optimizer is made are
    left out; to train them later, add them as a group or construct a new optimizer.

    If models or hyperparameters differ between ranks, at the start or later, all ranks raise an
    error that names the ranks (``comm_hooks.exchange.agreement.Owner``).

    Args:
        params: parameters, or better ``model.named_parameters()``: saved residuals are then tied to
            names.  A group may have its own value of any hyperparameter.
        exchange: the exchange that averages messages over ranks.
        lr: learning rate; schedulers may change it.
        betas: decay rates of the first and the second moment, each in [0, 1).
        eps: added to the denominator.
        momentum: decay rate of the heavy-ball momentum, in [0, 1).
        weight_decay: decoupled weight decay, as in AdamW.

    State per parameter: ``step``, and the tensors that a subclass lists, float32 and the same on
    all ranks.  Residuals are in the exchange: save ``exchange.state_dict()`` on every rank, too.

    Cost: one exchange per step (two collectives if it is sharded), and one number read back from
    the device, which tells whether the step is taken.

    Raises:
        ValueError: for hyperparameters out of range, and for an exchange that cannot be used.

    Not supported: sparse gradients, parameters on several devices, ``capturable``, copies, and
    freezing parameters later: their momenta and residuals still move them, with a warning.
    """

    # GradScaler then calls step() on every rank, instead of skipping it on those that overflowed
    # while the others wait for them, and passes grad_scale.
    _step_supports_amp_scaling = True

    _compiles = False

    _overwrites_gradients: ClassVar[bool] = True
    """Whether :meth:`_step` overwrites its argument, and so needs copies of the gradients."""

    _grows: ClassVar[bool] = True
    """Whether parameters may be added after the first step."""

    own_state: ClassVar[tuple[str, ...]] = ()
    """Keys of a parameter's state with values that differ between ranks: every rank saves them."""

    is_paused = False
    """Whether ``step()`` returns without doing anything."""

    overflow = False
    """Whether the last step was skipped, on all ranks alike, because some rank's message was not
    finite.  A DeepSpeed engine then counts a skipped step and does not advance its scheduler.
    """

    def __init__(
        self, params: ParamsT, exchange: Exchange, defaults: Group, **settings: Any
    ) -> None:
        """Check the arguments and store them.

        Args:
            params, exchange: see the class.
            defaults: default hyperparameters of the groups; their ranges are checked.
            settings: other settings, compared between ranks in the first exchange.
        """
        require_kind(self, "exchange", exchange, Exchange)
        check_hyperparameters(self, **defaults)
        params, left_out = without_frozen(params)
        self._frozen = FrozenParameters(self, left_out)
        super().__init__(local_shards(params), defaults)
        require_part_for_all(self, parameters_of(self.param_groups))
        self.exchange = exchange
        exchange.agree_on({"optimizer": type(self).__name__, **settings})
        exchange.owner, exchange.owner_counts = self, True

    def __getstate__(self) -> NoReturn:
        self._refuse_copies()

    @property
    def is_synchronized(self) -> bool:
        """Whether parameters and state, except for :attr:`own_state`, are equal on all ranks."""
        return True

    @property
    def model_parallel_groups(self) -> list[dist.ProcessGroup]:
        """The process groups over which the model itself is sharded (FSDP, tensor parallel).

        Their ranks hold different parts of the model, so messages are never averaged inside them.
        """
        return shard_groups(parameters_of(self.param_groups))

    @abstractmethod
    def _step(self, gradients: Tensors) -> None:
        """Make a message from the gradients, average it, and update the parameters.

        Args:
            gradients: this rank's gradients in float32, unscaled, in the order of
                :meth:`_parameters`; zeros for parameters without a gradient.  They are copies if
                ``_overwrites_gradients`` is true.
        """

    def add_param_group(self, param_group: Group) -> None:
        """Add a parameter group; all ranks must add it between the same two steps.

        Raises:
            ValueError: after the first step, unless ``_grows``; for names in use; for
                hyperparameters that are out of range or unknown; if all parameters are frozen.
        """
        check_own_settings(self, param_group, self.defaults)
        settings = {key: param_group.get(key, value) for key, value in self.defaults.items()}
        check_hyperparameters(self, **settings)
        if self.state and not self._grows:
            raise ValueError(
                f"{type(self).__name__}: parameters cannot be added after the first step: the "
                "state would lack their earlier gradients. Make a new optimizer of all parameters"
            )
        (group,), left_out = without_frozen([param_group])
        super().add_param_group(local_shards([group])[0])
        try:
            require_distinct_names(self, names_of(self.param_groups))
        except ValueError:
            del self.param_groups[-1]
            raise
        self._frozen.added(self.param_groups[-1]["params"], left_out)
        self._companions = [TorchDistributed(group) for group in self.model_parallel_groups]

    def load_state_dict(self, state_dict: Group) -> None:
        for own, group in zip(self.param_groups, state_dict["param_groups"], strict=False):
            if missing := sorted((own.keys() & self.defaults.keys()) - group.keys()):
                raise ValueError(
                    f"{type(self).__name__}: the state is of another optimizer: its groups have no "
                    f"{', '.join(missing)}"
                )
        super().load_state_dict(state_dict)

    def _take_step(self) -> None:
        self.overflow = False
        if self.is_paused:
            return
        with self.exchange.failing_together(), local_gradients(self._parameters()):
            self._frozen.check()
            gradients = self._gradients()
            self.exchange.count_gradients(sum(p.nbytes for p in self._parameters()))
            self._step(gradients)

    def hyperparameters(self) -> dict[str, Any]:
        """Return the settings of the next step, which every exchange compares between ranks."""
        return hyperparameters_of(self.param_groups)

    def replica(self) -> Sequence[torch.Tensor]:
        """Return the parameters, which are the same on all ranks before every exchange."""
        return self._parameters()

    def names(self) -> Sequence[str]:
        """Return the names of the exchanged messages: those of parameters that are not empty."""
        named = zip(names_of(self.param_groups), parameters_of(self.param_groups), strict=True)
        return [name for name, parameter in named if parameter.numel()]

    def _parameters(self) -> Tensors:
        """Return the parameters that are not empty, in the order of the groups."""
        return [parameter for group in self.param_groups for parameter in held(group)]

    def _average(
        self,
        message: Mapping[str, torch.Tensor],
        *,
        compress: bool | Compressor = True,
        is_raw: bool = False,
    ) -> bool:
        """Replace the message, in place, by its mean over ranks; return whether it is finite.

        Reads one number back from the device.  If any rank's message is not finite, all elements
        become NaN, and the result is False on the ranks that hold other shards of the model, too.

        Args:
            message: the tensors by name.
            compress: see :meth:`~comm_hooks.Exchange.average_`.
            is_raw: whether the message is the gradients, with no more digits than they had.
        """
        dtypes = {p.dtype for p in self._parameters()}
        # A GradScaler's division makes numbers that float16 cannot hold.
        known = {torch.float64, torch.bfloat16} if is_raw else {torch.float64}
        dtype = next(iter(dtypes)) if len(dtypes) == 1 and dtypes <= known else None
        self.exchange.average_(message, compress=compress, dtype=dtype)
        first = next(iter(message.values()))
        found = torch.isfinite(first[(0,) * first.dim()])
        finite = bool(found_by_all(self._companions, found) if self._companions else found)
        self.overflow = not finite
        return finite

    def _groups(self) -> Iterator[tuple[slice, Group]]:
        """Yield (slice of :meth:`_parameters`, group) for each group not empty on this rank."""
        first = 0
        for group in self.param_groups:
            last = first + len(held(group))
            if last > first:
                yield slice(first, last), group
            first = last

    def _descend(self, directions: Tensors) -> None:
        """Decay the weights, and move each parameter by -lr times its direction."""
        for own, group in self._groups():
            descend_(held(group), directions[own], group)

    def _descend_with_momentum(self, directions: Tensors, states: States) -> None:
        """Move parameters as :meth:`_descend` does, along momenta in groups with momentum > 0."""
        for own, group in self._groups():
            updates = directions[own]
            if group["momentum"]:
                buffers = zeros(states[own], "momentum_buffer", updates)
                updates = momentum_(buffers, updates, group["momentum"])
            descend_(held(group), updates, group)

    def _named(self, tensors: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        return dict(zip(self.names(), tensors, strict=True))

    def _states(self, *keys: str) -> list[dict[str, torch.Tensor]]:
        """Return each parameter's state; a new state has float32 zeros under ``keys``."""
        parameters = self._parameters()
        states = [self.state[p] for p in parameters]
        new = [i for i, state in enumerate(states) if not state]
        prepared([states[i] for i in new], [parameters[i] for i in new], torch.float32, *keys)
        return states

    def _gradients(self) -> Tensors:
        """Return float32 gradients, divided by ``grad_scale``; copies if a step changes them."""
        grad_scale: torch.Tensor | None = getattr(self, "grad_scale", None)
        copy = self._overwrites_gradients or grad_scale is not None
        gradients, frozen = [], []
        for place, parameter in enumerate(self._parameters()):
            gradient = parameter.grad
            if gradient is None:
                gradients.append(torch.zeros_like(parameter, dtype=torch.float32))
                if not trains(parameter):
                    frozen.append(place)
                continue
            check_gradient(self, gradient)
            gradients.append(gradient.to(torch.float32, copy=copy))
        if frozen:
            names = self.names()
            self._frozen.check_later([names[place] for place in frozen])
        require_unaveraged(self, self._parameters())
        if grad_scale is not None:
            torch._foreach_div_(gradients, grad_scale)
        return gradients

"""The base classes of all optimizers: steps, loading of states, and names of parameters."""

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn, overload

import torch

from comm_hooks.optim.hyperparameters import (
    check_gradient,
    check_hyperparameters,
    check_own_settings,
)

Tensors = list[torch.Tensor]
Group = dict[str, Any]
States = Sequence[dict[str, Any]]


class SteppingOptimizer(torch.optim.Optimizer):
    """An optimizer that implements :meth:`_take_step` in place of :meth:`step`."""

    _compiles: ClassVar[bool] = True
    """Whether a step may be part of a graph of ``torch.compile``."""

    averaging_ruled_out = False
    """Whether it is known that DDP and FSDP do not average the gradients, which are exchanged."""

    published: ClassVar[Mapping[str, Any]]
    """The exchange in the method's paper, for :meth:`~comm_hooks.ExchangeSettings.from_dict`."""

    needs: ClassVar[tuple[str, ...]] = ()
    """Keys of :attr:`published`: settings that this optimizer requires of every exchange."""

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Take a step; if this optimizer exchanges, all ranks must take it together.

        Args:
            closure: a function that computes the gradients again and returns the loss.

        Raises:
            ValueError: if gradients are sparse; in the first step of an optimizer that exchanges,
                if DDP or FSDP has averaged the gradients.
            ConfigMismatchError: in the first exchange, if settings or models differ between ranks.
            PayloadError: in a later exchange, if models or settings of the ranks differ.
        """
        # Random draws and collectives cannot be part of a graph.
        if not self._compiles and torch.compiler.is_compiling():
            return torch.compiler.disable(self._step_with)(closure)
        return self._step_with(closure)

    def _step_with(self, closure: Callable[[], float] | None) -> float | None:
        """Evaluate the closure, if there is one, take a step, and return the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._take_step()
        return loss

    @abstractmethod
    def _take_step(self) -> None:
        """Update the parameters by the gradients in ``p.grad``."""

    def _refuse_copies(self) -> NoReturn:
        # The draws and messages of a step belong to this process: a copy would add the same noise.
        raise TypeError(
            f"{type(self).__name__} cannot be copied or pickled: save state_dict(), and load it "
            "into a new optimizer"
        )


class ExactStateOptimizer(SteppingOptimizer):
    """An optimizer that restores its state in the dtypes in which it was saved.

    :class:`torch.optim.Optimizer` casts a loaded state to the dtype of the parameters.  That rounds
    the float32 moments of a bfloat16 model, and turns indices and packed bits into floats.

    Not supported: tensors in lists or dicts within a parameter's state; they are cast.
    """

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the result of ``state_dict()``, bit for bit, on the devices of the parameters.

        Raises:
            ValueError: if the parameter groups differ, or if a subclass cannot continue from the
                state of the optimizer that saved it; nothing is changed.
        """
        seen: list[dict[str, Any]] = []

        def look(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
            seen.append(state)

        # Other hooks may replace the state; this one comes last and sees the final one.
        state = by_name(self, state_dict)
        # Settings that the state does not know stay as they are.
        state["param_groups"] = [
            {**{key: own[key] for key in self.defaults if key in own}, **group}
            for own, group in zip(self.param_groups, state["param_groups"], strict=False)
        ] + state["param_groups"][len(self.param_groups) :]
        groups = self.param_groups
        with self.register_load_state_dict_pre_hook(look):
            super().load_state_dict(state)
        for own, loaded in zip(groups, self.param_groups, strict=True):
            own.clear()  # a scheduler or another optimizer may hold the same dictionary
            own.update(loaded)
        self.param_groups = groups
        saved = seen[0]
        keys = [key for group in saved["param_groups"] for key in group["params"]]
        for key, parameter in zip(keys, parameters_of(self.param_groups), strict=True):
            for name, value in saved["state"].get(key, {}).items():
                if isinstance(value, torch.Tensor):
                    device = self.state[parameter][name].device
                    # A copy: the same state may be loaded once more.
                    self.state[parameter][name] = value.to(device, copy=True)

    def _parameters(self) -> Tensors:
        """Return all parameters in the order of the groups."""
        return parameters_of(self.param_groups)


class BatchedOptimizer(ExactStateOptimizer):
    """An optimizer that updates parameters of one device and dtype together.

    A subclass implements :meth:`_update`.  Parameters without a gradient stay as they are.
    """

    def _check_group(self, settings: Group) -> None:
        """Raise ``ValueError`` for hyperparameters of a parameter group that are out of range."""
        check_hyperparameters(self, **settings)

    @abstractmethod
    def _update(self, parameters: Tensors, group: Group) -> None:
        """Update parameters of one group, one device and one dtype; all have gradients."""

    def _check_step(self, gradients: Sequence[torch.Tensor]) -> None:
        """Raise ``ValueError`` for unsupported gradients, before a step changes anything."""
        for gradient in gradients:
            check_gradient(self, gradient)

    def add_param_group(self, param_group: Group) -> None:
        """Add a parameter group; hyperparameters that it does not set take the default values.

        Raises:
            ValueError: for hyperparameters that are out of range, or that this optimizer does not
                have; nothing is changed.
        """
        check_own_settings(self, param_group, self.defaults)
        self._check_group({key: param_group.get(key, self.defaults[key]) for key in self.defaults})
        super().add_param_group(param_group)

    def _take_step(self) -> None:
        work = [
            (group, [p for p in group["params"] if p.grad is not None])
            for group in self.param_groups
        ]
        self._check_step([p.grad for _, parameters in work for p in parameters])
        for group, parameters in work:
            batches: dict[tuple[torch.device, torch.dtype], Tensors] = {}
            for parameter in parameters:
                batches.setdefault((parameter.device, parameter.dtype), []).append(parameter)
            for members in batches.values():
                self._update(members, group)


def held(group: Mapping[str, Any]) -> Tensors:
    """Return the non-empty parameters of a group.

    In a sharded model, this rank's shard of a small parameter may be empty.
    """
    return [parameter for parameter in group["params"] if parameter.numel()]


def parameters_of(groups: Sequence[Mapping[str, Any]]) -> Tensors:
    """Return the parameters of all groups, in the order of the groups."""
    return [p for group in groups for p in group["params"]]


def names_of(groups: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the parameters' names, without torch.compile's prefix; if unnamed, their indices."""
    names = [name for group in groups for name in _plain(group)]
    count = len(parameters_of(groups))
    return names if len(names) == count else [str(index) for index in range(count)]


def by_name(
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    names: Sequence[Sequence[str]] | None = None,
) -> dict[str, Any]:
    """Return a saved state with the parameters of each group in the order that they have here.

    Torch's optimizers load by position.  Groups without names, and all of a state with another
    number of groups, stay as they are.

    Args:
        optimizer: the optimizer that is to load the state.
        state: its saved state.
        names: the names of each group's parameters; by default those in its groups.

    Raises:
        ValueError: if a group has parameters of other names.

    Example::

        >>> first, second = torch.zeros(2, requires_grad=True), torch.ones(3, requires_grad=True)
        >>> saved = torch.optim.SGD([("a", first), ("b", second)], lr=0.1).state_dict()
        >>> other = torch.optim.SGD([("b", second), ("a", first)], lr=0.1)
        >>> by_name(other, saved)["param_groups"][0]["params"]
        [1, 0]
    """
    name, groups = type(optimizer).__name__, []
    own = names or [_plain(group) for group in optimizer.param_groups]
    for index, (saved, here) in enumerate(zip(state["param_groups"], own, strict=False)):
        there = _plain(saved)
        # A framework may have made one tensor of several parameters.
        if there and here and len(there) == len(saved["params"]):
            if sorted(there) != sorted(here):
                odd = sorted(set(there) ^ set(here))[0]
                where = "in the state" if odd in there else "here"
                raise ValueError(
                    f"{name}: parameter group {index} of the state has other parameters than here: "
                    f"{odd!r} is only {where}"
                )
            numbers = dict(zip(there, saved["params"], strict=True))
            saved = {**saved, "params": [numbers[n] for n in here], "param_names": list(here)}
        groups.append(saved)
    return {**state, "param_groups": [*groups, *state["param_groups"][len(groups) :]]}


def _plain(group: Mapping[str, Any]) -> list[str]:
    """Return the names of a group's parameters, without the prefix that torch.compile adds."""
    return [name.replace("_orig_mod.", "") for name in group.get("param_names") or ()]


def require_distinct_names(owner: object, names: Sequence[str]) -> None:
    """Raise ``ValueError`` if two parameters have the same name: saved state is found by name."""
    counts = Counter(names)
    if repeated := sorted(name for name, count in counts.items() if count > 1):
        name = owner if isinstance(owner, str) else type(owner).__name__
        raise ValueError(
            f"{name}: {counts[repeated[0]]} parameters have the name {repeated[0]!r}: saved "
            "state is found by name, so take all names from one module with all of them, such as "
            "torch.nn.ModuleDict({'encoder': encoder, 'decoder': decoder}).named_parameters()"
        )


def block(**settings: Any) -> Mapping[str, Any]:
    """Return the settings as a mapping for :meth:`~comm_hooks.ExchangeSettings.from_dict`."""
    return settings


def widened(tensors: Sequence[torch.Tensor | None], dtype: torch.dtype) -> Tensors:
    """Return the tensors, None left out, in ``dtype``; tensors of that dtype are not copied."""
    return [tensor.to(dtype) for tensor in tensors if tensor is not None]


def state_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the state of a ``dtype`` parameter: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32

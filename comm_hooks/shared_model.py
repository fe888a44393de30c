"""Make ``eval()`` and ``state_dict()`` of a model use the values that all ranks share.

With an optimizer of local steps (``LocalRounds``), ranks have different values between exchanges.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import nn

from comm_hooks.shards import like_whole, whole
from comm_hooks.warnings import warn_program


def attach_shared_model(module: nn.Module, rounds: Any) -> None:
    """Make ``eval()`` and ``state_dict()`` of a module use the values that all ranks share.

    1. ``module.eval()`` replaces this rank's values of the parameters by the shared values,
       ``module.train()`` restores this rank's values, except for parameters that were written to
       in between; ``rounds`` refuses a step in evaluation mode.  The same holds for submodules
       that hold all of the parameters, such as a model inside a module that returns its loss;
    2. ``state_dict()``, also of any submodule, returns copies of the shared values in either mode;
    3. after ``load_state_dict()``, also of any submodule, local steps go on from loaded values;
    4. a copy or pickle of the module, or of a submodule, is a plain one with the shared values.

    If other code has written to parameters since the last step, the written values count as
    progress of this rank, with a warning, and items 1 and 2 have no effect.

    The shared values include those of buffers that are averaged.  Optimizers that were attached
    before are detached; a module in evaluation mode keeps its present values.

    Args:
        module: the module with the parameters of ``rounds``, without a wrapper: ``train()`` of a
            wrapper calls that of the module.
        rounds: :class:`~comm_hooks.optim.LocalRounds` over parameters of the module.

    Example::

        >>> from comm_hooks import ErrorFeedback, Exchange, TopK
        >>> from comm_hooks.shared_model import attach_shared_model
        >>> from comm_hooks.optim import LocalRounds
        >>> inner = torch.optim.SGD(model.named_parameters(), lr=1.0)
        >>> rounds = LocalRounds(inner, Exchange(TopK(), ErrorFeedback()), local_steps=8)
        >>> attach_shared_model(model, rounds)
        >>> before = model.weight.detach().clone()
        >>> model(torch.ones(1, 8)).sum().backward()
        >>> rounds.step()
        >>> torch.equal(model.weight, before), torch.equal(model.eval().weight, before)
        (False, True)
    """
    earlier = {view for part in module.modules() if (view := _VIEWS.get(part))}
    for view in earlier:
        view.end()
    if earlier and not rounds.steps:
        rounds.restart()  # from the model of the earlier rounds
    view = _View(rounds)
    rounds.register_step_pre_hook(view.check)
    own = {id(whole(p)) for p in rounds.parameters}
    for part in module.modules():
        held = own & {id(p) for p in part.parameters()}
        if held == own:
            # On the instance: frameworks and users call module.train() and module.eval().
            part.train = _Train(part, view)  # type: ignore[method-assign]
        if held or any(True for _ in part.buffers()):
            _VIEWS[part] = view
            part.__reduce_ex__ = functools.partial(_reduce, part)  # type: ignore[method-assign]
            view.add_hooks(part, is_root=part is module)


def show_model(module: nn.Module, *, shared: bool) -> None:
    """Set a module's parameters to the shared or to this rank's values, and keep its mode.

    For frameworks that restore the mode of modules without calling ``train()``, or that begin a
    stage by sending rank 0's parameters to all ranks.  Has no effect on a module that was not
    passed to :func:`attach_shared_model`.

    Example::

        >>> from comm_hooks import register
        >>> from comm_hooks.shared_model import show_model
        >>> from comm_hooks.optim import low_communication
        >>> rounds = low_communication(model.named_parameters(), lr=0.01, bits_per_parameter=8.0)
        >>> _ = register(model, rounds)
        >>> show_model(model, shared=True)
        >>> model.training
        True
    """
    train = vars(module).get("train")
    if isinstance(train, _Train):
        train.show(not shared)


class _View:
    """A switch of a module's parameters between this rank's values and the shared values."""

    def __init__(self, rounds: Any) -> None:
        self._hooks: list[Any] = []
        self._rounds = rounds
        self._shown: ExitStack | None = None
        self._has_warned = False
        self._places = {id(p): place for place, p in enumerate(rounds.parameters)}
        self._copies: WeakValueDictionary[int, torch.Tensor] = WeakValueDictionary()

    def add_hooks(self, part: nn.Module, *, is_root: bool) -> None:
        """Hook a submodule: saving takes the shared values, and loading sets the shared values."""
        rounds = self._rounds.round_state
        pending: list[tuple[list[int], Any, set[int], Any]] = []

        def saved(module: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
            if prefix and not is_root:
                return  # the hook of the module around this one does it
            values = self.values()
            for named in (module.named_parameters, module.named_buffers):
                for name, own in named(remove_duplicate=False):
                    # With keep_vars=True the state holds the parameter itself, which stays.
                    value = values.get(id(own))
                    if value is not None and state.get(prefix + name, own) is not own:
                        state[prefix + name] = value

        def to_load(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
            named: Any = module.named_parameters(recurse=False)
            places = rounds.places_of(p for name, p in named if prefix + name in state)
            named = module.named_buffers(recurse=False)
            held = {id(b) for name, b in named if prefix + name in state}
            own = rounds.own_values(places)
            pending[:] = [(places, own, held, None if own is None else rounds.buffers.copies())]

        def loaded(module: nn.Module, incompatible_keys: object) -> None:
            if pending:
                places, own, held, buffers = pending.pop()
                if places:
                    rounds.adopt(places, own)
                rounds.buffers.adopt(held, buffers)

        self._hooks += [
            part.register_state_dict_post_hook(_Hook(saved)),
            part.register_load_state_dict_pre_hook(_Hook(to_load)),
            part.register_load_state_dict_post_hook(_Hook(loaded)),
        ]

    def check(self, *_: object) -> None:
        """Warn before a step if code other than the optimizer has written to the parameters."""
        if self._shown is None and self._rounds.round_state.model.is_written_to:
            self._warn()

    def switch(self, is_training: bool) -> bool:
        """Set parameters to this rank's or to the shared values; return whether they changed."""
        if is_training and self._shown is not None:
            self._close(self._rounds.round_state.model.overwritten)
            return True
        if is_training or self._shown is not None:
            return False
        if self._rounds.round_state.model.is_written_to:
            self._warn()
            return False
        self._shown = ExitStack()
        self._shown.enter_context(self._rounds.server_parameters())
        return True

    def end(self) -> None:
        """Remove all hooks from the modules; their parameters keep the present values."""
        for hook in self._hooks:
            hook.remove()
        for part in [part for part, view in _VIEWS.items() if view is self]:
            del _VIEWS[part]
            vars(part).pop("train", None)
            del part.__reduce_ex__
        if self._shown is not None:
            self._close(self._rounds.parameters)

    def _close(self, kept: Sequence[torch.Tensor]) -> None:
        """Replace the shared values by this rank's, except for the parameters in ``kept``."""
        values = [(p.detach(), p.detach().clone()) for p in kept]
        shown, self._shown = self._shown, None
        assert shown is not None
        shown.close()
        with torch.no_grad():
            for parameter, value in values:
                parameter.copy_(value)

    def values(self) -> dict[int, torch.Tensor]:
        """Return copies of the shared values by ``id()`` of the parameter.

        Empty if code other than the optimizer has written to the parameters.
        """
        if self._rounds.round_state.model.is_written_to:
            self._warn()
            return {}
        pairs = zip(self._rounds.parameters, self._rounds.round_state.shared_values(), strict=True)
        shared = {id(whole(part)): like_whole(value, part) for part, value in pairs}
        return shared | self._rounds.round_state.buffers.values()

    def copies(self, module: nn.Module) -> dict[str, torch.Tensor]:
        """Return copies of the shared values of a module's own parameters and buffers, by name.

        A tensor that several modules share has one copy as long as that is in use.
        """
        state = self._rounds.round_state
        if state.model.is_written_to:
            return {}
        state.begin()
        found = {}
        for name, own in [*module._parameters.items(), *module._buffers.items()]:
            place = self._places.get(id(own))
            value = state.buffers.value(module, name) if place is None else state.model.value(place)
            if own is None or value is None:
                continue
            copied = self._copies.get(id(own))
            if copied is None or not torch.equal(copied, value):
                copied = value.clone()
                if isinstance(own, nn.Parameter):
                    copied = nn.Parameter(copied, requires_grad=own.requires_grad)
                self._copies[id(own)] = copied
            found[name] = copied
        return found

    def _warn(self) -> None:
        if self._rounds.steps and not self._has_warned:
            self._has_warned = True
            warn_program(
                f"{type(self._rounds).__name__}: parameters were written to after the last step by "
                "code other than the optimizer and load_state_dict(). The new values count as "
                "progress of this rank; until the next step, eval() and state_dict() use them "
                "instead of the shared values. If all ranks have written the same values, call "
                "restart() of this optimizer"
            )


_VIEWS: WeakKeyDictionary[nn.Module, _View] = WeakKeyDictionary()
"""The :class:`_View` of each module with an optimizer of local steps."""


class _Train:
    """A replacement for ``train()`` of a module, which ``eval()`` and wrappers call, too."""

    def __init__(self, module: nn.Module, view: _View) -> None:
        self._module = module
        self._view = view

    def __call__(self, mode: bool = True) -> nn.Module:
        self.show(mode)
        return type(self._module).train(self._module, mode)

    def show(self, own: bool) -> None:
        """Set the parameters to this rank's values if ``own``, else to the shared values."""
        if self._view.switch(own):
            for module in self._module.modules():
                if reshard := getattr(module, "reshard", None):
                    reshard()  # FSDP2 may hold whole parameters with the values of before

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (type(self._module).train, self._module)


def _reduce(module: nn.Module, protocol: Any) -> Any:
    """Return what makes a copy or pickle of a module: a plain module with the shared values."""
    reduced: Any = type(module).__reduce_ex__(module, protocol)
    if (view := _VIEWS.get(module)) is None:  # in a copy
        return reduced
    make, arguments, state, *rest = reduced
    shared = view.copies(module)
    state = {k: v for k, v in state.items() if k not in ("train", "__reduce_ex__")}
    for kind in ("_parameters", "_buffers"):
        state[kind] = {name: shared.get(name, own) for name, own in state[kind].items()}
    return make, arguments, state, *rest


class _Hook:
    """A hook of one module; in a copy or pickle of the module it does nothing."""

    def __init__(self, function: Callable[..., None] | None = None) -> None:
        self._function = function

    def __call__(self, *args: Any) -> None:
        if self._function is not None:
            self._function(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, ()

"""Let evaluation mode and ``state_dict()`` show the model that all ranks of rounds share.

Between exchanges each rank trains a model of its own.
"""

import functools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from comm_hooks.shards import like_whole, whole
from comm_hooks.warnings import warn_program


def attach_shared_model(module: nn.Module, rounds: Any) -> None:
    """Let evaluation mode and ``state_dict()`` of a module show the model that ranks share.

    1. ``module.eval()`` puts the shared values in place of this rank's, ``module.train()`` puts
       this rank's values back, except for parameters that were written to in between; the rounds
       refuse a step in evaluation mode.  The same holds for submodules that hold all of the
       parameters, such as a model inside of one that returns its loss;
    2. ``module.state_dict()``, also of any part, returns copies of the shared values in either
       mode;
    3. after ``module.load_state_dict()``, also of any part, the rounds go on from the loaded
       values.

    Where something else has written to parameters since the last step, the written values count as
    progress of this rank, with a warning, and the first two items do nothing.

    A copy or pickle of the model is a plain model with its present values.  Rounds that were
    attached before are detached; a model in evaluation mode keeps the values that it shows.

    Args:
        module: the module with the parameters of the rounds, without a wrapper, so that ``train()``
            of any of its wrappers reaches it.
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
        if held:
            _VIEWS[part] = view
            view.add_hooks(part, is_root=part is module)


def show_model(module: nn.Module, *, shared: bool) -> None:
    """Put the shared values, or this rank's own values, into a module without changing its mode.

    As ``module.eval()`` and ``module.train()`` do.  For frameworks that restore the mode of each
    module without calling ``train()``, or that begin a stage by sending rank 0's parameters to all.
    Nothing happens if the model is not one of rounds.

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
    """Switches the parameters of a module between this rank's values and the shared values."""

    def __init__(self, rounds: Any) -> None:
        self._hooks: list[Any] = []
        self._rounds = rounds
        self._shown: ExitStack | None = None
        self._has_warned = False

    def add_hooks(self, part: nn.Module, *, is_root: bool) -> None:
        """Let a part of the model save the shared values, and load values into the rounds."""
        rounds = self._rounds.round_state
        places: list[int] = []
        own: list[list[torch.Tensor] | None] = []

        def saved(module: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
            if prefix and not is_root:
                return  # the hook of the module around this one does it
            values = self.values()
            for name, parameter in module.named_parameters(remove_duplicate=False):
                # With keep_vars=True the state holds the parameter itself, which stays.
                if id(parameter) in values and state.get(prefix + name, parameter) is not parameter:
                    state[prefix + name] = values[id(parameter)]

        def to_load(module: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
            named = module.named_parameters(recurse=False)
            places[:] = rounds.places_of(p for name, p in named if prefix + name in state)
            own[:] = [rounds.own_values(places)]

        def loaded(module: nn.Module, incompatible_keys: object) -> None:
            if places:
                rounds.adopt(places.copy(), own.pop())
            places.clear()

        self._hooks += [
            part.register_state_dict_post_hook(_Hook(saved)),
            part.register_load_state_dict_pre_hook(_Hook(to_load)),
            part.register_load_state_dict_post_hook(_Hook(loaded)),
        ]

    def check(self, *_: object) -> None:
        """Warn before a step if something else has written to the parameters."""
        if self._shown is None and self._rounds.round_state.model.is_written_to:
            self._warn()

    def switch(self, is_training: bool) -> bool:
        """Show this rank's values or the shared ones; return whether the parameters changed."""
        if is_training and self._shown is not None:
            self._close(self._rounds.round_state.overwritten)
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
        """Detach the rounds from the modules, which keep their present values."""
        for hook in self._hooks:
            hook.remove()
        for part in [part for part, view in _VIEWS.items() if view is self]:
            del _VIEWS[part]
            vars(part).pop("train", None)
        if self._shown is not None:
            self._close(self._rounds.parameters)

    def _close(self, kept: Sequence[torch.Tensor]) -> None:
        """Put this rank's values back, but keep the present values of the parameters ``kept``."""
        values = [(p.detach(), p.detach().clone()) for p in kept]
        shown, self._shown = self._shown, None
        assert shown is not None
        shown.close()
        with torch.no_grad():
            for parameter, value in values:
                parameter.copy_(value)

    def values(self) -> dict[int, torch.Tensor]:
        """Return copies of the shared values by ``id()`` of the parameter.

        Empty if something else has written to the parameters.
        """
        if self._rounds.round_state.model.is_written_to:
            self._warn()
            return {}
        pairs = zip(self._rounds.parameters, self._rounds.round_state.shared_values(), strict=True)
        return {id(whole(part)): like_whole(value, part) for part, value in pairs}

    def _warn(self) -> None:
        if self._rounds.steps and not self._has_warned:
            self._has_warned = True
            warn_program(
                "parameters were written to after the last step, by something other than the "
                "optimizer and load_state_dict(): that counts as progress of this rank, and until "
                "the next step evaluation mode and state_dict() show this rank's values. If all "
                "ranks have set the same values, call restart() of the rounds",
            )


_VIEWS: WeakKeyDictionary[nn.Module, _View] = WeakKeyDictionary()
"""The view that each module shows."""


class _Train:
    """Replaces ``train()`` of a module, which ``eval()`` and the wrappers' ``train()`` call."""

    def __init__(self, module: nn.Module, view: _View) -> None:
        self._module = module
        self._view = view

    def __call__(self, mode: bool = True) -> nn.Module:
        self.show(mode)
        return type(self._module).train(self._module, mode)

    def show(self, own: bool) -> None:
        """Show this rank's own values, or else the shared values."""
        if self._view.switch(own):
            for module in self._module.modules():
                if reshard := getattr(module, "reshard", None):
                    reshard()  # FSDP2 may hold whole parameters with the values of before

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (type(self._module).train, self._module)


class _Hook:
    """A hook of one module: a copy of the module has one that does nothing."""

    def __init__(self, function: Callable[..., None] | None = None) -> None:
        self._function = function

    def __call__(self, *args: Any) -> None:
        if self._function is not None:
            self._function(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, ()

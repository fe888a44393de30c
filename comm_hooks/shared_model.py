"""Between exchanges replicas differ: whoever evaluates or saves a model gets what all share."""

import functools
from contextlib import ExitStack
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from comm_hooks.callers import warn_program
from comm_hooks.shards import like_whole, whole

State = dict[str, Any]


def show_server_model(module: nn.Module, rounds: Any) -> None:
    """Let a model in evaluation mode, and its ``state_dict()``, be the server's.

    1. ``module.eval()`` puts the server's values in place of this rank's, ``module.train()`` puts
       those back, but for parameters that were written to meanwhile; a step in evaluation mode is
       refused by the rounds.  So do those of parts of the module that hold all of the parameters,
       such as a model inside of one that returns its loss;
    2. ``module.state_dict()``, also of any part, returns copies of the server's values in either
       mode;
    3. ``module.load_state_dict()``, also of any part, is where the rounds go on from.

    Where the parameters were written to in another way since the last step, what was put there
    counts: the first two do nothing, and for the rounds it is progress of this rank.  A warning
    says so.

    A copy of the model, or what comes out of a pickle, is a plain one with the values it had.
    Where other rounds were shown so far, that ends; a model in evaluation mode keeps the values
    that it shows.

    Args:
        module: whose parameters, or some of them, the rounds work on; without wrapper, so that
            ``train()`` of any of its wrappers reaches it.
        rounds: :class:`~comm_hooks.optim.LocalRounds` over them.

    Example::

        >>> from comm_hooks import ErrorFeedback, Exchange, TopK
        >>> from comm_hooks.shared_model import show_server_model
        >>> from comm_hooks.optim import LocalRounds
        >>> inner = torch.optim.SGD(model.named_parameters(), lr=1.0)
        >>> rounds = LocalRounds(inner, Exchange(TopK(), ErrorFeedback()), local_steps=8)
        >>> show_server_model(model, rounds)
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
        rounds.restart()  # where the earlier rounds have left it
    view = _View(rounds)
    rounds.register_step_pre_hook(view.look)
    own = {id(whole(p)) for p in rounds.parameters}
    for part in module.modules():
        held = own & {id(p) for p in part.parameters()}
        if held == own:
            # On the instance: what frameworks and users call is module.train() and module.eval().
            part.train = _Switch(part, view)  # type: ignore[method-assign]
        if held:
            _VIEWS[part] = view
            to_load = _ToLoad(rounds)
            view.hooks += [
                part.register_state_dict_post_hook(_Saved(view, within=part is module)),
                part.register_load_state_dict_pre_hook(to_load),
                part.register_load_state_dict_post_hook(_Loaded(rounds, to_load)),
            ]


def show_own_model(module: nn.Module) -> None:
    """Put this rank's values back, as ``module.train()`` does, and leave all modes as they are.

    For frameworks that note the mode of each module and restore it without calling ``train()``.
    Nothing happens if the model is not one of rounds, or shows this rank's values.

    Example::

        >>> from comm_hooks import register
        >>> from comm_hooks.shared_model import show_own_model
        >>> from comm_hooks.optim import low_communication
        >>> rounds = low_communication(model.named_parameters(), lr=0.01, bits_per_parameter=8.0)
        >>> _ = register(model, rounds)
        >>> modes = [module.training for module in model.eval().modules()]
        >>> show_own_model(model)
        >>> modes == [module.training for module in model.modules()]
        True
    """
    _show(module, own=True)


def show_shared_model(module: nn.Module) -> None:
    """Show the model that all ranks share, as ``module.eval()`` does, and leave all modes alone.

    For frameworks whose next stage begins by sending rank 0's parameters to all.  ``train()``, or
    :func:`show_own_model`, puts this rank's values back.  Nothing happens if the model is not one
    of rounds.

    Example::

        >>> from comm_hooks import register
        >>> from comm_hooks.shared_model import show_shared_model
        >>> from comm_hooks.optim import low_communication
        >>> rounds = low_communication(model.named_parameters(), lr=0.01, bits_per_parameter=8.0)
        >>> _ = register(model, rounds)
        >>> show_shared_model(model)
        >>> model.training
        True
    """
    _show(module, own=False)


def _show(module: nn.Module, *, own: bool) -> None:
    switch = vars(module).get("train")
    if isinstance(switch, _Switch):
        switch.show(own)


class _View:
    """The rounds' model, shown or not.

    Attributes:
        hooks: of the modules that show it.
    """

    def __init__(self, rounds: Any) -> None:
        self.hooks: list[Any] = []
        self._rounds = rounds
        self._shown: ExitStack | None = None
        self._has_warned = False

    def look(self, *_: object) -> None:
        """Before a step, warn if somebody else has written to the parameters."""
        if self._shown is None and self._rounds.round_state.is_written_to:
            self._warn()

    def switch(self, is_training: bool) -> bool:
        """Show this rank's model or the server's; return whether that changed the parameters."""
        if is_training and self._shown is not None:
            overwritten = self._rounds.round_state.overwritten
            written = [(p.detach(), p.detach().clone()) for p in overwritten]
            shown, self._shown = self._shown, None
            shown.close()
            with torch.no_grad():
                for parameter, value in written:
                    parameter.copy_(value)
            return True
        if not is_training and self._shown is None:
            if self._rounds.round_state.is_written_to:
                self._warn()
                return False
            self._shown = ExitStack()
            self._shown.enter_context(self._rounds.server_parameters())
            return True
        return False

    def end(self) -> None:
        """Leave the modules as they are, and alone from now on."""
        for hook in self.hooks:
            hook.remove()
        for part in [part for part, view in _VIEWS.items() if view is self]:
            del _VIEWS[part]
            vars(part).pop("train", None)
        if self._shown is not None:
            shared = [(p.detach(), p.detach().clone()) for p in self._rounds.parameters]
            self._shown.close()
            self._shown = None
            with torch.no_grad():
                for parameter, value in shared:
                    parameter.copy_(value)

    def values(self) -> dict[int, torch.Tensor]:
        """Return copies of the server's values by the parameters' ids.

        Nothing where somebody else has written to the parameters.
        """
        if self._rounds.round_state.is_written_to:
            self._warn()
            return {}
        pairs = zip(self._rounds.parameters, self._rounds.round_state.shared_values(), strict=True)
        return {id(whole(part)): like_whole(value, part) for part, value in pairs}

    def _warn(self) -> None:
        if self._rounds.steps and not self._has_warned:
            self._has_warned = True
            warn_program(
                "parameters were written to after the last step, by something other than the "
                "optimizer and load_state_dict(): that counts as progress of this rank, of which "
                "the others receive little, and until the next step evaluation mode and "
                "state_dict() show this rank's values. If all ranks have set them alike, call "
                "restart() of the rounds",
            )


_VIEWS: WeakKeyDictionary[nn.Module, _View] = WeakKeyDictionary()
"""What each module shows."""


class _Switch:
    """``train()`` of a module; also called by its ``eval()``, and by ``train()`` of wrappers."""

    def __init__(self, module: nn.Module, view: _View) -> None:
        self._module = module
        self._view = view

    def __call__(self, mode: bool = True) -> nn.Module:
        self.show(mode)
        return type(self._module).train(self._module, mode)

    def show(self, own: bool) -> None:
        """Show this rank's model or the server's."""
        if self._view.switch(own):
            for module in self._module.modules():
                if reshard := getattr(module, "reshard", None):
                    reshard()  # FSDP2 may still hold whole parameters of before

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (type(self._module).train, self._module)


class _Saved:
    """Puts the server's values into what ``state_dict()`` returns.

    Args:
        view: of the rounds.
        within: also if the call was to a module around this one.
    """

    def __init__(self, view: _View, *, within: bool) -> None:
        self._view = view
        self._within = within

    def __call__(self, module: nn.Module, state: State, prefix: str, metadata: object) -> None:
        if prefix and not self._within:
            return
        values = self._view.values()
        for name, parameter in module.named_parameters(remove_duplicate=False):
            # The parameter itself is there with keep_vars=True: who asks for it wants no copy.
            if id(parameter) in values and state.get(prefix + name, parameter) is not parameter:
                state[prefix + name] = values[id(parameter)]

    def __reduce__(self) -> tuple[Any, ...]:
        return _Unchanged, ()


class _ToLoad:
    """Notes for which of a module's own parameters ``load_state_dict()`` has values.

    Attributes:
        places: of those that the rounds work on.
        own: what the rounds want to know of before.
    """

    def __init__(self, rounds: Any) -> None:
        self._rounds = rounds
        self.places: list[int] = []
        self.own: list[torch.Tensor] | None = None

    def __call__(self, module: nn.Module, state: State, prefix: str, *_: object) -> None:
        own = module.named_parameters(recurse=False)
        rounds = self._rounds.round_state
        self.places = rounds.places_of(p for name, p in own if prefix + name in state)
        self.own = rounds.own_values(self.places)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Unchanged, ()


class _Loaded:
    """Lets the rounds go on from those values."""

    def __init__(self, rounds: Any, to_load: _ToLoad) -> None:
        self._rounds = rounds
        self._to_load = to_load

    def __call__(self, module: nn.Module, incompatible_keys: object) -> None:
        places, self._to_load.places = self._to_load.places, []
        own, self._to_load.own = self._to_load.own, None
        if places:
            self._rounds.round_state.adopt(places, own)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Unchanged, ()


class _Unchanged:
    """What a copy of a model has in place of its hooks."""

    def __call__(self, *_: object) -> None:
        pass

"""The model that was registered: what a step checks before it trains another one in silence."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import is_
from typing import Any, Protocol

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.weak import WeakIdKeyDictionary


class RegisteredModel:
    """The parameters of a module at its registration.

    ``load_state_dict(assign=True)``, a new head, ``weight_norm`` or an adapter put other parameters
    in their place, which DDP, a hook and an optimizer do not know.

    Args:
        module: the module.
        is_fixed: whether parameters must keep dtype and device, since DDP has made buckets of them.
    """

    def __init__(self, module: nn.Module, *, is_fixed: bool) -> None:
        self._module = weakref.ref(module)
        self._names = dict(_named(module))
        self._frozen = [p for p in self._names.values() if not p.requires_grad]
        self._kinds = [(p, p.dtype, p.device) for p in self._names.values() if is_fixed]
        held = [d for part in module.modules() for d in (part._parameters, part._modules)]
        self._held: list[tuple[dict[str, Any], list[Any]]] = [(d, [*d.values()]) for d in held]

    def require_unchanged(self) -> None:
        """Raise ``ValueError``, naming a parameter, if the module has others than it had."""
        same = all(
            len(d) == len(before) and all(map(is_, d.values(), before)) for d, before in self._held
        )
        changed = [p for p in self._frozen if p.requires_grad]
        changed += [p for p, *kind in self._kinds if kind != [p.dtype, p.device]]
        if same and not changed:
            return
        module = self._module()
        now = {} if module is None else dict(_named(module))
        found = [f"{name!r} is new" for name in now if name not in self._names]
        for name, parameter in self._names.items():
            if now.get(name) is not parameter:
                found.append(f"{name!r} is gone" if name not in now else f"{name!r} is another one")
            elif any(parameter is each for each in changed):
                found.append(f"{name!r} was moved, cast or unfrozen")
        if found:
            raise ValueError(
                f"the parameters of this model have changed since register(): {found[0]}"
                + (f", and {len(found) - 1} others" if found[1:] else "")
                + ". Change the model first, then wrap it, make the optimizer and register; load "
                "states with load_state_dict(assign=False)"
            )


class Watched(Protocol):
    """A state that is asked before every step of an optimizer of its parameters."""

    def check_step(self, optimizer: Optimizer) -> None:
        """Raise ``ValueError`` if the step would use gradients that were not exchanged."""


_watched: Any = WeakIdKeyDictionary()
"""The state, as a weak reference, of each watched parameter."""
_of_optimizer: weakref.WeakKeyDictionary[Optimizer, tuple[int, list[weakref.ref[Any]]]] = (
    weakref.WeakKeyDictionary()
)
_handles: list[object] = []


def watch(parameters: Iterable[torch.Tensor], state: Watched) -> None:
    """Call ``state.check_step(optimizer)`` at each step of an optimizer of the parameters.

    Before the step, or after one that has computed the gradients itself, by a closure.
    """
    _watched.update(dict.fromkeys(parameters, weakref.ref(state)))
    _of_optimizer.clear()
    if not _handles:
        # Two hooks for all optimizers that stay: they cannot be removed while they run.
        _handles.append(register_optimizer_step_pre_hook(partial(_check, after=False)))
        _handles.append(register_optimizer_step_post_hook(partial(_check, after=True)))


def _check(
    optimizer: Optimizer, args: Sequence[Any], kwargs: Mapping[str, Any], *, after: bool
) -> None:
    # A closure computes the gradients within the step. Dynamo cannot trace the dictionaries.
    has_closure = len(args) > 1 or kwargs.get("closure") is not None
    if has_closure != after or torch.compiler.is_compiling():
        return
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    known = _of_optimizer.get(optimizer)
    if known is None or known[0] != count:
        states = (_watched.get(p) for group in optimizer.param_groups for p in group["params"])
        known = _of_optimizer[optimizer] = count, [*dict.fromkeys(filter(None, states))]
    for reference in known[1]:
        if (state := reference()) is not None:
            state.check_step(optimizer)


def _named(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    for name, parameter in module.named_parameters(remove_duplicate=False):
        yield name.replace("_orig_mod.", ""), parameter

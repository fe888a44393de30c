"""Frozen parameters: left out by optimizers that exchange, and checked for later changes."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from comm_hooks.shards import whole
from comm_hooks.warnings import warn_program


def trains(parameter: torch.Tensor) -> bool:
    """Return whether a parameter, or the whole parameter of a shard, trains and is not empty."""
    return whole(parameter).requires_grad and whole(parameter).numel() > 0


def without_frozen(params: Any) -> tuple[Any, list[torch.Tensor]]:
    """Return the parameters without the frozen and empty ones, and a list of the latter.

    Groups stay, even empty ones, so that schedulers find the number of groups that they expect.

    Args:
        params: parameters, named parameters or groups, as optimizers take them.

    Raises:
        ValueError: if all parameters are frozen.
    """
    if isinstance(params, torch.Tensor):
        return params, []  # which torch refuses in words of its own
    entries = list(params)
    has_groups = bool(entries) and isinstance(entries[0], Mapping)
    groups, left_out = [], []
    for group in entries if has_groups else [{"params": entries}]:
        members = group["params"]
        if isinstance(members, set):  # torch refuses that, too
            return entries, []
        members = [members] if isinstance(members, torch.Tensor) else list(members)
        kept = []
        for member in members:
            parameter = member[1] if isinstance(member, tuple) else member
            if isinstance(parameter, torch.Tensor) and not trains(parameter):
                left_out.append(parameter)
            else:
                kept.append(member)
        groups.append({**group, "params": kept})
        if members and not kept and isinstance(members[0], tuple):
            groups[-1]["param_names"] = []  # torch asks all groups for names, or none
    if left_out and not any(group["params"] for group in groups):
        raise ValueError("params: all the parameters are frozen (requires_grad=False)")
    return groups if has_groups else groups[0]["params"], left_out


class FrozenParameters:
    """A check for parameters that are frozen or unfrozen after an optimizer was constructed.

    Args:
        owner: the optimizer, for messages.
        left_out: the parameters that were frozen or empty at its construction.
    """

    def __init__(self, owner: object, left_out: Sequence[torch.Tensor]) -> None:
        self._name = type(owner).__name__
        self._left_out = list(left_out)
        self._has_warned = False

    def added(self, parameters: Iterable[torch.Tensor], left_out: Sequence[torch.Tensor]) -> None:
        """Record an added group: ``parameters`` are trained, ``left_out`` are frozen or empty."""
        new = {id(whole(parameter)) for parameter in parameters}
        self._left_out = [p for p in (*self._left_out, *left_out) if id(whole(p)) not in new]

    def check(self) -> None:
        """Raise ``ValueError`` if a parameter that was left out now requires a gradient."""
        if count := sum(map(trains, self._left_out)):
            raise ValueError(
                f"{self._name}: {count} parameters that were frozen when it was made require a "
                "gradient now, but are not part of it: make a new optimizer after unfreezing"
            )

    def check_later(self, frozen: Sequence[str]) -> None:
        """Warn, once, if parameters of the optimizer were frozen after its construction.

        Args:
            frozen: the names of these parameters.
        """
        if frozen and not self._has_warned:
            self._has_warned = True
            warn_program(
                f"{self._name}: {len(frozen)} parameters were frozen after it was made, the first "
                f"of them {frozen[0]}: their momenta and residuals still move them. Make a "
                "new optimizer to stop that"
            )

"""Parameters that do not train: optimizers that exchange leave them alone, and tell of changes."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from comm_hooks.shards import whole


def trains(parameter: torch.Tensor) -> bool:
    """Return whether a parameter, or the one that it is a part of, requires a gradient."""
    return whole(parameter).requires_grad


def without_frozen(params: Any) -> tuple[Any, list[torch.Tensor]]:
    """Return parameters without those that do not require a gradient, and the latter.

    Groups stay, also those of which nothing is left, so that schedulers find what they expect.

    Args:
        params: parameters, named parameters or groups, as optimizers take them.

    Raises:
        ValueError: if nothing is left.

    Example::

        >>> from comm_hooks.optim.frozen import without_frozen
        >>> frozen = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
        >>> kept, left_out = without_frozen([*model.parameters(), frozen])
        >>> len(kept), left_out == [frozen]
        (2, True)
    """
    if isinstance(params, torch.Tensor):
        return params, []  # which torch refuses in words of its own
    entries, left_out = list(params), []
    if not entries:
        return entries, []
    named = False

    def kept(members: Iterable[Any]) -> list[Any]:
        nonlocal named
        result = []
        for member in members:
            is_pair = isinstance(member, tuple)
            parameter = member[1] if is_pair else member
            named |= is_pair
            if isinstance(parameter, torch.Tensor) and not trains(parameter):
                left_out.append(parameter)
            else:
                result.append(member)
        return result

    if not isinstance(entries[0], Mapping):
        result: list[Any] = kept(entries)
        is_empty = not result
    else:
        result = []
        for group in entries:
            members = group["params"]
            if isinstance(members, set):  # which torch refuses
                return entries, []
            members = [members] if isinstance(members, torch.Tensor) else members
            result.append({**group, "params": kept(members)})
        is_empty = not any(group["params"] for group in result)
        if named:
            for group in result:
                if not group["params"]:
                    group["param_names"] = []
    if is_empty and left_out:
        raise ValueError("the parameters are frozen (requires_grad=False): nothing would train")
    return result, left_out


class FrozenParameters:
    """What an optimizer has left out, and what is frozen later.

    Args:
        owner: the optimizer, whose class messages name.
        left_out: the parameters that did not train when it was made.
    """

    def __init__(self, owner: object, left_out: Sequence[torch.Tensor]) -> None:
        self._name = type(owner).__name__
        self._left_out = list(left_out)
        self._has_warned = False

    def added(self, parameters: Iterable[torch.Tensor]) -> None:
        """Forget those that the optimizer works on from now on."""
        new = {id(whole(parameter)) for parameter in parameters}
        self._left_out = [p for p in self._left_out if id(whole(p)) not in new]

    def check(self) -> None:
        """Raise ``ValueError`` if what was left out trains by now: nobody would exchange it."""
        if count := sum(map(trains, self._left_out)):
            raise ValueError(
                f"{self._name}: {count} parameters that were frozen when it was made require a "
                "gradient now, and it knows nothing of them: make it anew after unfreezing"
            )

    def look(self, parameters: Iterable[torch.Tensor], names: Sequence[str]) -> None:
        """Warn, once, if what the optimizer works on has been frozen meanwhile."""
        if self._has_warned:
            return
        frozen = [n for p, n in zip(parameters, names, strict=True) if not trains(p)]
        if frozen:
            self._has_warned = True
            warnings.warn(
                f"{self._name}: {len(frozen)} parameters were frozen after it was made, the first "
                f"of them {frozen[0]}: what ranks had computed before, momenta and residuals, goes "
                "on moving them. Make it anew to stop that",
                stacklevel=6,
            )

"""Checks of hyperparameters and gradients, with the same messages for all optimizers."""

from collections.abc import Collection, Mapping
from typing import Any

import torch

from comm_hooks.requirements import in_one_line, refuse, require_flag, require_within

_FLAGS = ("bias_correction", "maximize", "nesterov")


def check_hyperparameters(owner: object, *, beta_count: int = 2, **values: Any) -> None:
    """Raise ``ValueError`` unless hyperparameters are in the range of the Adam family.

    Args:
        owner: the optimizer, or its name, for messages.
        beta_count: how many ``betas`` the optimizer has, if any.
        values: ``betas``, decay rates in [0, 1), since an average that decays by 1 never starts;
            names that end in ``momentum``, in [0, 1) too; ``bias_correction``, ``maximize`` and
            ``nesterov``, true or false; and numbers that are finite and at least 0.
    """
    for key, value in values.items():
        if key == "betas":
            if not isinstance(value, tuple | list) or len(value) != beta_count:
                refuse(owner, key, f"must be a tuple of {beta_count} numbers", value)
            for beta in value:
                require_within(owner, key, beta, "[0, 1)")
        elif key in _FLAGS:
            require_flag(owner, key, value)
        else:
            interval = "[0, 1)" if key.endswith("momentum") else "[0, inf)"
            require_within(owner, key, value, interval)


_OF_OTHERS = ("amsgrad", "centered", "dampening", "maximize", "momentum", "nesterov")


def check_own_settings(owner: object, group: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise ``ValueError`` if a parameter group has a setting that its optimizer does not have.

    The groups of another kind of optimizer have such settings.  Unknown keys, such as a user's own
    name for a group, are ignored.

    Args:
        owner: the optimizer, or its name, for messages.
        group: the parameter group.
        known: the names of the optimizer's settings.
    """
    name = owner if isinstance(owner, str) else type(owner).__name__
    for key in _OF_OTHERS:
        if key not in known and group.get(key):
            raise ValueError(
                f"{name}: a group has {key}={in_one_line(group[key])}, which {name} does not have: "
                "leave it out"
            )


def check_gradient(owner: object, gradient: torch.Tensor) -> None:
    """Raise ``ValueError`` for a gradient that is sparse or complex.

    Args:
        owner: the optimizer, or its name, for messages.
        gradient: the gradient of one parameter.
    """
    name = type(owner).__name__
    if gradient.layout is not torch.strided:
        raise ValueError(
            f"{name} does not support sparse gradients: use sparse=False in embeddings"
        )
    if gradient.is_complex():
        raise ValueError(
            f"{name} does not support complex gradients: make the real and the imaginary part "
            "parameters, see torch.view_as_complex"
        )

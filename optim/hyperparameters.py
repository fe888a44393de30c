"""What every optimizer refuses in its hyperparameters and gradients, in the same words."""

import math
from collections.abc import Sequence

import torch

from comm_hooks.compressors.base import require_positive


def check_hyperparameters(
    owner: object, *, betas: Sequence[float] = (), **non_negative: float
) -> None:
    """Raise ``ValueError`` unless hyperparameters are in the range of the Adam family.

    Args:
        owner: the optimizer, whose class the message names.
        betas: decay rates, each in [0, 1): an average that decays by 1 never starts.
        non_negative: everything else, finite and at least 0.

    Example::

        >>> check_hyperparameters(optimizer := object(), betas=(0.9, 0.999), lr=1e-3, eps=0.0)
        >>> check_hyperparameters(optimizer, lr=-1.0)
        Traceback (most recent call last):
        ValueError: object: lr must not be negative, got -1.0
    """
    name = type(owner).__name__
    for key, value in non_negative.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{name}: {key} must be a number, got {value!r}")
        if not value >= 0:  # NaN, too
            raise ValueError(f"{name}: {key} must not be negative, got {value!r}")
        if math.isinf(value):
            raise ValueError(f"{name}: {key} must be finite, got {value!r}")
    for beta in betas:
        if not 0 <= beta < 1:
            raise ValueError(f"{name}: betas must lie in [0, 1), got {betas!r}")


def check_freeze_step(owner: object, freeze_step: int, total_steps: int | None) -> None:
    """Raise ``ValueError`` for a warm-up that cannot be, or that takes up the whole run.

    Args:
        owner: the optimizer, whose class the message names.
        freeze_step: the last step with exact gradients, at least 1.
        total_steps: how many steps the run has; None if nobody knows.

    Example::

        >>> check_freeze_step(optimizer := object(), 20, 100)
        >>> check_freeze_step(optimizer, 1000, 100)
        Traceback (most recent call last):
        ValueError: object: freeze_step 1000 leaves none of total_steps 100 to compress: take 20 %
    """
    require_positive(owner, "freeze_step", freeze_step)
    if total_steps is None:
        return
    require_positive(owner, "total_steps", total_steps)
    if freeze_step >= total_steps:
        raise ValueError(
            f"{type(owner).__name__}: freeze_step {freeze_step} leaves none of total_steps "
            f"{total_steps} to compress: take 20 %"
        )


def check_gradient(owner: object, gradient: torch.Tensor) -> None:
    """Raise ``ValueError`` for a gradient that is sparse or complex.

    Args:
        owner: the optimizer, whose class the message names.
        gradient: of one parameter.

    Example::

        >>> check_gradient(object(), torch.zeros(2).to_sparse())
        Traceback (most recent call last):
        ValueError: object does not support sparse gradients: use sparse=False in embeddings
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

"""A warning where a compressor stands in front of an optimizer that it is known to mislead."""

import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from comm_hooks.compressors import (
    Cocktail,
    Compressor,
    DCTTopK,
    PermK,
    RandomK,
    Sign,
    TopK,
)

_SPARSE = (Cocktail, DCTTopK, PermK, RandomK, TopK)
_DENSE = 0.5
_ADAPTIVE = ("adam", "amsgrad", "lamb", "rmsprop", "adagrad", "adafactor")


def misleads(compressor: Compressor, optimizer: Optimizer) -> str | None:
    """Return why training under this optimizer ends worse than without exchange, or nearly so.

    Measured with Adam in ``docs/results.md``; optimizers that divide by a second moment of what
    arrives have it in common.
    """
    # A framework's wrapper is named after itself, or derives from what it wraps.
    kinds = [kind.__name__.lower() for kind in type(optimizer).__mro__]
    if not any(name in kind for kind in kinds for name in _ADAPTIVE):
        return None
    if any("freeze_step" in group for group in optimizer.param_groups):
        # The second moment stands still before what is compressed reaches it.
        return None
    if is_sparse(compressor):
        return "elements arrive in pulses, which its second moment takes for noise"
    if isinstance(compressor, Sign):
        return "signs erase the magnitudes that its second moment adapts to"
    return None


def is_sparse(compressor: Compressor) -> bool:
    """Return whether most elements wait for later steps."""
    return isinstance(compressor, _SPARSE) and getattr(compressor, "density", 0.0) < _DENSE


def warn_of(compressor: Compressor, optimizer: Optimizer) -> None:
    """Warn if a compressor misleads an optimizer."""
    if reason := misleads(compressor, optimizer):
        warnings.warn(
            f"{type(compressor).__name__} in front of {type(optimizer).__name__} can end worse "
            f"than no exchange at all: {reason}. comm_hooks.optim.low_communication, or "
            "LocalVarianceAdam with this compressor, divides before it exchanges",
            stacklevel=3,
        )


_watched: Any = WeakIdKeyDictionary()
"""Compressors by the parameters that no optimizer has moved yet."""


def watch(compressor: Compressor, parameters: Iterable[torch.Tensor]) -> None:
    """Warn, once, when an optimizer that a compressor misleads takes its first step.

    Args:
        compressor: of gradients.
        parameters: whose they are; which tells the optimizer.
    """
    global _handle
    if is_sparse(compressor) or isinstance(compressor, Sign):
        _watched.update(dict.fromkeys(parameters, compressor))
        # For all optimizers, and for good: it cannot be removed while it runs.
        _handle = _handle or register_optimizer_step_pre_hook(_look)


_handle: RemovableHandle | None = None


def _look(optimizer: Optimizer, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    # A step that is compiled may not meet what Dynamo cannot trace; it has been taken before.
    if torch.compiler.is_compiling() or not _watched:
        return
    own = (_watched.pop(p, None) for group in optimizer.param_groups for p in group["params"])
    compressors = {id(compressor): compressor for compressor in own if compressor is not None}
    for compressor in compressors.values():
        warn_of(compressor, optimizer)

"""Warnings that point to the user's program, and warnings of compressors that harm Adam."""

import sys
import sysconfig
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from comm_hooks.compressors import Cocktail, Compressor, DCTTopK, PermK, RandomK, Sign, TopK

_LIBRARIES = tuple(
    f"{folder}/"
    for folder in (
        Path(__file__).parent,
        *map(sysconfig.get_path, ("purelib", "platlib", "stdlib")),
    )
)
_SPARSE = (Cocktail, DCTTopK, PermK, RandomK, TopK)
_DENSE = 0.5
_ADAPTIVE = ("adam", "amsgrad", "lamb", "rmsprop", "adagrad", "adafactor")


def warn_program(message: str) -> None:
    """Issue a warning that points to the innermost line of the call stack outside of libraries.

    The depth of the stack varies: a learning rate scheduler, Accelerate and a trainer may stand
    between the program and the step, and some of them filter warnings at each other's lines.
    """
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def misleads(compressor: Compressor, optimizer: Optimizer) -> str | None:
    """Return the reason why compressed gradients harm an optimizer; None if they do not.

    Harmed are optimizers that divide by a second moment of the compressed gradients; measured with
    Adam in ``docs/results.md``.
    """
    # The wrapper of a framework has its own name or derives from the optimizer.
    kinds = [kind.__name__.lower() for kind in type(optimizer).__mro__]
    if not any(name in kind for kind in kinds for name in _ADAPTIVE):
        return None
    if _is_sparse(compressor):
        return "each element arrives in rare pulses, which its second moment takes for noise"
    if isinstance(compressor, Sign):
        return "signs erase the magnitudes that its second moment adapts to"
    return None


def warn_if_misled(compressor: Compressor, optimizer: Optimizer) -> None:
    """Warn if compressed gradients harm an optimizer; see :func:`misleads`."""
    if reason := misleads(compressor, optimizer):
        warn_program(
            f"{type(compressor).__name__} in front of {type(optimizer).__name__} can end worse "
            f"than no exchange at all: {reason}. Use comm_hooks.optim.low_communication, or "
            "LocalVarianceAdam with this compressor, which exchange after the division"
        )


_compressors: Any = WeakIdKeyDictionary()
"""The compressor of each parameter that no optimizer has updated yet."""
_handles: list[object] = []


def warn_at_first_step(compressor: Compressor, parameters: Iterable[torch.Tensor]) -> None:
    """Warn at the first optimizer step of the parameters if the compressor harms that optimizer."""
    if _is_sparse(compressor) or isinstance(compressor, Sign):
        _compressors.update(dict.fromkeys(parameters, compressor))
        if not _handles:
            # One hook for all optimizers that stays: it cannot be removed while it runs.
            _handles.append(register_optimizer_step_pre_hook(_check))


def _check(optimizer: Optimizer, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    # Dynamo cannot trace the dictionary; an eager step has come before a compiled one.
    if torch.compiler.is_compiling() or not _compressors:
        return
    found = [_compressors.pop(p, None) for group in optimizer.param_groups for p in group["params"]]
    for compressor in {id(c): c for c in found if c is not None}.values():
        warn_if_misled(compressor, optimizer)


def _is_sparse(compressor: Compressor) -> bool:
    """Return whether a compressor sends less than half of the elements in one step."""
    return isinstance(compressor, _SPARSE) and getattr(compressor, "density", 0.0) < _DENSE

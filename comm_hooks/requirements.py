"""Checks of arguments.  Error messages have one line: the argument, the rule and the value."""

import sys
from collections.abc import Sequence
from typing import NoReturn

import torch


def is_number(value: object) -> bool:
    """Return whether ``value`` is a float, or an int that a float can hold, and no boolean."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, float) or abs(value) <= sys.float_info.max


def in_one_line(value: object) -> str:
    """Return the ``repr`` of a value in one line, for messages."""
    try:
        return " ".join(repr(value).split())
    except ValueError:  # Python writes down no integer of more than 4,300 digits
        return f"a value of the class {type(value).__name__} that is too long to show"


def first_of(names: Sequence[str]) -> str:
    """Return text with the first name and the number of the other names, for a message."""
    return f"{names[0]!r}" + (f" and {len(names) - 1} more" if names[1:] else "")


def refuse(owner: object, name: str, requirement: str, value: object, why: str = "") -> NoReturn:
    """Raise ``ValueError`` for an argument of ``owner``: a function's name, or a class instance."""
    who = owner if isinstance(owner, str) else type(owner).__name__
    raise ValueError(f"{who}: {name} {requirement}, got {in_one_line(value)}{why}")


def require_within(owner: object, name: str, value: float, interval: str) -> None:
    """Raise ``ValueError`` unless ``value`` is a number in an interval such as ``"[0, 1)"``."""
    low, high = map(float, interval[1:-1].split(","))
    at_ends = (low,) * (interval[0] == "[") + (high,) * (interval[-1] == "]")
    if not is_number(value) or not (low < value < high or value in at_ends):
        refuse(owner, name, f"must lie in {interval}", value)


def require_kind(owner: object, name: str, value: object, *kinds: type) -> None:
    """Raise ``ValueError`` unless ``value`` is an instance of one of the classes."""
    if not isinstance(value, kinds):
        names = [kind.__name__ for kind in kinds]
        listed = " or ".join(f"an {n}" if n[0] in "AEIOU" else f"a {n}" for n in names)
        refuse(owner, name, f"must be {listed}", value)


def require_callable(owner: object, name: str, value: object, why: str = "") -> None:
    """Raise ``ValueError`` unless ``value`` can be called."""
    if not callable(value):
        refuse(owner, name, "must be callable", value, why)


def require_choice(owner: object, name: str, value: object, choices: Sequence[object]) -> None:
    """Raise ``ValueError`` unless ``value`` equals one of ``choices`` and has its type.

    True and 1.0 equal 1, but are refused if the choice is an integer.
    """
    fits = any(isinstance(value, type(choice)) and value == choice for choice in choices)
    if isinstance(value, bool) or not fits:
        refuse(owner, name, f"must be one of {', '.join(map(str, choices))}", value)


def require_positive(owner: object, name: str, value: int) -> None:
    """Raise ``ValueError`` unless ``value`` is an integer of at least 1 that 64 bits can hold."""
    require_integer(owner, name, value, "an integer of at least 1")
    if not 1 <= value < 1 << 63:
        below = " and below 2^63" if value > 1 else ""
        refuse(owner, name, f"must be an integer of at least 1{below}", value)


def require_integer(owner: object, name: str, value: int, what: str = "an integer") -> None:
    """Raise ``ValueError`` unless ``value`` is an integer; the message describes it as ``what``."""
    if isinstance(value, bool) or not isinstance(value, int):
        refuse(owner, name, f"must be {what}", value)


def require_flag(owner: object, name: str, value: bool) -> None:
    """Raise ``ValueError`` unless ``value`` is a boolean."""
    if not isinstance(value, bool):
        refuse(owner, name, "must be true or false", value)


def require_dense_floats(tensor: torch.Tensor) -> None:
    """Raise ``ValueError`` unless a tensor is dense and floating-point."""
    require_whole(tensor)
    if not tensor.is_floating_point() or tensor.is_sparse:
        raise ValueError(
            "Exchange: gradients must be dense and of a floating-point dtype to be compressed, got "
            f"{tensor.dtype} ({tensor.layout})"
        )


def require_whole(tensor: torch.Tensor) -> None:
    """Raise ``ValueError`` for a DTensor of FSDP2 or tensor parallelism."""
    if hasattr(tensor, "device_mesh"):
        raise ValueError(
            "Exchange: a DTensor (FSDP2, tensor parallelism) is sharded over ranks and cannot be "
            "exchanged: pass comm_hooks.shards.local_shards(model.named_parameters()) instead, and "
            "an exchange between the ranks that hold the same shards"
        )

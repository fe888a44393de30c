"""Dataclasses from plain data: the way back from ``json.loads`` and ``dataclasses.asdict``."""

import math
import types
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Union, get_args, get_origin, get_type_hints


def rebuild(kind: Any, value: Any, where: str = "") -> Any:
    """Return ``value`` as a ``kind``, checked in all depth.

    Args:
        kind: a dataclass, Any, int, float, str, ``list[...]``, ``tuple[...]``, ``dict[str, ...]``,
            or a union: None where it allows that, else its first member. Integers pass for floats,
            booleans for nothing.
        value: a result of :func:`json.loads`.
        where: its name in messages, for instance ``settings``.

    Fields of a dataclass that have a default may be missing.

    Raises:
        ValueError: for any other field that is missing, or not known, a type that does not fit, or
            a number that is not finite.

    Example::

        >>> from benchmarks.lab.plain import rebuild
        >>> rebuild(tuple[float, float], [0.9, 0.95])
        (0.9, 0.95)
        >>> rebuild(dict[str, int], {"steps": "many"}, "settings")
        Traceback (most recent call last):
        ValueError: settings.steps must be an integer, got 'many'
    """
    if kind is Any:
        return value
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        absent = value is None and type(None) in arguments
        return None if absent else rebuild(arguments[0], value, where)
    if isinstance(kind, type) and is_dataclass(kind):
        values = _checked(value, dict, where)
        known = {each.name: each for each in fields(kind)}
        for name, each in known.items():
            if name not in values and each.default is each.default_factory is MISSING:
                raise ValueError(f"{_at(where, name)} is missing")
        if strange := [name for name in values if name not in known]:
            raise ValueError(f"{_at(where, strange[0])} is not known")
        hints = get_type_hints(kind)
        return kind(**{n: rebuild(hints[n], v, _at(where, n)) for n, v in values.items()})
    if origin is dict:
        values = _checked(value, dict, where)
        return {n: rebuild(arguments[1], v, _at(where, n)) for n, v in values.items()}
    if origin in (list, tuple):
        values = _checked(value, list, where)
        if origin is tuple and len(values) != len(arguments):
            raise ValueError(f"{where} must have {len(arguments)} elements, got {value!r}")
        kinds = arguments if origin is tuple else arguments * len(values)
        pairs = zip(kinds, values, strict=True)
        return origin(rebuild(each, v, f"{where}[{i}]") for i, (each, v) in enumerate(pairs))
    return _checked(value, kind, where)


_NAMES = {int: "an integer", float: "a number", str: "a string", dict: "an object", list: "a list"}


def _checked(value: Any, kind: Any, where: str) -> Any:
    accepted = (int, float) if kind is float else kind
    if isinstance(value, bool) or not isinstance(value, accepted):
        raise ValueError(f"{where or 'a record'} must be {_NAMES[kind]}, got {value!r}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{where or 'a record'} must be finite, got {value}")
    return value


def _at(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name

"""Make compressors and error-feedback memories from names and options (JSON, command line)."""

import difflib
import inspect
import re
from collections.abc import Iterable, Mapping
from typing import Any

from comm_hooks import compressors
from comm_hooks.compressors import Compressor
from comm_hooks.memory import Differences, ErrorFeedback, Memory, MomentumCorrection
from comm_hooks.memory.error_feedback import fitting_memory
from comm_hooks.requirements import in_one_line

COMPRESSORS: dict[str, type[Compressor]] = {
    "count_sketch": compressors.CountSketch,
    "srht": compressors.SRHT,
    "gaussian_sketch": compressors.GaussianSketch,
    "topk": compressors.TopK,
    "cocktail": compressors.Cocktail,
    "dct_topk": compressors.DCTTopK,
    "random_k": compressors.RandomK,
    "perm_k": compressors.PermK,
    "sign": compressors.Sign,
    "quantize": compressors.Quantize,
    "identity": compressors.Identity,
}

MEMORIES: dict[str, type[Memory]] = {
    "error_feedback": ErrorFeedback,
    "differences": Differences,
    "momentum_correction": MomentumCorrection,
}


def parse_spec(spec: object, kind: str = "specification") -> tuple[str, dict[str, Any]]:
    """Return the name and the options in the specification of a compressor or memory.

    A specification is the text ``name:option=value:option=value`` or the mapping
    ``{"type": name, option: value}``.  A value in the text is ``true``, ``false``, ``none``, a
    number, a fraction such as ``1/64``, or else a word.  An option with a dot is an option of the
    memory or compressor named before the dot: ``memory=error_feedback:memory.bits=4``.

    Args:
        spec: the specification.
        kind: the name of the specified object in error messages, such as ``"compressor"``.

    Raises:
        ValueError: for a mapping without a name under ``"type"``, for an option in the text without
            a key or a value, and for a specification that is neither text nor a mapping.
    """
    if isinstance(spec, Mapping):
        options = {str(key): value for key, value in spec.items() if key != "type"}
        if "type" not in spec:
            raise ValueError(
                f"{kind} as a mapping needs its name under 'type'; it has "
                f"{', '.join(map(repr, options)) or 'no keys'}{instead_of('type', options)}"
            )
        name = spec["type"]
    elif isinstance(spec, str):
        name, *settings = spec.split(":")
        options = {}
        for setting in settings:
            key, _, value = setting.partition("=")
            if not key or not value:
                raise ValueError(
                    f"{kind} {in_one_line(spec)}: options are written {name}:option=value, got "
                    f"{in_one_line(setting)}"
                )
            _set(options, key.split("."), _parse_value(value))
    else:
        raise ValueError(f"{kind} must be a name or a mapping, got {in_one_line(spec)}")
    if not isinstance(name, str):
        raise ValueError(f"{kind} must have a name of text under 'type', got {in_one_line(name)}")
    return name, options


def _set(options: dict[str, Any], path: list[str], value: Any) -> None:
    """Set ``options[path[0]][path[1]]...``; a name on the way becomes ``{"type": name}``."""
    first, *rest = path
    if not rest:
        options[first] = value
        return
    inner = options.get(first, {})
    options[first] = dict(inner) if isinstance(inner, Mapping) else {"type": inner}
    _set(options[first], rest, value)


def _parse_value(text: str) -> Any:
    words = {"true": True, "false": False, "none": None}
    if text in words:
        return words[text]
    numerator, slash, denominator = text.partition("/")
    try:
        if slash:
            return float(numerator) / float(denominator)
        return int(text) if re.fullmatch(r"[+-]?\d{1,4000}", text) else float(text)
    except (ValueError, ZeroDivisionError):
        return text


def build(kind: str, spec: Any, *, compressor: Compressor | None = None, **options: Any) -> Any:
    """Return the compressor or error-feedback memory of a specification.

    Args:
        kind: ``"compressor"``; ``"downlink"``, that of the means of shards; or ``"memory"``.
        spec: see :func:`parse_spec`, with a key of :data:`COMPRESSORS` or :data:`MEMORIES` for a
            name; or the object or None, which is returned unchanged.  A memory may be ``"none"``,
            or ``"auto"``: error feedback if the compressor is biased and tolerates it.
        compressor: the compressor that a memory works with; required for ``"auto"``.
        options: more options of the compressor or memory; they override those in ``spec``.

    Raises:
        ValueError: for an unknown name or option (the message suggests the nearest known one), for
            option values out of range, and for options without a name.
    """
    is_memory = kind == "memory"
    classes: Mapping[str, type] = MEMORIES if is_memory else COMPRESSORS
    name = None
    if spec is not None and not isinstance(spec, Memory if is_memory else Compressor):
        name, given = parse_spec(spec, kind)
        options = {**given, **options}
    if is_memory and name == "auto":
        assert compressor is not None
        name = "error_feedback" if fitting_memory(compressor) else "none"
    if name is None or (is_memory and name == "none"):
        if options:
            raise ValueError(
                f"{kind}: {', '.join(map(repr, options))} cannot be set with {in_one_line(spec)}: "
                f"give one of these by name: {', '.join(classes)}"
            )
        return None if name else spec
    if name not in classes:
        raise ValueError(unknown(kind, name, [*["auto", "none"] * is_memory, *classes]))
    check_options(name, options, inspect.signature(classes[name]).parameters)
    return classes[name](**options)


def check_options(owner: str, options: Iterable[str], known: Iterable[str]) -> None:
    """Raise ``ValueError`` for an option that is not in ``known``, and suggest the nearest one."""
    known = list(known)
    for option in options:
        if option not in known:
            raise ValueError(unknown(f"option of {owner}", option, known))


def option_names(name: object) -> list[str]:
    """Return the names of the options of a compressor, given the compressor's name."""
    if not isinstance(name, str) or name not in COMPRESSORS:
        raise ValueError(unknown("compressor", name, COMPRESSORS))
    return list(inspect.signature(COMPRESSORS[name]).parameters)


def instead_of(missing: str, keys: Iterable[object]) -> str:
    """Return the hint "did you mean" if one of ``keys`` is like the missing key, else no text."""
    similar = difflib.get_close_matches(missing, map(str, keys), n=1, cutoff=0.6)
    return f". There is {similar[0]!r}: did you mean {missing!r}?" if similar else ""


def unknown(kind: str, name: object, known: Iterable[str]) -> str:
    """Return an error message about an unknown name, with the nearest and all known names."""
    known = list(known)
    written = name if isinstance(name, str) else in_one_line(name)
    nearest = difflib.get_close_matches(written, known, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    listed = ", ".join(known) if known else "none"
    return f"unknown {kind} {in_one_line(name)}: {hint}known are {listed}"

"""Names and objects: one registry for Python, JSON configurations and the command line."""

import dataclasses
import difflib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

from comm_hooks.compressors import (
    SRHT,
    Cocktail,
    Compressor,
    CountSketch,
    DCTTopK,
    GaussianSketch,
    Identity,
    PermK,
    Quantize,
    RandomK,
    Sign,
    TopK,
)
from comm_hooks.memory import Differences, ErrorFeedback, Memory, MomentumCorrection
from comm_hooks.memory.error_feedback import fitting_memory
from comm_hooks.requirements import in_one_line

COMPRESSORS: dict[str, type[Compressor]] = {
    "count_sketch": CountSketch,
    "srht": SRHT,
    "gaussian_sketch": GaussianSketch,
    "topk": TopK,
    "cocktail": Cocktail,
    "dct_topk": DCTTopK,
    "random_k": RandomK,
    "perm_k": PermK,
    "sign": Sign,
    "quantize": Quantize,
    "identity": Identity,
}

MEMORIES: dict[str, type[Memory]] = {
    "error_feedback": ErrorFeedback,
    "differences": Differences,
    "momentum_correction": MomentumCorrection,
}


def build_compressor(name: str, **options: Any) -> Compressor:
    """Return the compressor of that name.

    Args:
        name: a key of :data:`COMPRESSORS`.
        options: the compressor's own arguments.

    Raises:
        ValueError: for an unknown name or option, with the nearest known one, and for values that
            the compressor refuses.

    Example::

        >>> build_compressor("topk", density=0.01)
        TopK(density=0.01, block_size=4096, value_bits=16, index_code='elias_fano', overlap=0.0)
    """
    known = option_names(name)
    for option in options:
        if option not in known:
            raise ValueError(unknown(f"option of {name}", option, known))
    return COMPRESSORS[name](**options)


def build_downlink(
    downlink: Compressor | str | Mapping[str, Any] | None,
) -> Compressor | None:
    """Return the compressor of the way back that a name stands for; one or None as it is.

    Args:
        downlink: a key of :data:`COMPRESSORS`, or a mapping with such a name as ``"compressor"``
            and the compressor's own arguments beside it.

    Raises:
        ValueError: for an unknown name or option, with the nearest known one.

    Example::

        >>> build_downlink({"compressor": "quantize", "bits": 4})
        Quantize(bits=4, block_size=256, stochastic=False)
    """
    if isinstance(downlink, str):
        downlink = {"compressor": downlink}
    if not isinstance(downlink, Mapping):
        return downlink
    if "compressor" not in downlink:
        raise ValueError(
            f"downlink as a mapping needs a 'compressor', one of {', '.join(COMPRESSORS)}"
            f"{instead_of('compressor', downlink)}"
        )
    options = {key: value for key, value in downlink.items() if key != "compressor"}
    return build_compressor(downlink["compressor"], **options)


def option_names(name: str) -> list[str]:
    """Return the names of the arguments of a compressor, given its own name."""
    if not isinstance(name, str) or name not in COMPRESSORS:
        raise ValueError(unknown("compressor", name, COMPRESSORS))
    return [field.name for field in dataclasses.fields(COMPRESSORS[name])]  # type: ignore[arg-type]


def build_memory(
    memory: Memory | str | Mapping[str, Any] | None, compressor: Compressor, **options: Any
) -> Memory | None:
    """Return the memory that a name stands for; a memory or None as it is.

    ``"auto"`` is error feedback where the compressor is biased and tolerates it, else nothing;
    ``"none"`` is nothing.

    Args:
        memory: a key of :data:`MEMORIES`, ``"auto"`` or ``"none"``, or a mapping with such a name
            as ``"type"`` and the memory's own arguments beside it.
        options: the memory's own arguments.

    Raises:
        ValueError: for an unknown name or option, with the nearest known one.
    """
    if isinstance(memory, Mapping):
        if "type" not in memory:
            raise ValueError(
                f"memory as a mapping needs its name under 'type', one of {', '.join(MEMORIES)}; "
                f"got only {', '.join(map(repr, memory)) or 'an empty one'}"
                f"{instead_of('type', memory)}"
            )
        options = {**{k: v for k, v in memory.items() if k != "type"}, **options}
        memory = memory["type"]
    if memory == "auto":
        memory = "error_feedback" if fitting_memory(compressor) else "none"
    if memory is not None and not isinstance(memory, (str, Memory)):
        raise ValueError(f"memory must be a name, a mapping or a Memory, got {memory!r}")
    if not isinstance(memory, str) or memory == "none":
        if options:
            raise ValueError(
                f"{', '.join(map(repr, options))} cannot be set: memory is {memory!r}, not one of "
                f"{', '.join(MEMORIES)} by name"
            )
        return None if isinstance(memory, str) else memory
    if memory not in MEMORIES:
        raise ValueError(unknown("memory", memory, ["auto", "none", *MEMORIES]))
    known = list(inspect.signature(MEMORIES[memory]).parameters)
    for option in options:
        if option not in known:
            raise ValueError(unknown(f"option of {memory}", option, known))
    return MEMORIES[memory](**options)


def instead_of(missing: str, keys: Iterable[object]) -> str:
    """Return the end of a message about a missing key: what stands there and may have meant it."""
    similar = difflib.get_close_matches(missing, map(str, keys), n=1, cutoff=0.6)
    return f". There is {similar[0]!r}: did you mean {missing!r}?" if similar else ""


def unknown(kind: str, name: object, known: Iterable[str]) -> str:
    """Return the message for a name that nobody knows, with the nearest that somebody does."""
    known = list(known)
    written = name if isinstance(name, str) else in_one_line(name)
    nearest = difflib.get_close_matches(written, known, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    listed = ", ".join(known) if known else "none"
    return f"unknown {kind} {in_one_line(name)}: {hint}known are {listed}"

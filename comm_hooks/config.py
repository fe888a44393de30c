"""Names and objects: one registry for Python, JSON configurations and the command line."""

import dataclasses
import difflib
import inspect
from collections.abc import Iterable
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
        TopK(density=0.01, block_size=4096, value_bits=16)
    """
    if name not in COMPRESSORS:
        raise ValueError(unknown("compressor", name, COMPRESSORS))
    kind = COMPRESSORS[name]
    known = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]
    for option in options:
        if option not in known:
            raise ValueError(unknown(f"option of {name}", option, known))
    return kind(**options)


def build_memory(
    memory: Memory | str | None, compressor: Compressor, **options: Any
) -> Memory | None:
    """Return the memory that a name stands for; a memory or None as it is.

    ``"auto"`` is error feedback where the compressor is biased and tolerates it, else nothing;
    ``"none"`` is nothing.

    Args:
        options: the memory's own arguments.

    Raises:
        ValueError: for an unknown name or option, with the nearest known one.
    """
    if memory == "auto":
        fits = compressor.contractive and not compressor.unbiased
        memory = "error_feedback" if fits else "none"
    if not isinstance(memory, str) or memory == "none":
        if options:
            raise ValueError(
                f"{', '.join(options)} cannot be set: memory is {memory!r}, not one of "
                f"{', '.join(MEMORIES)} by name"
            )
        return None if memory == "none" else memory  # type: ignore[return-value]
    if memory not in MEMORIES:
        raise ValueError(unknown("memory", memory, ["auto", "none", *MEMORIES]))
    known = list(inspect.signature(MEMORIES[memory]).parameters)
    for option in options:
        if option not in known:
            raise ValueError(unknown(f"option of {memory}", option, known))
    return MEMORIES[memory](**options)


def unknown(kind: str, name: object, known: Iterable[str]) -> str:
    """Return the message for a name that nobody knows, with the nearest that somebody does."""
    known = list(known)
    nearest = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
    listed = ", ".join(known) if known else "none"
    return f"unknown {kind} {name!r}: {hint}known are {listed}"

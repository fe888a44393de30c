"""Whatever stands in a configuration, it works or is refused in one line that says where."""

import dataclasses
import inspect
import math
import warnings
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from comm_hooks import Exchange, TopK
from comm_hooks.collectives import Simulated
from comm_hooks.config import (
    COMPRESSORS,
    MEMORIES,
    build,
)
from comm_hooks.exchange import ExchangeSettings

_OPTIONS = [
    (name, field.name)
    for name, kind in COMPRESSORS.items()
    for field in dataclasses.fields(kind)  # type: ignore[arg-type]
]
_MEMORY_OPTIONS = [
    (name, option)
    for name, kind in MEMORIES.items()
    for option in inspect.signature(kind).parameters
]

_EXCHANGE_OPTIONS = sorted(
    inspect.signature(Exchange).parameters.keys()
    - {"compressor", "memory", "transport", "process_group"}
)

# What JSON can hold, and what Python hands over: mostly not what is asked for.
SCALARS = (
    st.none()
    | st.booleans()
    | st.sampled_from([0, 1, 2, 4, 16, 32, 64, -1, 2**63, 10**400])
    | st.sampled_from([0.0, 0.5, 1.0, 4.0, 16.0, 1e-300, 1e300, math.nan, math.inf, -math.inf])
    | st.sampled_from(["", "4", "0.5", "true", "auto", "none", "\n", "topk", "error_feedback"])
    | st.sampled_from([b"4", 4j, (4,), TopK, TopK(), frozenset({4})])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(st.sampled_from(["type", "bits", "value", "\n"]), inner, max_size=2)
    ),
    max_leaves=4,
)


def refusal(block: Any) -> str | None:
    """Return how an exchange is refused; None for one that then takes part in a round."""
    world = Simulated(1)
    try:
        exchange = Exchange(ExchangeSettings.from_dict(block, path="ds.json"), transport=world[0])
    except ValueError as error:
        return str(error)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            world.run([exchange.round({"weight": torch.ones(40, 40), "bias": torch.ones(40)})])
    except ValueError as error:
        # How many ranks there are, and whether they can be divided into nodes, is found here.
        says(str(error), "collective 'hierarchical': ", "ranks")
    return None


def says(message: str | None, *words: str) -> None:
    if message is not None:
        assert "\n" not in message
        for word in words:
            assert word in message, message


@given(st.sampled_from(_OPTIONS), VALUES)
@example(("quantize", "bits"), 4.0)
@settings(max_examples=400)
def test_every_option_of_a_compressor(option: tuple[str, str], value: Any) -> None:
    name, key = option
    says(refusal({"compressor": name, key: value}), "ds.json: ", key, repr(value))


@given(st.sampled_from(_MEMORY_OPTIONS), VALUES)
@settings(max_examples=400)
def test_every_option_of_a_memory(option: tuple[str, str], value: Any) -> None:
    name, key = option
    memory = {"type": name, key: value}
    says(refusal({"compressor": "topk", "memory": memory}), "ds.json.memory: ", key)


@given(st.sampled_from(["compressor", "memory", *_EXCHANGE_OPTIONS]), VALUES)
@settings(max_examples=400)
def test_every_option_of_an_exchange(key: str, value: Any) -> None:
    block = {"compressor": "topk", key: value}
    if key == "ranks_per_node":
        block["collective"] = "hierarchical"
    says(refusal(block), "ds.json", key)


@given(
    st.dictionaries(
        st.sampled_from(["compressor", "memory", *_EXCHANGE_OPTIONS, *(key for _, key in _OPTIONS)])
        | SCALARS,
        VALUES | st.sampled_from([*COMPRESSORS, *MEMORIES]),
        max_size=5,
    )
    | VALUES
)
@settings(max_examples=400)
def test_any_block(block: Any) -> None:
    says(refusal(block), "ds.json")


@given(
    VALUES | st.sampled_from([*COMPRESSORS]),
    st.dictionaries(st.sampled_from([key for _, key in _OPTIONS]) | st.text(), VALUES, max_size=3),
)
@settings(max_examples=400)
def test_any_arguments_of_a_compressor(name: Any, options: dict[str, Any]) -> None:
    try:
        build("compressor", name, **options)
    except ValueError as error:
        says(str(error))


@given(
    VALUES | st.sampled_from([*MEMORIES]),
    st.dictionaries(st.sampled_from([key for _, key in _MEMORY_OPTIONS]), VALUES, max_size=3),
)
@settings(max_examples=400)
def test_any_arguments_of_a_memory(memory: Any, options: dict[str, Any]) -> None:
    try:
        build("memory", memory, compressor=TopK(), **options)
    except ValueError as error:
        says(str(error))


@pytest.mark.parametrize("kind", [*COMPRESSORS.values(), *MEMORIES.values()])
def test_every_option_of_a_class_is_checked(kind: type) -> None:
    for option, parameter in inspect.signature(kind).parameters.items():
        for value in ("4.0", None, [], {}, object()):
            if value is None and "None" in str(parameter.annotation):
                continue
            with pytest.raises(ValueError, match=f"^{kind.__name__}: .*{option}"):
                kind(**{option: value})

"""Whatever stands in a configuration, it works or is refused in one line that says where."""

import dataclasses
import inspect
import math
import warnings
from typing import Any

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from comm_hooks import Exchange, TopK
from comm_hooks.collectives import Simulated
from comm_hooks.config import (
    COMPRESSORS,
    MEMORIES,
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

# A block without an option, the option, and the place that its refusal must name.
_BLOCKS = [
    *(({"compressor": name}, key, "ds.json: ") for name, key in _OPTIONS),
    *(({"type": name}, key, "ds.json.memory: ") for name, key in _MEMORY_OPTIONS),
    *(({"compressor": "topk"}, key, "ds.json") for key in ["memory", *_EXCHANGE_OPTIONS]),
    ({"compressor": "topk", "collective": "hierarchical"}, "ranks_per_node", "ds.json"),
]

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


@given(st.sampled_from(_BLOCKS), VALUES)
@example(({"compressor": "quantize"}, "bits", "ds.json: "), 4.0)
@settings(max_examples=300)
def test_every_option(case: tuple[dict[str, Any], str, str], value: Any) -> None:
    block, key, place = case
    if "type" in block:
        block = {"compressor": "topk", "memory": {**block, key: value}}
    else:
        block = {**block, key: value}
    says(refusal(block), place, key)


@given(
    st.dictionaries(
        st.sampled_from(["compressor", "memory", *_EXCHANGE_OPTIONS, *(key for _, key in _OPTIONS)])
        | SCALARS,
        VALUES | st.sampled_from([*COMPRESSORS, *MEMORIES]),
        max_size=5,
    )
    | VALUES
)
@settings(max_examples=150)
def test_any_block(block: Any) -> None:
    says(refusal(block), "ds.json")

"""``"comm_hooks": {"method": "low_communication"}``: rounds of local steps in an engine."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from comm_hooks.config import unknown
from comm_hooks.frameworks.deepspeed.block import BLOCK, value_of
from comm_hooks.optim import low_communication

METHODS = {"low_communication": low_communication}

_KEYS = ("method", "bits_per_parameter", "total_steps", "inner")
_REPLACED = ("adamw", "adam", "commhooksadamw")
_PARAMS = ("lr", "betas", "weight_decay")
# What AdamW of torch and DeepSpeed take, and rounds do not need.
_IGNORED = ("eps", "torch_adam", "fused", "foreach", "bias_correction")

Make = Callable[[Any], torch.optim.Optimizer]


def asks_for_rounds(config: Mapping[str, Any]) -> bool:
    """Return whether the ``comm_hooks`` block of a configuration names a method."""
    block = config.get(BLOCK)
    return isinstance(block, Mapping) and "method" in block


def rounds_of(config: Mapping[str, Any]) -> tuple[str, Make]:
    """Return what replaces the optimizer that a configuration names, and its name.

    Args:
        config: of DeepSpeed, with ``optimizer`` (AdamW) and a ``comm_hooks`` block with a method.

    Returns:
        The method, and a function from parameter groups to the rounds.

    Raises:
        ValueError: for unknown settings, with their path and the nearest known one, and for an
            optimizer other than AdamW.
    """
    block = dict(config[BLOCK])
    for key in block:
        if key not in _KEYS:
            raise ValueError(f"{BLOCK}.{key}: {unknown('setting', key, _KEYS)}")
    method = block.pop("method")
    if not isinstance(method, str) or method not in METHODS:
        raise ValueError(f"{BLOCK}.method: {unknown('method', str(method), METHODS)}")
    optimizer = config.get("optimizer") or {}
    if not isinstance(optimizer, Mapping):
        raise ValueError(f"optimizer: must be an object, got {optimizer!r}")
    if str(optimizer.get("type", "")).lower() not in _REPLACED:
        raise ValueError(
            f"optimizer.type: {method} takes the place of AdamW, and its learning rate: write "
            '"CommHooksAdamW", which DeepSpeed refuses where comm-hooks is missing'
        )
    given = optimizer.get("params") or {}
    if not isinstance(given, Mapping):
        raise ValueError(f"optimizer.params: must be an object, got {given!r}")
    params = dict(given)
    if params.pop("adam_w_mode", True) is not True:
        raise ValueError(f"optimizer.params.adam_w_mode: {method} decays weights as AdamW does")
    if ignored := [key for key in _IGNORED if params.pop(key, None) is not None]:
        warnings.warn(
            f"optimizer.params: {', '.join(ignored)} decide nothing in {method} and are not used",
            stacklevel=4,
        )
    for key in params:
        if key not in _PARAMS:
            raise ValueError(f"optimizer.params.{key}: {unknown('parameter', key, _PARAMS)}")
        params[key] = value_of(f"optimizer.params.{key}", key, params[key])
    settings = {"lr": 1e-3, **params, **block}

    def make(groups: Any) -> torch.optim.Optimizer:
        try:
            return METHODS[method](groups, **settings)
        except ValueError as error:
            raise ValueError(f"{BLOCK}: {error}") from None

    return method, make

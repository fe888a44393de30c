"""Finding our block in a DeepSpeed configuration."""

import base64
import difflib
import json
import os
from collections.abc import Mapping
from typing import Any

BLOCK = "comm_hooks"

_NUMBERS = ("lr", "eps", "weight_decay")


def load(config: Any) -> dict[str, Any]:
    """Return a DeepSpeed configuration as a dictionary, from anything that DeepSpeed accepts.

    Args:
        config: a dictionary, the path of a JSON (or Hjson) file, or base64 of its text.

    Raises:
        ValueError: if it is none of these, or has a key twice.
    """
    if isinstance(config, dict):
        return config
    # DeepSpeed requires hjson, so that it is there.
    import hjson
    from deepspeed.runtime.config_utils import dict_raise_error_on_duplicate_keys

    if isinstance(config, (str, os.PathLike)) and os.path.exists(config):
        with open(config, encoding="utf-8") as file:
            text = file.read()
    else:
        try:
            text = base64.urlsafe_b64decode(config).decode("utf-8")
        except (TypeError, ValueError, AttributeError):
            raise ValueError(
                f"the DeepSpeed configuration must be a dictionary, the path of a file that "
                f"exists, or base64, got {config!r}"
            ) from None
    # From ordered dictionaries of hjson to plain ones.
    parsed = hjson.loads(text, object_pairs_hook=dict_raise_error_on_duplicate_keys)
    settings: dict[str, Any] = json.loads(json.dumps(parsed))
    return settings


def find_block(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the ``comm_hooks`` block of a configuration, unchecked; None without one.

    Raises:
        ValueError: for a key of the top level that looks like a misspelt block.
    """
    for key in config:
        is_similar = difflib.get_close_matches(str(key).lower(), [BLOCK], cutoff=0.8)
        if key != BLOCK and is_similar:
            raise ValueError(
                f"{key}: unknown block in the DeepSpeed configuration: did you mean {BLOCK!r}?"
            )
    if BLOCK not in config:
        return None
    block: Mapping[str, Any] = config[BLOCK]
    return block if block is not None else {}


def value_of(path: str, key: str, value: Any) -> Any:
    """Return a parameter of an optimizer, from the JSON, in the type that optimizers take.

    Args:
        path: where it stands.
        key: its name.
        value: what stands there.

    Raises:
        ValueError: for betas that are not two numbers, and other settings that are text.
    """
    if key != "betas":
        if key in _NUMBERS and not _is_number(value):
            raise ValueError(f"{path}: must be a number, got {value!r}")
        return value
    if not isinstance(value, list | tuple) or len(value) != 2 or not all(map(_is_number, value)):
        raise ValueError(f"{path}: must be two numbers, got {value!r}")
    return tuple(value)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)

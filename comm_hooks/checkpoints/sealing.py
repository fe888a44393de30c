"""Add a digest (a seal) to saved states, so that a damaged or mixed state is not loaded."""

import hashlib
from collections.abc import Mapping
from typing import Any

import torch

SEAL = "seal"


def sealed(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state with a digest of its content under the key ``SEAL``.

    Args:
        state: plain values, tensors, and mappings and sequences of these.
    """
    content = {key: value for key, value in state.items() if key != SEAL}
    digest = hashlib.blake2b(digest_size=16)
    _add(digest, content)
    return {**content, SEAL: digest.hexdigest()}


def require_seal(state: Mapping[str, Any]) -> None:
    """Raise ``ValueError`` unless the content of a state fits its digest, on any device."""
    if not isinstance(state.get(SEAL), str):
        raise ValueError("the state has no seal: save state_dict() whole, with its digest 'seal'")
    try:
        found = sealed(state)[SEAL]
    except Exception:  # for values that are not plain
        found = None
    if found != state[SEAL]:
        raise ValueError(
            "the state is damaged, its content does not match its digest: load another checkpoint"
        )


def _add(digest: "hashlib.blake2b", value: Any) -> None:
    """Feed a value to a digest, with its kind and size, so that different values differ."""
    if isinstance(value, torch.Tensor):
        if value.nbytes > value.untyped_storage().nbytes():
            raise ValueError("a tensor repeats its elements: a small file could fill the memory")
        digest.update(f"tensor {value.dtype} {tuple(value.shape)} ".encode())
        octets = value.detach().cpu().contiguous().flatten().view(torch.uint8)
        digest.update(octets.numpy().data)
    elif isinstance(value, Mapping):
        digest.update(f"mapping {len(value)} ".encode())
        # In the order of names: some formats of checkpoints do not keep another.
        for key in sorted(value, key=repr):
            _add(digest, key)
            _add(digest, value[key])
    elif isinstance(value, list | tuple):
        digest.update(f"sequence {len(value)} ".encode())
        for item in value:
            _add(digest, item)
    else:
        text = repr(value)
        digest.update(f"{type(value).__name__} {len(text)} {text} ".encode())

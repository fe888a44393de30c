"""A check that all ranks have the same data set."""

import hashlib
import os
import random
import warnings
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset, IterableDataset

from comm_hooks.collectives.base import Transport
from comm_hooks.collectives.requests import AllGatherObject
from comm_hooks.errors import ConfigMismatchError
from comm_hooks.exchange.agreement import differences
from comm_hooks.optim.private.random_states import random_states_kept

# Public, and enough to detect data sets that were shuffled or split differently: a difference in a
# part p of the places is missed with probability (1 - p)^64.
SAMPLES = 64


def compare_datasets(dataset: Dataset[Any], transport: Transport) -> None:
    """Compare the lengths and some samples of the ranks' data sets.

    Each of N ranks takes every N-th sample: if data sets differ, a sample could count twice.

    1. lengths are compared
    2. ranks agree on a secret key, and on random indices that follow from it
    3. the samples' digests under this key are compared, one per tensor or value in a sample.  Each
       sample is read twice: values that differ are random (augmented), and are left out, as is
       the index of a sample, which shows nothing

    Raises:
        ConfigMismatchError: on all ranks, if the data sets differ.

    Warns if no value of the samples can be compared.
    """
    # An iterable data set is refused by the loader.
    if transport.world_size == 1 or isinstance(dataset, IterableDataset):
        return
    length = len(dataset)  # type: ignore[arg-type]
    said = transport.perform(AllGatherObject((length, os.urandom(32).hex())))
    lengths = [str(count) for count, _ in said]
    if len(set(lengths)) > 1:
        raise ConfigMismatchError(
            "ranks have different data sets: the number of samples "
            f"{differences(lengths, transport.ranks)}. Give make_private() the whole data set on "
            "every rank; it takes that rank's share"
        )
    key = hashlib.blake2b("".join(part for _, part in said).encode()).digest()
    places = random.Random(key).sample(range(length), min(length, SAMPLES))
    with random_states_kept():
        own = [_digests(dataset, place, key) for place in places]
    of_ranks = transport.perform(AllGatherObject(own))
    of_part: dict[str, set[str]] = {}
    for place, *of_rank in zip(places, *of_ranks, strict=True):
        for part in dict.fromkeys(part for found in of_rank for part in found):
            values = [found.get(part, "absent") for found in of_rank]
            if None in values:
                continue
            of_part.setdefault(part, set()).update(values)
            if len(set(values)) > 1:
                raise ConfigMismatchError(
                    f"ranks have different data sets: the digest of the sample at index {place} "
                    f"{differences(values, transport.ranks)}. Split and shuffle with the same "
                    "seed on all ranks: a sample that is on two of them would count twice"
                )
    # A part that is the same in all samples shows nothing.
    if not any(len(values) > 1 for values in of_part.values()) and length > 1:
        warnings.warn(
            "the data sets of ranks cannot be compared, except for their lengths: samples are "
            "random, or do not consist of tensors, arrays, numbers and text. Make sure that ranks "
            "have the same data set, split and shuffled with the same seed",
            stacklevel=4,
        )


def _digests(dataset: Any, place: int, key: bytes) -> dict[str, str | None]:
    """Return, by key path, a keyed digest of each value in sample ``place``.

    The digest is None if the value differs when the sample is read again, as with augmentation, and
    if it is the place itself.
    """
    one, again = (_parts(dataset[place]) for _ in range(2))
    first, second = ({p: _digest(v, key) for p, v in parts} for parts in (one, again))
    is_place = {path for path, value in one if _is_number(value) and value == place}
    return {
        path: value if second.get(path) == value and path not in is_place else None
        for path, value in first.items()
    }


def _is_number(value: Any) -> bool:
    return np.isscalar(value) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def _parts(sample: Any) -> list[tuple[str, Any]]:
    return [(pytree.keystr(path), leaf) for path, leaf in pytree.tree_flatten_with_path(sample)[0]]


def _digest(leaf: Any, key: bytes) -> str | None:
    if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
        what = f"{leaf.dtype} {tuple(leaf.shape)}"
        flat = leaf.detach().cpu().resolve_conj().resolve_neg().reshape(-1).contiguous()
        content = flat.view(torch.uint8).numpy().tobytes()
    elif isinstance(leaf, np.ndarray | np.generic) or hasattr(leaf, "__array_interface__"):
        array = np.asarray(leaf)
        what, content = f"{array.dtype} {array.shape}", array.tobytes()
        if array.dtype.hasobject:
            return None
    elif leaf is None or isinstance(leaf, bool | int | float | complex | str | bytes):
        what, content = type(leaf).__name__, repr(leaf).encode()
    else:
        return None
    return hashlib.blake2b(what.encode() + b"\0" + content, key=key, digest_size=8).hexdigest()

"""The states of random number generators, and a context manager that restores them."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def random_states(devices: Sequence[torch.device] = ()) -> list[Any]:
    """Return the states of the generators of Python, NumPy and PyTorch, to compare them.

    Args:
        devices: accelerators, in addition to the CPU.
    """
    states = [torch.get_rng_state()]
    states += [torch.get_device_module(each).get_rng_state(each) for each in devices]
    _, *numpy = np.random.get_state()
    arrays = [np.asarray(part).tolist() for part in numpy]
    return [random.getstate(), arrays, *(state.tolist() for state in states)]


@contextmanager
def random_states_kept(devices: Sequence[torch.device] = ()) -> Iterator[None]:
    """Restore the random number generators of Python, NumPy and PyTorch at the end of the context.

    Args:
        devices: accelerators of one kind, in addition to the CPU; CPUs are ignored.
    """
    states = random.getstate(), np.random.get_state()
    forked = [device for device in devices if device.type != "cpu"]
    with torch.random.fork_rng(forked, device_type=forked[0].type if forked else "cuda"):
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])

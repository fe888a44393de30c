"""A context manager that restores the states of random number generators."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch


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

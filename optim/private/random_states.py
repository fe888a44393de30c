"""Trying something out without an effect on what is drawn afterwards."""

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


@contextmanager
def random_states_kept(device: torch.device | None = None) -> Iterator[None]:
    """Let what is drawn meanwhile, by Python, NumPy or PyTorch, have no effect afterwards.

    Args:
        device: on which PyTorch draws besides the CPU, if on any.
    """
    states = random.getstate(), np.random.get_state()
    devices = [] if device is None or device.type == "cpu" else [device]
    with torch.random.fork_rng(devices, device_type=devices[0].type if devices else "cuda"):
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])

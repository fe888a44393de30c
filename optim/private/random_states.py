"""The states of random number generators, and passes that are repeated from the same ones."""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks


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


class Replay:
    """Repeats forward and backward passes with the same random numbers.

    Args:
        parameters: the parameters of the model.

    Attributes:
        devices: the accelerators that they are on.
        epsilon: the machine epsilon of the coarsest dtype that has occurred, on GPUs TF32 for
            float32.
        has_drawn: whether the last pass has drawn random numbers.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.devices = sorted({p.device for p in parameters if p.is_cuda}, key=str)
        self.epsilon = 0.0
        self.has_drawn = False
        for parameter in parameters:
            self.note(parameter)
            if parameter.is_cuda and parameter.dtype is torch.float32:
                self.epsilon = max(self.epsilon, 2.0**-10)  # TF32

    @contextmanager
    def once(self) -> Iterator[None]:
        """Return the context of a pass, which keeps the random number generators as they are."""
        with (
            random_states_kept(self.devices),
            torch.enable_grad(),
            saved_tensors_hooks(self.note, lambda tensor: tensor),
        ):
            before = random_states(self.devices)
            yield
            self.has_drawn = random_states(self.devices) != before

    def note(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor, after its dtype was looked at."""
        if tensor.is_floating_point():
            self.epsilon = max(self.epsilon, torch.finfo(tensor.dtype).eps)
        return tensor

"""Passes that are repeated with the same random numbers, to compare their gradients."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from comm_hooks.optim.private.random_states import random_states, random_states_kept


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

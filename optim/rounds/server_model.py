"""The model that all ranks share while each of them works on its own."""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch.optim import Optimizer


class ServerModel:
    """A copy of the parameters at the last exchange, and the optimizer that moves it.

    The optimizer is an ordinary one over the live parameters: for its step the shared values take
    their place, with the round's mean delta for a gradient.

    Args:
        parameters: the live ones, on which the ranks do their local steps.
        optimizer: over the same parameters.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], optimizer: Optimizer) -> None:
        self._parameters = parameters
        self._optimizer = optimizer
        self._values = [p.detach().clone() for p in parameters]

    @property
    def values(self) -> list[torch.Tensor]:
        """The shared values, where the live parameters are by now: frameworks move a model."""
        pairs = zip(self._values, self._parameters, strict=True)
        self._values = [value.to(parameter) for value, parameter in pairs]
        return self._values

    def load(self, values: Sequence[torch.Tensor]) -> None:
        """Begin at these values, the live parameters as well."""
        torch._foreach_copy_(self.values, list(values))
        self.restore()

    def progress(self, places: Sequence[int]) -> list[torch.Tensor]:
        """Return how far the live parameters at these places are behind: shared minus live."""
        shared = self.values
        return list(torch._foreach_sub([shared[i] for i in places], self._live(places)))

    def restore(self, places: Sequence[int] | None = None) -> None:
        """Put the shared values in place of the live ones, everywhere by default."""
        shared = self.values
        places = range(len(shared)) if places is None else places
        torch._foreach_copy_(self._live(places), [shared[i] for i in places])

    def step(self, places: Sequence[int], mean: Sequence[torch.Tensor]) -> None:
        """Take the server's step at these places; the live parameters are then the new values."""
        self.restore(places)
        gradients = [p.grad for p in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        for place, gradient in zip(places, mean, strict=True):
            self._parameters[place].grad = gradient
        self._optimizer.step()
        for parameter, own in zip(self._parameters, gradients, strict=True):
            parameter.grad = own
        shared = self.values
        torch._foreach_copy_([shared[i] for i in places], self._live(places))

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Put the shared values in place of the live ones for a while."""
        with torch.no_grad():
            own = [p.detach().clone() for p in self._parameters]
            self.restore()
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_([p.detach() for p in self._parameters], own)

    def _live(self, places: Sequence[int]) -> list[torch.Tensor]:
        return [self._parameters[i].detach() for i in places]

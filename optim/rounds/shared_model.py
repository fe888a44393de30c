"""The model that all ranks share while each of them works on its own."""

import contextlib
from collections.abc import Iterator, Sequence

import torch
from torch.optim import Optimizer

from comm_hooks.optim.base import parameters_of
from comm_hooks.shards import local_gradients


class SharedModel:
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
        self._starts: list[torch.Tensor] | None = None
        self._hidden: list[torch.Tensor] | None = None
        self.note()

    def note(self) -> None:
        """Take what the live parameters are now for the rounds' own doing."""
        self._noted = self._count()

    @property
    def is_written_to(self) -> bool:
        """Whether somebody else has written to the live parameters since, and left other values."""
        if self._noted == self._count():
            return False
        # Values that stood there for a while, such as a moving average, may be gone again.
        if self._hidden is None or not all(map(torch.equal, self._parameters, self.values)):
            return True
        self.note()
        return False

    @property
    def overwritten(self) -> list[int]:
        """The places where somebody else has put other values while the shared ones are shown."""
        if self._hidden is None or not self.is_written_to:
            return []
        pairs = zip(self._parameters, self.values, strict=True)
        return [place for place, pair in enumerate(pairs) if not torch.equal(*pair)]

    @property
    def is_shown(self) -> bool:
        """Whether the live parameters are the shared values for a while."""
        return self._hidden is not None

    @property
    def own(self) -> list[torch.Tensor]:
        """This rank's values: the live ones, unless the shared ones are shown."""
        if self._hidden is None:
            return self._live(range(len(self._parameters)))
        self._hidden = self._where_it_is(self._hidden)
        return self._hidden

    @property
    def values(self) -> list[torch.Tensor]:
        """The shared values, where the live parameters are by now: frameworks move a model."""
        self._values = self._where_it_is(self._values)
        return self._values

    @property
    def starts(self) -> list[torch.Tensor]:
        """Where the live parameters began: at the shared values, unless :meth:`look_ahead`."""
        if self._starts is None:
            return self.values
        self._starts = self._where_it_is(self._starts)
        return self._starts

    def begin_at_live(self) -> None:
        """Take the live values for the shared ones, while nobody has worked on them yet."""
        if self._hidden is None:
            torch._foreach_copy_(self.values, self.own)

    def load(self, values: Sequence[torch.Tensor]) -> None:
        """Begin at these values, the live parameters as well."""
        torch._foreach_copy_(self.values, list(values))
        self.restore()

    def adopt(self, places: Sequence[int]) -> None:
        """Take the live values at these places for the shared ones, and begin there."""
        shared, live = self.values, self._live(places)
        torch._foreach_copy_([shared[i] for i in places], live)
        if self._hidden is not None:
            own = self.own
            torch._foreach_copy_([own[i] for i in places], live)
        self._begin_at_shared(places)

    def begin_at(self, starts: Sequence[torch.Tensor]) -> None:
        """Let the live parameters have begun at these values."""
        self._starts = [start.clone() for start in starts]

    def progress(self, places: Sequence[int]) -> list[torch.Tensor]:
        """Return how far the live parameters at these places have come: start minus live."""
        starts = self.starts
        return list(torch._foreach_sub([starts[i] for i in places], self._live(places)))

    def shrink(self, places: Sequence[int], factors: Sequence[float]) -> None:
        """Multiply the shared values, and where the live parameters began, by factors."""
        for values in [self.values] if self._starts is None else [self.values, self.starts]:
            torch._foreach_mul_([values[i] for i in places], list(factors))

    def restore(self, places: Sequence[int] | None = None) -> None:
        """Put the shared values in place of the live ones, everywhere by default."""
        shared = self.values
        places = range(len(shared)) if places is None else places
        torch._foreach_copy_(self._live(places), [shared[i] for i in places])
        self._begin_at_shared(places)

    def look_ahead(
        self, places: Sequence[int], pending: Sequence[torch.Tensor | None], share: float
    ) -> None:
        """Let the live parameters at these places begin at the shared values minus what is pending.

        Costs a copy of all parameters from the first time on.

        Args:
            places: where.
            pending: for each of them what the server may yet subtract, (numel,); None for nothing.
            share: of it that is taken off now.
        """
        if self._starts is None:
            self._starts = [value.clone() for value in self.values]
        starts = self.starts
        found = {i: v for i, v in zip(places, pending, strict=True) if v is not None}
        if found:
            begun = [starts[i] for i in found]
            ahead = [v.view(s.shape).to(s) for v, s in zip(found.values(), begun, strict=True)]
            torch._foreach_sub_(begun, ahead, alpha=share)
            torch._foreach_copy_(self._live([*found]), begun)

    def step(self, places: Sequence[int], mean: Sequence[torch.Tensor]) -> None:
        """Take the server's step at these places; the live parameters are then the new values."""
        self.restore(places)
        members = parameters_of(self._optimizer.param_groups)
        with local_gradients(members):
            gradients = [p.grad for p in members]
            for parameter in members:
                parameter.grad = None
            for place, gradient in zip(places, mean, strict=True):
                self._parameters[place].grad = gradient
            self._optimizer.step()
            for parameter, own in zip(members, gradients, strict=True):
                parameter.grad = own
        shared = self.values
        torch._foreach_copy_([shared[i] for i in places], self._live(places))
        self._begin_at_shared(places)

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Put the shared values in place of the live ones for a while."""
        if self._hidden is not None:
            yield
            return
        was_written_to = self.is_written_to
        # Validation may run in inference mode, whose tensors nobody may write to later on.
        with torch.inference_mode(False), torch.no_grad():
            self._hidden = [p.clone() for p in self.own]
            torch._foreach_copy_(self._live(range(len(self._parameters))), self.values)
        self.note()
        try:
            yield
        finally:
            with torch.no_grad():
                hidden, self._hidden = self.own, None
                torch._foreach_copy_(self.own, hidden)
            if not was_written_to:
                self.note()

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Put this rank's values back for a while, if the shared ones are shown."""
        if self._hidden is None:
            yield
            return
        with torch.no_grad():
            hidden, self._hidden = self.own, None
            torch._foreach_copy_(self.own, hidden)
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_(hidden, self.own)
                torch._foreach_copy_(self.own, self.values)
                self._hidden = hidden
            self.note()

    def _count(self) -> list[int]:
        return [p._version for p in self._parameters]

    def _begin_at_shared(self, places: Sequence[int]) -> None:
        if self._starts is not None:
            shared, starts = self.values, self.starts
            torch._foreach_copy_([starts[i] for i in places], [shared[i] for i in places])

    def _where_it_is(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return tensors where the live parameters are."""
        return [each.to(p) for each, p in zip(tensors, self._parameters, strict=True)]

    def _live(self, places: Sequence[int]) -> list[torch.Tensor]:
        return [self._parameters[i].detach() for i in places]

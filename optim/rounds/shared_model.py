"""The model that all ranks share while each rank takes local steps on its own parameters."""

from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from comm_hooks.optim.base import parameters_of
from comm_hooks.shards import local_gradients

Tensors = list[torch.Tensor]


class SharedModel:
    """The shared model: the parameters' values after the last exchange, and the server optimizer.

    The server optimizer is an ordinary one over the live parameters, those of this rank's model:
    for its step they get the shared values, and the mean displacement as their gradient.
    ``places`` are indices in ``parameters``.

    Args:
        parameters: the live parameters, on which this rank takes its local steps.
        optimizer: the server optimizer, over the same parameters.

    Attributes:
        parameters: the live parameters.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], optimizer: Optimizer) -> None:
        self.parameters = parameters
        self._optimizer = optimizer
        self._all = range(len(parameters))
        self._values = [p.detach().clone() for p in parameters]
        self._starts: Tensors | None = None
        self._hidden: Tensors | None = None
        self.note()

    @property
    def values(self) -> Tensors:
        """The shared model's values, on the devices of the parameters, which frameworks move."""
        self._values = self._moved(self._values)
        return self._values

    def value(self, place: int) -> torch.Tensor:
        """Return the shared value of one parameter."""
        self._values[place] = self._values[place].to(self.parameters[place])
        return self._values[place]

    @property
    def starts(self) -> Tensors:
        """The values at the start of the local steps: shared ones, except after look_ahead()."""
        if self._starts is None:
            return self.values
        self._starts = self._moved(self._starts)
        return self._starts

    @property
    def own(self) -> Tensors:
        """This rank's values of the parameters, also while these have the shared values."""
        if self._hidden is None:
            return self._live(self._all)
        self._hidden = self._moved(self._hidden)
        return self._hidden

    @property
    def is_shown(self) -> bool:
        """Whether the parameters temporarily have the shared model's values (:meth:`show`)."""
        return self._hidden is not None

    @property
    def is_written_to(self) -> bool:
        """Whether code outside of this library has changed the parameters since :meth:`note`."""
        if self._noted == self._versions():
            return False
        # Values that stood there for a while, such as a moving average, may be gone again.
        if self._hidden is None or not all(map(torch.equal, self.parameters, self.values)):
            return True
        self.note()
        return False

    @property
    def overwritten(self) -> Tensors:
        """The parameters that other code changed while they had the shared values."""
        if self._hidden is None or not self.is_written_to:
            return []
        pairs = zip(self.parameters, self.values, strict=True)
        return [parameter for parameter, value in pairs if not torch.equal(parameter, value)]

    def note(self) -> None:
        """Record the parameters' versions: :attr:`is_written_to` then sees later changes only."""
        self._noted = self._versions()

    @torch.no_grad()
    def load(
        self, values: Sequence[torch.Tensor], *, starts: Tensors | None, own: Sequence[torch.Tensor]
    ) -> None:
        """Restore the shared values, those at the start of the local steps, and this rank's own.

        Args:
            values, own: the shared values and this rank's own, one tensor per parameter.
            starts: the values at the start of the local steps; None if they are the shared values.
        """
        torch._foreach_copy_(self.values, list(values))
        if starts is not None:
            self._starts = [start.clone() for start in starts]
        else:
            self._begin_at_shared(self._all)
        torch._foreach_copy_(self._live(self._all), list(own))
        self.note()

    def adopt(self, places: Sequence[int]) -> None:
        """Copy parameters with indices ``places`` to the shared model; local steps start there."""
        shared, live = self.values, self._live(places)
        torch._foreach_copy_([shared[i] for i in places], live)
        if self._hidden is not None:
            own = self.own
            torch._foreach_copy_([own[i] for i in places], live)
        self._begin_at_shared(places)

    def progress(self, places: Sequence[int], factors: Sequence[float] | None = None) -> Tensors:
        """Return start minus present values of the parameters with indices ``places``.

        Args:
            places: the indices.
            factors: the weight decay that the values at the start have missed; None for none.
        """
        every, live = self.starts, self._live(places)
        starts = [every[i] for i in places]
        if factors is None:
            return list(torch._foreach_sub(starts, live))
        progress = list(torch._foreach_mul(starts, list(factors)))
        torch._foreach_sub_(progress, live)
        return progress

    def shrink(self, places: Sequence[int], factors: Sequence[float]) -> None:
        """Multiply shared values of the parameters with indices ``places`` by ``factors``."""
        values = self.values
        torch._foreach_mul_([values[i] for i in places], list(factors))

    def restore(self, places: Sequence[int] | None = None) -> None:
        """Set the parameters with indices ``places`` (by default all) to the shared values."""
        shared = self.values
        places = self._all if places is None else places
        torch._foreach_copy_(self._live(places), [shared[i] for i in places])
        self._begin_at_shared(places)

    def look_ahead(
        self, places: Sequence[int], residuals: Sequence[torch.Tensor | None], share: float
    ) -> None:
        """Start local steps from the shared values minus a share of this rank's residuals.

        From the first call on, one more copy of all parameters is kept.

        Args:
            places: the indices of the parameters.
            residuals: the residual of each of these parameters, (numel,), or None.
            share: the share of the residuals to subtract.
        """
        if self._starts is None:
            self._starts = [value.clone() for value in self.values]
        starts = self.starts
        found = {i: r for i, r in zip(places, residuals, strict=True) if r is not None}
        if found:
            begun = [starts[i] for i in found]
            ahead = [r.view(s.shape).to(s) for r, s in zip(found.values(), begun, strict=True)]
            torch._foreach_sub_(begun, ahead, alpha=share)
            torch._foreach_copy_(self._live([*found]), begun)

    def step(self, places: Sequence[int], mean: Sequence[torch.Tensor]) -> None:
        """Update the shared model and the parameters by a server step with gradients ``mean``."""
        self.restore(places)
        members = parameters_of(self._optimizer.param_groups)
        with local_gradients(members):
            gradients = [p.grad for p in members]
            for parameter in members:
                parameter.grad = None
            for place, gradient in zip(places, mean, strict=True):
                self.parameters[place].grad = gradient
            self._optimizer.step()
            for parameter, own in zip(members, gradients, strict=True):
                parameter.grad = own
        shared = self.values
        torch._foreach_copy_([shared[i] for i in places], self._live(places))
        self._begin_at_shared(places)

    def show(self) -> None:
        """Give the parameters the shared model's values until :meth:`unshow`."""
        # Validation may run in inference mode, in which tensors are made that cannot be written to.
        with torch.inference_mode(False), torch.no_grad():
            self._hidden = [p.clone() for p in self.own]
            torch._foreach_copy_(self._live(self._all), self.values)
        self.note()

    def unshow(self) -> None:
        """Give the parameters this rank's own values again."""
        with torch.no_grad():
            own, self._hidden = self.own, None
            torch._foreach_copy_(self.own, own)

    def _versions(self) -> list[int]:
        return [p._version for p in self.parameters]

    def _begin_at_shared(self, places: Sequence[int]) -> None:
        if self._starts is not None:
            shared, starts = self.values, self.starts
            torch._foreach_copy_([starts[i] for i in places], [shared[i] for i in places])

    def _moved(self, tensors: Sequence[torch.Tensor]) -> Tensors:
        return [each.to(p) for each, p in zip(tensors, self.parameters, strict=True)]

    def _live(self, places: Sequence[int]) -> Tensors:
        return [self.parameters[i].detach() for i in places]

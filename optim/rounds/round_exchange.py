"""One exchange of local progress: the common part of rounds of ranks and rounds of clients."""

from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from comm_hooks.exchange import Exchange
from comm_hooks.optim.rounds.participation import (
    Aggregate,
    ClientSampling,
    Collection,
    Contribution,
    PlainCollection,
)
from comm_hooks.optim.rounds.shared_moments import SharesStatistics
from comm_hooks.optim.rounds.state import RoundsState
from comm_hooks.warnings import warn_program

# Squares of larger norms than 2^64 overflow in float32: this leaves room for sums of 2^13 clients.
_LARGEST = 2.0**50


class RoundExchange:
    """Collects the progress of ranks or clients and moves the shared model by its mean.

    Args:
        inner: the optimizer of the local steps.
        exchange: the exchange that averages deltas over ranks.
        state: the state of the rounds.
        participation: the draw of the clients; None if every rank is one client.
        look_ahead: the share of its residual that a rank subtracts from its start.
    """

    def __init__(
        self,
        inner: Optimizer,
        exchange: Exchange,
        state: RoundsState,
        participation: ClientSampling | None,
        look_ahead: float,
    ) -> None:
        self.inner = inner
        self.exchange = exchange
        self.state = state
        self.participation = participation
        self.look_ahead = look_ahead

    def contribution(self, client: int, places: Sequence[int]) -> Contribution | None:
        """Return a client's progress since the last exchange, for the parameters at ``places``.

        None if it is not finite, or so large that a sum over clients would not be finite.
        """
        delta, statistics = self.state.model.progress(places), {}
        if isinstance(self.inner, SharesStatistics):
            statistics = self.inner.statistics()
        if not is_finite([*delta, *statistics.values()]):
            return None
        return Contribution(client, delta, statistics)

    def collection(self, places: Sequence[int]) -> Collection:
        """Return an empty collection for one exchange of the parameters at ``places``."""
        names, values = self.state.names, self.state.model.values
        delta = {names[i]: torch.zeros_like(values[i]) for i in places}
        statistics = {}
        if isinstance(self.inner, SharesStatistics):
            statistics = {n: torch.zeros_like(t) for n, t in self.inner.statistics().items()}
        if self.participation is None:
            return PlainCollection(self.exchange, delta, statistics)
        return self.participation.collection(self.exchange, delta, statistics)

    def conclude(self, places: Sequence[int], aggregate: Aggregate) -> None:
        """Warn of clients without a contribution, and let the server step along the mean delta."""
        state = self.state
        if aggregate.missing:
            warn_program(
                f"round {state.round_index}: left out, having returned values that are huge or not "
                f"finite: client {', '.join(map(str, aggregate.missing))}; the mean is over the "
                f"other {aggregate.contributors} of "
                f"{aggregate.contributors + len(aggregate.missing)}",
            )
        if aggregate.delta is None:
            state.model.restore(places)
        else:
            state.model.step(places, aggregate.delta)
            if self.look_ahead:
                memory = self.exchange.memory
                assert memory
                residuals = [memory.vector(state.names[i]) for i in places]
                state.model.look_ahead(places, residuals, self.look_ahead)
            if isinstance(self.inner, SharesStatistics):
                self.inner.set_statistics(aggregate.statistics)
        state.round_index += 1


def is_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether the tensors are finite, and so small that sums of thousands of them are.

    Reads one number back from the device.
    """
    norms = [norm.double() for norm in torch._foreach_norm(list(tensors))]
    return bool(torch.linalg.vector_norm(torch.stack(norms)) <= _LARGEST)

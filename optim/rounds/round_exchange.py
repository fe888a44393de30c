"""Exchanges of displacements: those of ranks after K local steps, and those of clients."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch.optim import Optimizer

from comm_hooks.exchange import Exchange
from comm_hooks.optim.frozen import FrozenParameters, trains
from comm_hooks.optim.rounds.participation import (
    Aggregate,
    ClientSampling,
    Collection,
    Contribution,
    PlainCollection,
)
from comm_hooks.optim.rounds.shared_moments import LocalAMSGrad
from comm_hooks.optim.rounds.state import RoundsState
from comm_hooks.warnings import warn_program

# Squares of larger norms than 2^64 overflow in float32: this leaves room for sums of 2^13 clients.
_LARGEST = 2.0**50


@dataclass(eq=False)
class RoundExchange:
    """Averages the displacements of ranks or clients, and moves the shared model by the mean.

    Args:
        inner, exchange, participation, look_ahead, shared_decay: see
            :class:`~comm_hooks.optim.LocalRounds`.
        state: the state of the optimizer of local steps.
        frozen: the check that warns of parameters that are frozen after construction.
    """

    inner: Optimizer
    exchange: Exchange
    state: RoundsState
    frozen: FrozenParameters
    participation: ClientSampling | None
    look_ahead: float
    shared_decay: bool

    def contribution(self, client: int, places: Sequence[int]) -> Contribution | None:
        """Return a client's displacement of the parameters with indices ``places``.

        Return None if it is not finite, or so large that a sum over clients would not be finite.
        """
        statistics = self._statistics()
        factors = self._outstanding_decay(places) if self.shared_decay else None
        delta = self.state.model.progress(places, factors)
        if not is_finite([*delta, *statistics.values()]):
            return None
        return Contribution(client, delta, statistics)

    def collection(self, places: Sequence[int]) -> Collection:
        """Return a new :class:`Collection` for the parameters with indices ``places``."""
        names, values = self.state.names, self.state.model.values
        delta = {names[i]: torch.zeros_like(values[i]) for i in places}
        statistics = {name: torch.zeros_like(t) for name, t in self._statistics().items()}
        if self.participation is None:
            return PlainCollection(self.exchange, delta, statistics)
        return self.participation.collection(self.exchange, delta, statistics)

    def _statistics(self) -> dict[str, torch.Tensor]:
        """Return what is averaged in full precision, by name: moments of clients, and buffers."""
        own = self.inner.statistics() if isinstance(self.inner, LocalAMSGrad) else {}
        if self.participation is None:
            own.update(self.state.buffers.due(self.state.round_index))
        return own

    def conclude(self, places: Sequence[int], aggregate: Aggregate) -> None:
        """Warn of clients without a finite result, and take the server step along the mean."""
        state = self.state
        if aggregate.missing:
            who, why = ("client", "by leave_out() or ") if self.participation else ("rank", "")
            warn_program(
                f"round {state.round_index} of local steps: left out, {why}as values are above "
                f"2^50 or not finite: {who} {', '.join(map(str, aggregate.missing))}; "
                f"the mean is over the other {aggregate.contributors} of "
                f"{aggregate.contributors + len(aggregate.missing)}"
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
            if isinstance(self.inner, LocalAMSGrad):
                self.inner.set_statistics(aggregate.statistics)
            state.buffers.set(aggregate.statistics)
        state.round_index += 1

    def play(
        self, server: Optimizer, conclude: Callable[[Sequence[int], Aggregate], None]
    ) -> Iterator[int]:
        """Run a round of clients: yield the number of each of this rank's, for the caller to train.

        Args:
            server: the optimizer of the shared model.
            conclude: called at the end with the indices of all parameters and the clients' mean.
        """
        state, transport, participation = self.state, self.exchange.transport, self.participation
        assert participation
        places = range(len(state.parameters))
        state.is_round_open = True
        try:
            turns = participation.turns(state.round_index, transport)
            collection = self.collection(places)
            for turn in turns:
                client = turn[transport.rank]
                contribution, memory = None, None
                if client is not None:
                    state.model.restore()
                    state.model.note()
                    state.clients.enter(client)
                    with participation.turn(client, self.inner, server):
                        yield client
                    memory = state.clients.memory(client)
                    if client in state.left_out:
                        self.inner.state.clear()
                    else:
                        contribution = self.contribution(client, places)
                        state.clients.leave(client, keep=contribution is not None)
                collection.add(turn, contribution, memory)
            conclude(places, collection.finish())
        except BaseException as error:
            state.model.restore()
            state.clients.discard()
            if isinstance(error, GeneratorExit):
                warn_program(
                    f"clients(): round {state.round_index} of clients was left before its end: the "
                    "model and the clients are as before this round. In zip(), pass clients() first"
                )
            raise
        else:
            state.clients.commit()
        finally:
            state.is_round_open = False
            state.left_out.clear()
            state.model.note()

    def end_step(self, *, is_skipped: bool) -> None:
        """Count a local step and exchange the fragment that is due after it.

        Args:
            is_skipped: whether a GradScaler has left the inner step out.
        """
        if self.shared_decay:
            self._decay(is_skipped)
        if due := self.state.clock.tick():
            self.exchange_fragments(due)

    def exchange_fragments(self, fragments: Sequence[int]) -> None:
        """Average the displacements of these fragments, and update them in the shared model."""
        state, exchange = self.state, self.exchange
        places = state.clock.places(fragments)
        self.frozen.check_later([state.names[i] for i in places if not trains(state.parameters[i])])
        contribution = self.contribution(exchange.transport.rank, places)
        if contribution is None:
            # The other fragments are likely to be as bad.
            self.inner.state.clear()
            state.model.restore()
            if self.shared_decay:  # the shared model's outstanding decay is no local progress
                self._shrink(range(len(state.parameters)), state.decay)
        collection = self.collection(places)
        ranks = range(exchange.transport.world_size)
        collection.add(ranks, contribution, exchange.memory)
        aggregate = collection.finish()
        if self.shared_decay:
            state.model.shrink(places, self._outstanding_decay(places))
            state.decay[list(places)] = 1.0
        self.conclude(places, aggregate)
        state.clock.note_exchange(fragments)

    def _outstanding_decay(self, places: Sequence[int]) -> list[float]:
        """Return the product of the weight decay since each parameter's exchange; 1 if frozen."""
        state = self.state
        return [float(state.decay[i]) if trains(state.parameters[i]) else 1.0 for i in places]

    def _decay(self, is_skipped: bool) -> None:
        """Record the weight decay of a local step; apply it where the inner optimizer has not.

        All ranks must apply the same decay, although some may have had no gradient.
        """
        state = self.state
        of_groups = [1 - group["lr"] * group["weight_decay"] for group in self.inner.param_groups]
        factors = np.array(of_groups)[state.groups]
        state.decay *= factors
        self._shrink(
            [i for i, p in enumerate(state.parameters) if is_skipped or p.grad is None], factors
        )

    def _shrink(self, places: Sequence[int], factors: np.ndarray) -> None:
        """Multiply the parameters with indices ``places``, except frozen ones, by ``factors``."""
        parameters = self.state.parameters
        places = [i for i in places if trains(parameters[i])]
        if places:
            live = [parameters[i].detach() for i in places]
            torch._foreach_mul_(live, factors[places].tolist())


def is_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Return whether the norm of all tensors together is finite and at most 2^50.

    Sums over thousands of clients are then finite.  Reads one number back from the device.
    """
    norms = [norm.double() for norm in torch._foreach_norm(list(tensors))]
    return bool(torch.linalg.vector_norm(torch.stack(norms)) <= _LARGEST)

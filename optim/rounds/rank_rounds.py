"""Rounds in which every rank is one client: each fragment is exchanged after fixed local steps."""

from collections.abc import Sequence

import numpy as np
import torch

from comm_hooks.optim.frozen import FrozenParameters, trains
from comm_hooks.optim.rounds.round_exchange import RoundExchange


class RankRounds:
    """Counts local steps, and exchanges the fragment that is due after each.

    Args:
        round_exchange: the exchange of the progress on some parameters.
        frozen: the check that warns of parameters that are frozen later.
        shared_decay: whether to take the weight decay at the shared model; see
            :class:`~comm_hooks.optim.LocalRounds`.
    """

    def __init__(
        self, round_exchange: RoundExchange, frozen: FrozenParameters, *, shared_decay: bool
    ) -> None:
        self._round = round_exchange
        self._state = round_exchange.state
        self._frozen = frozen
        self._shared_decay = shared_decay

    def end_step(self, *, is_skipped: bool) -> None:
        """Count a local step and exchange the fragment that is due after it.

        Args:
            is_skipped: whether a GradScaler has left the inner step out.
        """
        if self._shared_decay:
            self._decay(is_skipped)
        if due := self._state.clock.tick():
            self.exchange(due)

    def exchange(self, fragments: Sequence[int]) -> None:
        """Exchange this rank's progress on fragments, and move these parts of the shared model."""
        state, exchange = self._state, self._round.exchange
        places = state.clock.places(fragments)
        self._frozen.check_later(
            [state.names[i] for i in places if not trains(state.parameters[i])]
        )
        if self._shared_decay:
            self._decay_shared(places)
        contribution = self._round.contribution(exchange.transport.rank, places)
        if contribution is None:
            # The other fragments are likely to be as bad.
            self._round.inner.state.clear()
            state.model.restore()
            if self._shared_decay:  # the shared model's outstanding decay is no local progress
                self._shrink(range(len(state.parameters)), state.decay)
        collection = self._round.collection(places)
        ranks = range(exchange.transport.world_size)
        collection.add(ranks, contribution, exchange.memory)
        self._round.conclude(places, collection.finish())
        state.clock.note_exchange(fragments)

    def _decay(self, is_skipped: bool) -> None:
        """Record the weight decay of a local step; apply it where the inner optimizer has not.

        All ranks must apply the same decay, although some may have had no gradient.
        """
        state = self._state
        of_groups = [
            1 - group["lr"] * group["weight_decay"] for group in self._round.inner.param_groups
        ]
        factors = np.array(of_groups)[state.groups]
        state.decay *= factors
        self._shrink(
            [i for i, p in enumerate(state.parameters) if is_skipped or p.grad is None], factors
        )

    def _shrink(self, places: Sequence[int], factors: np.ndarray) -> None:
        """Multiply the live parameters at these indices, except for frozen ones, by ``factors``."""
        parameters = self._state.parameters
        places = [i for i in places if trains(parameters[i])]
        if places:
            live = [parameters[i].detach() for i in places]
            torch._foreach_mul_(live, factors[places].tolist())

    def _decay_shared(self, places: Sequence[int]) -> None:
        """Apply the weight decay of the local steps since the last exchange to the shared model."""
        state = self._state
        trained = [i for i in places if trains(state.parameters[i])]
        if trained:
            state.model.shrink(trained, state.decay[trained].tolist())
        state.decay[list(places)] = 1.0

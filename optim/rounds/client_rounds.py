"""Rounds of federated learning, in which every rank plays several clients in turn."""

from collections.abc import Callable, Iterator, Sequence

from torch.optim import Optimizer

from comm_hooks.optim.already_averaged import AveragingCheck
from comm_hooks.optim.rounds.participation import ClientSampling
from comm_hooks.optim.rounds.round_exchange import RoundExchange
from comm_hooks.warnings import warn_program


class ClientRounds:
    """Lets the clients of each round take their turns, and exchanges their progress.

    Args:
        round_exchange: the exchange of a round's progress.
        participation: the sampling that draws the clients.
        averaging: the check that DDP and FSDP have not averaged the gradients.
        server: the optimizer of the shared model.
    """

    def __init__(
        self,
        round_exchange: RoundExchange,
        participation: ClientSampling,
        averaging: AveragingCheck,
        server: Optimizer,
    ) -> None:
        self._round = round_exchange
        self._state = round_exchange.state
        self._participation = participation
        self._averaging = averaging
        self._server = server

    def play(self, conclude: Callable[..., None]) -> Iterator[int]:
        """Yield the number of each client of this rank in one round; the caller takes its steps.

        Args:
            conclude: a function of the indices of all parameters and the round's aggregate.
        """
        state = self._state
        state.is_round_open = True
        try:
            yield from self._turns(conclude)
        except BaseException as error:
            state.model.restore()
            state.clients.discard()
            if isinstance(error, GeneratorExit):
                warn_program(
                    f"round {state.round_index} of clients was left before its end: the model and "
                    "the clients are as before this round. In zip(), pass clients() first",
                )
            raise
        else:
            state.clients.commit()
        finally:
            state.is_round_open = False
            state.model.note()

    def _turns(self, conclude: Callable[..., None]) -> Iterator[int]:
        state, transport = self._state, self._round.exchange.transport
        places: Sequence[int] = range(len(state.parameters))
        turns = self._participation.turns(state.round_index, transport)
        collection = self._round.collection(places)
        for turn in turns:
            client = turn[transport.rank]
            contribution, memory = None, None
            if client is not None:
                state.model.restore()
                state.clients.enter(client)
                try:
                    with self._participation.turn(client, self._round.inner, self._server):
                        yield client
                except Exception as error:  # the other ranks are about to wait for its message
                    transport.report(error, transport.begin_round())
                    raise
            self._averaging.compare(transport)
            if client is not None:
                memory = state.clients.memory(client)
                contribution = self._round.contribution(client, places)
                state.clients.leave(client, keep=contribution is not None)
            collection.add(turn, contribution, memory)
        conclude(places, collection.finish())

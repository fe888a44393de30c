"""A round of federated learning, in which every rank runs several clients in turn."""

from collections.abc import Callable, Iterator

from torch.optim import Optimizer

from comm_hooks.optim.rounds.participation import ClientSampling
from comm_hooks.optim.rounds.round_exchange import RoundExchange
from comm_hooks.warnings import warn_program


def play_round(
    round_exchange: RoundExchange,
    participation: ClientSampling,
    server: Optimizer,
    conclude: Callable[..., None],
) -> Iterator[int]:
    """Run one round: yield the number of each client of this rank, for the caller to train it.

    Args:
        round_exchange: the exchange of the round's progress.
        participation: the sampling that draws the clients.
        server: the optimizer of the shared model.
        conclude: called at the end with the indices of all parameters and the clients' mean.
    """
    state, transport = round_exchange.state, round_exchange.exchange.transport
    places = range(len(state.parameters))
    state.is_round_open = True
    try:
        turns = participation.turns(state.round_index, transport)
        collection = round_exchange.collection(places)
        for turn in turns:
            client = turn[transport.rank]
            contribution, memory = None, None
            if client is not None:
                state.model.restore()
                state.clients.enter(client)
                with participation.turn(client, round_exchange.inner, server):
                    yield client
            if client is not None:
                memory = state.clients.memory(client)
                if client in state.left_out:
                    round_exchange.inner.state.clear()
                else:
                    contribution = round_exchange.contribution(client, places)
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

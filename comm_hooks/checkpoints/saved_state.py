"""What a rank saves, in a file or a distributed checkpoint: a state, and whose it is."""

from collections.abc import Iterable, Sequence
from typing import Any

from comm_hooks.collectives.base import Transport
from comm_hooks.collectives.model_parallel import gather_from_all
from comm_hooks.exchange import Exchange

# Under which it is saved; a seal over all of it lies beside it.
STATE, RANKS, LOCAL_STEPS = "state", "ranks", "local_steps"


def content_of(state: Any, transport: Transport) -> dict[str, Any]:
    """Return what a rank saves of something with a ``state_dict()``."""
    return {
        STATE: state.state_dict(),
        RANKS: list(transport.ranks),
        LOCAL_STEPS: local_steps(state),
    }


def require_one_partition(among: Sequence[int], others: Iterable[Sequence[int]]) -> None:
    """Raise ``ValueError`` if a checkpoint was saved among groups of which ranks are now mixed.

    Args:
        among: the ranks of the group that the first of these ranks exchanged with then.
        others: those of the others, as far as they were part of that checkpoint.
    """
    for other in others:
        if set(other).isdisjoint(among):
            raise ValueError(
                f"these ranks exchanged in several groups when they saved, ranks {list(among)} and "
                f"ranks {list(other)} among them: what such groups remember cannot be put "
                "together. Make the groups that there were"
            )


def local_steps(state: Any) -> int | None:
    """Return how many steps rounds have taken, exchanged or not; None where ranks may differ."""
    return None if has_clients(state) else getattr(state, "steps", None)


def has_clients(state: Any) -> bool:
    """Return whether ranks play several clients in turn, and may so take different steps."""
    return getattr(state, "participation", None) is not None


def exchange_of(state: Any) -> Exchange:
    """Return the exchange of a state, or of which it is one."""
    return state if isinstance(state, Exchange) else state.exchange


def tell_all(state: Any, finding: Any) -> list[Any]:
    """Return what each rank of the run has found, the same on all of them.

    Those that hold other parts of a sharded model (``model_parallel_groups`` of the state, or of what its
    exchange works for) exchange among themselves, but a checkpoint is restored as a whole, if at
    all.

    Args:
        state: as :func:`content_of` takes it.
        finding: of this rank, as plain values.
    """
    exchange = exchange_of(state)
    owner = state if hasattr(state, "model_parallel_groups") else exchange.owner
    return gather_from_all(exchange.transport, getattr(owner, "model_parallel_groups", ()), finding)

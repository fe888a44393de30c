"""What a rank saves, in a file or a distributed checkpoint: a state, and whose it is."""

from typing import Any

from comm_hooks.collectives.base import Transport

# Under which it is saved; a seal over all of it lies beside it.
STATE, RANKS = "state", "ranks"


def content_of(state: Any, transport: Transport) -> dict[str, Any]:
    """Return what a rank saves of something with a ``state_dict()``."""
    return {STATE: state.state_dict(), RANKS: list(transport.ranks)}

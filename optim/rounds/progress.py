"""How far rounds of local work have come."""

from dataclasses import dataclass
from typing import Any


@dataclass
class Progress:
    """What is counted, in one place: frameworks wrap optimizers, and a wrapper must count along.

    Args:
        exchanged_at: for each fragment the step after which it was exchanged last.

    Attributes:
        steps: local steps.
        round_index: exchanges, each of a fragment.
        bytes_uncompressed: what all-reducing gradients at each of the steps taken here would have
            sent.
        knows_gradients: whether it has been made sure that nobody else averages them.
        averaging: until then, what this rank's first step of a turn says about that.
        loaded_from: the rank whose state this one goes on from, until it says so.
    """

    exchanged_at: list[int]
    steps: int = 0
    round_index: int = 0
    bytes_uncompressed: int = 0
    knows_gradients: bool = False
    averaging: dict[str, Any] | None = None
    loaded_from: int | None = None

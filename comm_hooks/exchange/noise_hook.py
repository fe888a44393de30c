"""Where private training reaches into a round."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal

import torch

Place = Literal["payload", "message", "owner"]

# The collective on whose way each place lies.
COLLECTIVE_OF: dict[Place, str] = {
    "payload": "all_reduce",
    "message": "all_gather",
    "owner": "sharded",
}


class NoiseHook(ABC):
    """Clips what single ranks send and adds noise to the sum, at one place of a round.

    ``place`` says where, and with it which collective carries the round:

    * ``"payload"``: each rank's payload is clipped before it is sent, noise is added to the sum of
      payloads, which is decompressed afterwards; linear compressors only.
    * ``"message"``: its receivers decompress and clip a payload; noise is added to the
      sum of those.
    * ``"owner"``: vectors travel to the owners of shards uncompressed, in float32; an owner adds
      noise to the sum of its shard, and what it then compresses for everybody, with an error
      feedback of its own, is already noised.  What ranks remember themselves is not used.

    At the first two places all ranks do the same to the same numbers, so noise must be equal on all
    ranks; at the third every rank has its own.
    """

    place: Place

    @abstractmethod
    def clip_(self, message: Sequence[torch.Tensor]) -> None:
        """Scale one rank's message, float32 tensors that make up one vector, in place.

        Not called at the owner's place, where no message arrives whole.
        """

    @abstractmethod
    def add_noise_(self, total: Sequence[torch.Tensor]) -> None:
        """Add noise to the sum over ranks, float32 tensors of the same shapes, in place."""

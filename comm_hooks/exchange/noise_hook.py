"""The interfaces by which private training decides on rounds, clips messages and adds noise."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal, Protocol

import torch

from comm_hooks.exchange.layout import Layout

Place = Literal["payload", "message", "owner"]

# The collective of the rounds that have each place.
COLLECTIVE_OF: dict[Place, str] = {
    "payload": "all_reduce",
    "message": "all_gather",
    "owner": "sharded",
}


class NoiseHook(ABC):
    """Clips the vectors of each rank and adds noise to their sum, at one place of a round.

    ``place`` decides on the collective of the round:

    * ``"payload"``: each rank's payload is clipped before it is sent, noise is added to the sum of
      payloads, which is decompressed afterwards; linear compressors only.
    * ``"message"``: the receivers decompress and clip each payload; noise is added to the sum of
      the clipped vectors.
    * ``"owner"``: the owners of shards receive vectors uncompressed, in float32.  An owner adds
      noise to the sum of its shard, and compresses the noised mean for all ranks with error
      feedback for this shard.  The residuals of the ranks' vectors are not used.

    At the first two places all ranks add noise to the same sum, so the noise must be equal on all
    ranks; at the third every rank draws its own.
    """

    place: Place

    @abstractmethod
    def clip_(self, message: Sequence[torch.Tensor]) -> None:
        """Clip one rank's message, float32 tensors that together are one vector, in place.

        Not called at the place ``"owner"``, where no message arrives whole.
        """

    @abstractmethod
    def add_noise_(self, total: Sequence[torch.Tensor]) -> None:
        """Add noise to the sum over ranks, float32 tensors of the same shapes, in place."""


class Gate(Protocol):
    """Decides which rounds an exchange carries out, and protects what they send."""

    def require_open(self, *, protects: bool) -> None:
        """Raise ``ValueError`` if there may be no round now.

        Args:
            protects: whether the round calls :meth:`protect`.
        """

    def protect(self, layout: Layout) -> NoiseHook | None:
        """Change the vectors of a round, or return the hook that does so on their way.

        Args:
            layout: this rank's vectors, before residuals are added.
        """

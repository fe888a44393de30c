"""What a rank has sent, and what an all-reduce would have."""

from dataclasses import dataclass


@dataclass
class Traffic:
    """Bytes since the start, without transport headers.

    Attributes:
        sent: by this rank, and, by the ring algorithms of gloo and NCCL, received.
        between_nodes: the part of them that left the node.
        uncompressed: what an all-reduce in the tensors' dtype would have sent.
    """

    sent: int = 0
    between_nodes: int = 0
    uncompressed: int = 0

    @property
    def ratio(self) -> float:
        """How many times as much an all-reduce would have sent; 1 if nothing was sent."""
        return self.uncompressed / self.sent if self.sent else 1.0

"""The last few sparse messages of MicroAdam, stored in a few bits per nonzero element."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from comm_hooks.compressors.sparse import TopK
from comm_hooks.kernels.pieces import Blocks
from comm_hooks.kernels.top_k import block_top_k
from comm_hooks.wire.index_codes import places_code
from comm_hooks.wire.places import PlacesCode
from comm_hooks.wire.sections import join, word_aligned
from comm_hooks.wire.values import ValueCode


@dataclass(frozen=True)
class SparseWindow:
    """An encoding of means of :class:`~comm_hooks.TopK` messages, and moments of encoded vectors.

    Such a mean is sparse: each block of each shard holds a bounded number of elements that are not
    zero.  It is stored as ``nbytes`` bytes: places in Elias-Fano codes, 2 + log2(1/density) bits
    each, and values in ``value_bits``.  The values that are stored exactly are, by ``value_bits``,

    * 32: all values;
    * 16: bfloat16 numbers, which include the values of TopK with 1, 2 and 3 bits;
    * 4: the values of TopK with 4 bits; blocks with magnitudes within the rounding of bfloat16
      (1/256) of each other may be rounded once more.

    Args:
        numel: the number of elements of a vector.
        shards: the number of equal ranges in which the vector was compressed.
        block_size: the largest block of a shard.
        capacity: the largest number of nonzero elements in a block.
        value_bits: the bits of a stored value: 4, 16 or 32.
    """

    numel: int
    shards: int
    block_size: int
    capacity: int
    value_bits: int

    @classmethod
    def of(cls, top_k: TopK, numel: int, ranks: int, *, sharded: bool = False) -> "SparseWindow":
        """Return the encoding for means over ``ranks`` ranks, all-gathered or ``sharded``."""
        shards = ranks if sharded else 1
        size = Blocks(-(-numel // shards), top_k.block_size).size
        # Sharded, the mean was compressed again; all-gathered, every rank may have sent others.
        senders = ranks // shards
        capacity = min(size, math.ceil(top_k.density * size) * senders)
        # The mean of several ranks' 4-bit values is none.
        is_coded = top_k.value_bits == 4 and senders == 1
        bits = 32 if top_k.value_bits == 32 else 4 if is_coded else 16
        return cls(numel, shards, top_k.block_size, capacity, bits)

    @property
    def nbytes(self) -> int:
        """The number of bytes in which one vector is stored."""
        return self._values_nbytes + word_aligned(self._places.nbytes(self._sets))

    def encode(self, vectors: torch.Tensor) -> torch.Tensor:
        """Return the bytes (n, nbytes), uint8, of vectors (n, numel), float32.

        If a block has more nonzero elements than ``capacity``, the smallest are lost.
        """
        padding = self.shards * self._blocks.numel - self.numel
        shards = torch.nn.functional.pad(vectors, (0, padding)).view(-1, self._blocks.numel)
        shape = len(vectors), self._sets, self.capacity
        places, kept = (
            found.view(shape) for found in block_top_k(shards, self._blocks.size, self.capacity)
        )
        values, _ = self._values.encode(kept)
        codes, _ = self._places.encode(places, np.zeros(len(vectors), dtype=np.int64))
        return join(values, codes)

    def decode(self, octets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the places, int64, and the values, float32, of bytes (n, nbytes): (n, k) each.

        k is ``capacity`` times the number of blocks.  Of equal places, all but one have value zero.
        """
        split = self._values_nbytes
        values = self._values.decode(octets[:, :split], self._sets, self.capacity)
        places, _ = self._places.decode(
            octets[:, split:], self._sets, np.zeros(len(octets), dtype=np.int64)
        )
        blocks = self._blocks
        first_of_block = blocks.starts(octets.device)
        first_of_shard = torch.arange(self.shards, device=octets.device) * blocks.numel
        places = places.view(-1, self.shards, blocks.count, self.capacity)
        places = places + first_of_block[:, None] + first_of_shard[:, None, None]
        # The padding is zero, so that its place does not matter.
        return places.flatten(1).clamp_(max=self.numel - 1), values.flatten(1)

    @staticmethod
    def weights(beta: float, steps: int, rows: int, bias_correction: str) -> list[float]:
        """Return the weights of the vectors in a ring buffer, beta^age over a sum, in row order.

        Args:
            beta: the decay rate.
            steps: the number of vectors so far, at least 1; the newest, of age 0, is in row
                ``(steps - 1) % rows``.
            rows: the number of rows of the ring; there are ``min(steps, rows)`` weights.
            bias_correction: the sum is of beta^age over the rows that are left (``"window"``), or,
                as published, over all steps, (1 - beta^steps) / (1 - beta) (``"published"``).
        """
        newest = (steps - 1) % rows
        powers = [beta ** ((newest - row) % rows) for row in range(min(steps, rows))]
        is_published = bias_correction == "published"
        total = (1 - beta**steps) / (1 - beta) if is_published else sum(powers)
        return [power / total for power in powers]

    def moments(
        self, history: torch.Tensor, weights: Sequence[float], square_weights: Sequence[float]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the weighted sums of vectors and of their squares, (n, numel) each.

        Args:
            history: bytes (n, m, nbytes) of the last m vectors of each of n parameters.
            weights, square_weights: the weights of the m vectors, and of their squares.
        """
        count, rows, _ = history.shape
        places, values = self.decode(history.reshape(count * rows, -1))
        places, values = places.view(count, rows, -1), values.view(count, rows, -1)
        first = torch.zeros(count, self.numel, device=history.device, dtype=torch.float32)
        second = torch.zeros_like(first)
        # Row by row: within one, no place has two elements but for zeros, so that no order of
        # additions is left to chance, and replicas stay identical on accelerators as well.
        for row, (weight, square_weight) in enumerate(zip(weights, square_weights, strict=True)):
            own = values[:, row]
            first.scatter_add_(1, places[:, row], own * weight)
            second.scatter_add_(1, places[:, row], own.square() * square_weight)
        return first, second

    def directions(
        self,
        windows: Sequence[torch.Tensor],
        steps: int,
        betas: Sequence[float],
        eps: float,
        bias_correction: str,
    ) -> torch.Tensor:
        """Return m / (sqrt(v) + eps), (n, numel), from n parameters' windows after ``steps``."""
        history = torch.stack([window[:steps] for window in windows])
        rows = len(windows[0])
        weights = [self.weights(beta, steps, rows, bias_correction) for beta in betas]
        m, v = self.moments(history, *weights)
        return m.div_(v.sqrt_().add_(eps))

    @property
    def _blocks(self) -> Blocks:
        return Blocks(-(-self.numel // self.shards), self.block_size)

    @property
    def _sets(self) -> int:
        return self.shards * self._blocks.count

    @property
    def _places(self) -> PlacesCode:
        return places_code("elias_fano", self._blocks.size, self.capacity)

    @property
    def _values(self) -> ValueCode:
        return ValueCode(self.value_bits)

    @property
    def _values_nbytes(self) -> int:
        return word_aligned(self._values.nbytes(self._sets, self.capacity))

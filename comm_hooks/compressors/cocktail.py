"""The compressor of CocktailSGD: the largest elements of a random subset, in a few bits each."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from comm_hooks.compressors.base import Compressor
from comm_hooks.compressors.sparse import RandomK, TopK, require_selection
from comm_hooks.randomness import Draw
from comm_hooks.requirements import require_within


@dataclass(frozen=True)
class Cocktail(Compressor):
    """The largest elements of a random subset that is the same on all ranks, quantized.

    The operator of CocktailSGD (Wang et al., ICML 2023).  Top-k alone spends most of its bytes on
    indices; within a subset that every rank draws they are short, and the subset changes every
    step, so that no element waits for long.

    1. cut the vector of d elements into m = mask x d equal strata and draw one element of each
       (from the key, as :class:`~comm_hooks.RandomK` does);
    2. keep a fraction ``density`` of these m, the largest in magnitude, block by block;
    3. send their indices among the m, and their values in ``value_bits`` bits
       (:class:`~comm_hooks.TopK` does 2 and 3).

    Differences to the authors' code: elements are drawn independently at every step, where theirs
    moves a regular grid by one element; places are sent in Elias-Fano codes, 4.25 bits each at
    density 0.2 where a bitmap of the subset takes 5; levels belong to a block rather than to 128
    values.  The vector (theirs: the difference between the local and the shared model) and the
    residual are up to the exchange and its memory.

    Args:
        mask: m/d, the fraction of elements that may be sent in a step, in (0, 1].
        density: the fraction of the drawn elements that is sent, in (0, 1].
        value_bits: 1, 2, 3, 4, 16 or 32, as in :class:`~comm_hooks.TopK`.
        block_size: the largest block of the subset, 1 to 65536 elements.

    Shapes: vector (d,) -> payload uint8; by default 0.165 bits per element of the vector.
    Use with :class:`~comm_hooks.memory.ErrorFeedback`: without it other elements are lost.
    Not supported: summing payloads (each rank sends other places).

    Example::

        >>> cocktail = Cocktail(mask=0.5, density=0.5, value_bits=32)
        >>> vector = torch.arange(8.0)
        >>> payload = cocktail.compress(vector, key=1)
        >>> cocktail.decompress(payload, 8, key=1).count_nonzero()
        tensor(2)
    """

    mask: float = 0.1
    density: float = 0.2
    value_bits: int = 4
    block_size: int = 4096

    def __post_init__(self) -> None:
        require_within(self, "mask", self.mask, "(0, 1]")
        require_selection(self, self.density, self.block_size, self.value_bits)

    unbiased = False
    contractive = True

    @cached_property
    def _subset(self) -> RandomK:
        return RandomK(self.mask, unbiased=False)

    @cached_property
    def _top_k(self) -> TopK:
        return TopK(self.density, self.block_size, self.value_bits)

    def payload_nbytes(self, numel: int, *, world_size: int = 1) -> int:
        return self._top_k.payload_nbytes(self._subset.kept(numel))

    def encode(self, rows: Tensor, draw: Draw) -> Tensor:
        return self._top_k.encode(self._subset.encode(rows, draw), draw)

    def decode(
        self, out: Tensor, payloads: Tensor, draw: Draw, *, alpha: float = 1.0, add: bool = False
    ) -> None:
        shape = len(out), self._subset.kept(out.shape[1])
        drawn = torch.empty(shape, device=out.device, dtype=torch.float32)
        self._top_k.decode(drawn, payloads, draw)
        self._subset.decode(out, drawn, draw, alpha=alpha, add=add)

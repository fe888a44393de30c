"""Compressors that send every element in fewer bits."""

from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from comm_hooks.compressors.base import Compressor
from comm_hooks.kernels.bits import packed_nbytes
from comm_hooks.kernels.min_max import decode_min_max, encode_min_max
from comm_hooks.kernels.residual import Residual
from comm_hooks.kernels.signs import decode_signs, encode_signs, mean_magnitudes
from comm_hooks.randomness import Draw, fork
from comm_hooks.requirements import require_choice, require_flag, require_positive
from comm_hooks.wire.sections import join, word_aligned

# Where all of a vector shares a scale, kernels still work in blocks, of this size.
_PIECE = 4096


@dataclass(frozen=True)
class Sign(Compressor):
    """One bit per element: its sign, times the mean magnitude of its block.

    The mean ``|x|_1 / c`` over a block x of c makes it contractive (Karimireddy et al., ICML 2019).
    DeepSpeed's 1-bit Adam has the root mean square of all of a tensor instead:
    ``Sign(block_size=None, scale="rms")``.  Zero counts as positive.

    Args:
        block_size: the number of elements that share a scale (float32); the last block may be
            smaller.  None: the whole vector, even if its shards go to several owners: each owner
            gets the scale of the whole vector, and sends its shard's mean with that mean's scale.
        scale: ``"mean"``, or ``"rms"`` for the root mean square, which keeps the vector's norm.  It
            is contractive only if ``|x|_1`` is at least ``sqrt(c) |x|_2 / 2``, so not for sparse
            blocks; residuals stay bounded anyway.

    Shapes: vector (d,) -> payload uint8, about d/8 bytes.
    Use with :class:`~comm_hooks.memory.ErrorFeedback`.
    Not supported: summing payloads.

    Example::

        >>> sign = Sign()
        >>> sign.decompress(sign.compress(torch.tensor([1.0, -3.0]), key=0), 2, key=0)
        tensor([ 2., -2.])
    """

    block_size: int | None = 4096
    scale: Literal["mean", "rms"] = "mean"

    def __post_init__(self) -> None:
        if self.block_size is not None:
            require_positive(self, "block_size", self.block_size)
        require_choice(self, "scale", self.scale, ("mean", "rms"))

    unbiased = False
    bounds_residuals = True

    @property
    def contractive(self) -> bool:
        return self.scale == "mean"

    def payload_nbytes(self, numel: int, *, world_size: int = 1) -> int:
        return 4 * self._blocks(numel) + word_aligned(packed_nbytes(numel, 1))

    def _blocks(self, numel: int) -> int:
        return -(-numel // self.block_size) if self.block_size else 1

    def encode(self, rows: Tensor, draw: Draw) -> Tensor:
        return self._encode(rows)

    def extract(self, rows: Tensor, draw: Draw, residual: Residual | None = None) -> Tensor:
        return self._encode(rows, residual, subtract=True)

    def for_shards(self, rows: Tensor, owners: int) -> Compressor:
        if self.block_size:
            return self
        scales = self._scales(rows).repeat(owners, 1)
        return _SignOfShards(self.block_size, self.scale, scales=scales)

    def _encode(
        self, rows: Tensor, residual: Residual | None = None, *, subtract: bool = False
    ) -> Tensor:
        if self.block_size and self.scale == "mean":
            return join(*encode_signs(rows, self.block_size, residual=residual, subtract=subtract))
        if residual:
            residual.add_to(rows)
        scales = self._scales(rows)
        per_piece, size = self._per_piece(scales, rows.shape[1])
        _, octets = encode_signs(rows, size, subtract=subtract, scales=per_piece)
        return join(scales, octets)

    def _scales(self, rows: Tensor) -> Tensor:
        """Return the scale of every block, (n, blocks)."""
        size = self.block_size or rows.shape[1]
        return mean_magnitudes(rows, size, power=1 if self.scale == "mean" else 2)

    def _per_piece(self, scales: Tensor, numel: int) -> tuple[Tensor, int]:
        """Return the scales (..., blocks) of blocks that fit into a cache, and their size."""
        if self.block_size:
            return scales, self.block_size
        pieces = -(-numel // _PIECE)
        return scales.expand(*scales.shape[:-1], pieces).contiguous(), _PIECE

    def _read(self, payloads: Tensor, numel: int) -> tuple[Tensor, Tensor, int]:
        """Return the scales and signs in payloads (N, n, nbytes), and the size of a block."""
        split = 4 * self._blocks(numel)
        scales, size = self._per_piece(payloads[..., :split].view(torch.float32), numel)
        return scales, payloads[..., split:], size

    def decode(
        self, out: Tensor, payloads: Tensor, draw: Draw, *, alpha: float = 1.0, add: bool = False
    ) -> None:
        decode_signs(out, *self._read(payloads[None], out.shape[1]), alpha=alpha, add=add)

    def decode_sum(self, out: Tensor, payloads: Tensor, draw: Draw, *, alpha: float = 1.0) -> None:
        decode_signs(out, *self._read(payloads, out.shape[1]), alpha=alpha, add=False)


@dataclass(frozen=True, eq=False)
class _SignOfShards(Sign):
    """Compresses shards with the scales, (owners * n, 1), of the vectors that they are cut from."""

    scales: Tensor = field(kw_only=True)

    def _scales(self, rows: Tensor) -> Tensor:
        return self.scales


@dataclass(frozen=True)
class Quantize(Compressor):
    """Every element rounded to one of 2^bits levels between its block's minimum and maximum.

    As in MicroAdam (Modoranu et al., NeurIPS 2024, procedure Q):

    1. low and high are the block's extremes, unit = (high - low) / (2^bits - 1);
    2. code = floor((x - low) / unit + 1/2), or, ``stochastic``, floor((x - low) / unit + xi) with
       xi uniform in [0, 1), which is unbiased;
    3. the code is packed; low and unit are sent as float32.

    Args:
        bits: 1, 2, 4 or 8.
        block_size: the number of elements that share a range; the last block may be smaller.
        stochastic: whether to round at random, without bias, independently on each rank.

    Shapes: vector (d,) -> payload uint8, about d x bits / 8 + d / 32 bytes.
    Not supported: summing payloads.

    Example::

        >>> quantize = Quantize(bits=8)
        >>> vector = torch.tensor([0.0, 0.5, 1.0])
        >>> payload = quantize.compress(vector, key=0)
        >>> (quantize.decompress(payload, 3, key=0) - vector).abs().max() < 1 / 255
        tensor(True)
    """

    bits: int = 4
    block_size: int = 256
    stochastic: bool = False

    def __post_init__(self) -> None:
        require_choice(self, "bits", self.bits, (1, 2, 4, 8))
        require_positive(self, "block_size", self.block_size)
        require_flag(self, "stochastic", self.stochastic)

    @property
    def unbiased(self) -> bool:
        return self.stochastic

    @property
    def contractive(self) -> bool:
        # Each element is off by unit/2 at most (in mean square when stochastic) and the range is
        # at most sqrt(2) |x|, so |error|^2 <= c |x|^2 / (2 (2^bits - 1)^2) for blocks of c.
        return self.block_size < 2 * (2**self.bits - 1) ** 2

    def payload_nbytes(self, numel: int, *, world_size: int = 1) -> int:
        codes = word_aligned(packed_nbytes(numel, self.bits))
        return 8 * -(-numel // self.block_size) + codes

    def encode(self, rows: Tensor, draw: Draw) -> Tensor:
        seeds = fork(draw.keys, draw.rank) if self.stochastic else None
        return join(*encode_min_max(rows, self.block_size, self.bits, seeds))

    def decode(
        self, out: Tensor, payloads: Tensor, draw: Draw, *, alpha: float = 1.0, add: bool = False
    ) -> None:
        count = -(-out.shape[1] // self.block_size)
        low, unit = payloads[:, : 8 * count].view(torch.float32).split(count, dim=1)
        octets = payloads[:, 8 * count :]
        decode_min_max(out, low, unit, octets, self.block_size, self.bits, alpha=alpha, add=add)

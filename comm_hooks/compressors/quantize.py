"""Compressors that send every element in fewer bits."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from comm_hooks.compressors.base import (
    Blocks,
    Compressor,
    require_choice,
    require_positive,
    word_aligned,
    write,
)
from comm_hooks.randomness import fork
from comm_hooks.wire.bits import pack_bits, pack_codes, packed_nbytes, unpack_bits, unpack_codes


@dataclass(frozen=True)
class Sign(Compressor):
    """One bit per element: its sign, times the mean magnitude of its block.

    The scale is the L1 mean ``|x|_1 / c``, which makes the compressor contractive (Karimireddy et
    al., ICML 2019); DeepSpeed's 1-bit Adam uses the root mean square, which does not.  Zero counts
    as positive.

    Args:
        block_size: the largest block that shares a scale (float32).

    Shapes: vector (d,) -> payload uint8, about d/8 bytes.
    Use with :class:`~comm_hooks.memory.ErrorFeedback`.
    Not supported: summing payloads.

    Example::

        >>> sign = Sign()
        >>> sign.decompress(sign.compress(torch.tensor([1.0, -3.0]), key=0), 2, key=0)
        tensor([ 2., -2.])
    """

    block_size: int = 4096

    def __post_init__(self) -> None:
        require_positive(self, "block_size", self.block_size)

    unbiased = False
    contractive = True

    def payload_nbytes(self, numel: int, *, world_size: int = 1) -> int:
        return 4 * Blocks(numel, self.block_size).count + word_aligned(packed_nbytes(numel, 1))

    def _compress(
        self, rows: torch.Tensor, keys: Sequence[int], rank: int, world_size: int
    ) -> torch.Tensor:
        count, numel = rows.shape
        blocks = Blocks(numel, self.block_size)
        scales = blocks.split(rows).abs().sum(dim=2)
        # The last block's padding takes no part in its mean.
        sizes = torch.full((blocks.count,), float(blocks.size), device=rows.device)
        sizes[-1] -= blocks.padded - numel
        payload = torch.zeros(
            count, self.payload_nbytes(numel), dtype=torch.uint8, device=rows.device
        )
        payload[:, : 4 * blocks.count] = (scales / sizes).view(torch.uint8)
        signs = pack_bits(rows >= 0)
        payload[:, 4 * blocks.count :][:, : signs.shape[1]] = signs
        return payload

    def _decode(
        self,
        out: torch.Tensor,
        payloads: torch.Tensor,
        keys: Sequence[int],
        rank: int,
        world_size: int,
        alpha: float,
        add: bool,
    ) -> None:
        numel = out.shape[1]
        blocks = Blocks(numel, self.block_size)
        scales = payloads[:, : 4 * blocks.count].view(torch.float32)
        signs = unpack_bits(payloads[:, 4 * blocks.count :], numel).float().mul_(2).sub_(1)
        values = blocks.split(signs).mul_(scales[:, :, None])
        write(out, blocks.join(values), alpha, add)


@dataclass(frozen=True)
class Quantize(Compressor):
    """Every element rounded to one of 2^bits levels between its block's minimum and maximum.

    As in MicroAdam (Modoranu et al., NeurIPS 2024, procedure Q):

    1. low and high are the block's extremes, unit = (high - low) / (2^bits - 1);
    2. code = floor((x - low) / unit + 1/2), or, ``stochastic``, floor((x - low) / unit + xi) with
       xi uniform in [0, 1), which is unbiased;
    3. the code is packed; low and unit travel as float32.

    Args:
        bits: 1, 2, 4 or 8.
        block_size: the largest block that shares a range.
        stochastic: unbiased rounding; the draws are independent across ranks.

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
        return 8 * Blocks(numel, self.block_size).count + codes

    def _compress(
        self, rows: torch.Tensor, keys: Sequence[int], rank: int, world_size: int
    ) -> torch.Tensor:
        count, numel = rows.shape
        blocks = Blocks(numel, self.block_size)
        vectors = blocks.split(rows)
        low, high = torch.aminmax(vectors, dim=2)
        unit = (high - low) / (2**self.bits - 1)
        # Where all elements of a block are equal any code decodes to them.
        levels = (vectors - low[..., None]) / torch.where(unit > 0, unit, 1.0)[..., None]
        levels += self._rounding(levels, keys, rank) if self.stochastic else 0.5
        codes = blocks.join(levels).clamp_(0, 2**self.bits - 1).to(torch.uint8)
        payload = torch.zeros(
            count, self.payload_nbytes(numel), dtype=torch.uint8, device=rows.device
        )
        header = 4 * blocks.count
        payload[:, :header] = low.contiguous().view(torch.uint8)
        payload[:, header : 2 * header] = unit.contiguous().view(torch.uint8)
        packed = pack_codes(codes, self.bits)
        payload[:, 2 * header :][:, : packed.shape[1]] = packed
        return payload

    def _rounding(self, levels: torch.Tensor, keys: Sequence[int], rank: int) -> torch.Tensor:
        generator = torch.Generator(levels.device)
        return torch.stack(
            [
                torch.rand(
                    levels.shape[1:], device=levels.device, generator=generator.manual_seed(key)
                )
                for key in fork(keys, rank)
            ]
        )

    def _decode(
        self,
        out: torch.Tensor,
        payloads: torch.Tensor,
        keys: Sequence[int],
        rank: int,
        world_size: int,
        alpha: float,
        add: bool,
    ) -> None:
        numel = out.shape[1]
        blocks = Blocks(numel, self.block_size)
        header = 4 * blocks.count
        low = payloads[:, :header].view(torch.float32)
        unit = payloads[:, header : 2 * header].view(torch.float32)
        codes = unpack_codes(payloads[:, 2 * header :], numel, self.bits)
        values = blocks.split(codes.float()).mul_(unit[..., None]).add_(low[..., None])
        write(out, blocks.join(values), alpha, add)

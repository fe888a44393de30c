"""Codes for the values that a sparse compressor keeps.

Values that were kept for their size are alike in magnitude, so their sign and a coarse magnitude
say nearly all.  Relative mean squared error of the largest 64 of 4096, and the bits that one takes
with its share of the levels:

    bits   levels of magnitude                         gaussian   laplace   bits in all
       1   the mean                                       .0119     .0358          1.25
       2   the means of those below and above the mean    .0044     .0143          2.50
       4   eight, evenly from smallest to largest         .0004     .0015          4.50
      16   (bfloat16)                                    .000003   .000003        16.00

The levels belong to one set of values (those of a block) and travel with it, as bfloat16.
"""

from dataclasses import dataclass

import torch

from comm_hooks.wire.bits import pack_codes, packed_nbytes, unpack_codes

VALUE_BITS = (1, 2, 4, 16, 32)

# How many bfloat16 numbers describe the levels of a set; none where values travel as they are.
_LEVELS = {1: 1, 2: 2, 4: 2}
_DTYPES = {16: torch.bfloat16, 32: torch.float32}


@dataclass(frozen=True)
class ValueCode:
    """The code of values in 1, 2, 4, 16 (bfloat16) or 32 (float32) bits each.

    In 1, 2 and 4 bits a value is its sign (zero counts as positive) and one of 1, 2 or 8
    magnitudes.  With a the magnitudes of a set:

    * 1: mean(a);
    * 2: mean(a where a <= mean(a)) and mean(a where a > mean(a)), one step of Lloyd's algorithm
      from the mean; both are the mean where one of them is empty;
    * 4: min(a) + (max(a) - min(a)) j / 7, j = 0 ... 7, to the nearest.

    All are contractive, ``|x - decode(encode(x))| <= |x|`` over a set: a mean l of n magnitudes
    takes n l^2 off their squares (n l^2 (1 - r^2) when bfloat16 rounds it to (1 + r) l), and with 4
    bits the nearest level is no further from a than min(a) is, which is one of them.

    Shapes: values (n, sets, count) float32 <-> bytes (n, ``nbytes(sets, count)``).

    Example::

        >>> code, values = ValueCode(bits=2), torch.tensor([[[1.0, -1.0, 4.0, -4.0]]])
        >>> code.decode(code.encode(values), sets=1, count=4)
        tensor([[[ 1., -1.,  4., -4.]]])
    """

    bits: int

    def nbytes(self, sets: int, count: int) -> int:
        """Return the bytes that ``sets`` sets of ``count`` values take together."""
        return self._levels_nbytes(sets) + packed_nbytes(sets * count, self.bits)

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Encode values (n, sets, count), float32, into bytes (n, nbytes(sets, count))."""
        if self.bits in _DTYPES:
            return values.flatten(1).to(_DTYPES[self.bits]).view(torch.uint8)
        magnitudes = values.abs()
        levels, indices = self._quantize(magnitudes)
        codes = (indices << 1) | (values >= 0)
        octets = levels.flatten(1).view(torch.uint8)
        return torch.cat([octets, pack_codes(codes.flatten(1), self.bits)], dim=1)

    def decode(self, octets: torch.Tensor, sets: int, count: int) -> torch.Tensor:
        """Return the values (n, sets, count), float32, of bytes (n, nbytes(sets, count) or more).

        With 32 bits they may share the bytes' memory.
        """
        shape = (octets.shape[0], sets, count)
        if self.bits in _DTYPES:
            values = octets[:, : self.nbytes(sets, count)].flatten().view(_DTYPES[self.bits])
            return values.view(shape).float()
        split = self._levels_nbytes(sets)
        levels = octets[:, :split].flatten().view(torch.bfloat16).view(*shape[:2], -1).float()
        codes = unpack_codes(octets[:, split:], sets * count, self.bits).reshape(shape)
        signs = (codes & 1).float().mul_(2).sub_(1)
        if self.bits == 4:
            low, high = levels.split(1, dim=2)
            return signs.mul_((codes >> 1).float().mul_((high - low) / 7).add_(low))
        return signs.mul_(levels.gather(2, (codes >> 1).long()))

    def _levels_nbytes(self, sets: int) -> int:
        return 2 * sets * _LEVELS.get(self.bits, 0)

    def _quantize(self, magnitudes: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the levels (n, sets, 1 or 2), bfloat16, and every magnitude's index, uint8."""
        if self.bits == 4:
            low, high = (m[..., None].bfloat16() for m in magnitudes.aminmax(dim=2))
            unit = (high.float() - low.float()) / 7
            indices = (magnitudes - low.float()) / torch.where(unit > 0, unit, 1.0)
            # bfloat16 may have rounded the extremes inwards.
            return torch.cat([low, high], dim=2), indices.round_().clamp_(0, 7).to(torch.uint8)
        mean = magnitudes.mean(dim=2, keepdim=True)
        if self.bits == 1:
            return mean.bfloat16(), torch.zeros_like(magnitudes, dtype=torch.uint8)
        is_high = magnitudes > mean
        levels = []
        for members in (~is_high, is_high):
            count = members.sum(dim=2, keepdim=True)
            total = (magnitudes * members).sum(dim=2, keepdim=True)
            levels.append(torch.where(count > 0, total / count, mean))
        return torch.cat(levels, dim=2).bfloat16(), is_high.to(torch.uint8)

"""Codes for the values of a sparse compressor.

Values that were kept for their size have similar magnitudes, so a sign and a coarse magnitude are
nearly enough.  Relative mean squared error of the largest 64 of 4096, and the bits that a value
takes with its share of the levels:

    bits   levels of magnitude                         gaussian   laplace   bits in all
       1   the mean                                       .0124     .0378          1.03
       2   the means of those below and above it          .0046     .0154          2.03
       3   the same again within both                     .0018     .0061          3.03
       4   eight, evenly from smallest to largest         .0004     .0015          4.50
      16   (bfloat16)                                    .000003   .000003        16.00
"""

import functools
import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from comm_hooks.kernels.bits import pack_codes, packed_nbytes, unpack_codes
from comm_hooks.kernels.pieces import cut

VALUE_BITS = (1, 2, 3, 4, 16, 32)

_DTYPES = {16: torch.bfloat16, 32: torch.float32}
# Sets share a scale until it stands for so many values: 1/32 of a bit each.
_VALUES_PER_SCALE = 256
# A scale is the largest of its row times 2^(-c/16), a level's ratio to it 2^((r - 128)/32).
_SCALE_STEPS, _RATIO_STEPS, _RATIO_ONE = 16, 32, 128
_NO_SCALE = 255


@dataclass(frozen=True)
class ValueCode:
    """The code of values in 1, 2, 3, 4, 16 (bfloat16) or 32 (float32) bits each.

    In 1 to 4 bits a value is its sign (zero counts as positive) and one of 1, 2, 4 or 8 magnitudes.

    * 1: the mean magnitude of neighbouring sets that together have 256 values or more, in steps of
      1/16 octave below the largest of its row (and zero from 16 octaves on);
    * 2: that mean times one of two numbers, which all sets of a row share: with r a magnitude over
      its mean, the means of those r that are at most 1 and of those above;
    * 3: times one of four: those two groups are divided once more at their means;
    * 4: with a the magnitudes of one set, min(a) + (max(a) - min(a)) j / 7, j = 0 ... 7, to the
      nearest; both extremes are sent as bfloat16.

    The row's largest mean is sent as bfloat16, means and ratios as bytes.  With 1, 2, 3 and 16 bits
    decoded values are bfloat16 numbers.

    All codes are contractive, ``|x - decode(encode(x))| <= |x|``: replacing n magnitudes by any l
    up to twice their mean takes 2 n mean l - n l^2 >= 0 off their squares; the lowest level is
    below that, and choosing the nearest of several does no worse than always taking the lowest.
    With 4 bits the nearest level is no further from a than min(a), which is one of the levels.

    Shapes: values (n, sets, count) float32 <-> bytes (n, ``nbytes(sets, count)``).
    """

    bits: int

    def nbytes(self, sets: int, count: int) -> int:
        """Return the number of bytes that ``sets`` sets of ``count`` values take together."""
        return self._levels_nbytes(sets, count) + packed_nbytes(sets * count, self.bits)

    def encode(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Encode values (n, sets, count), float32.

        Returns:
            The bytes (n, nbytes(sets, count)), and the values as receivers decode them.
        """
        if self.bits in _DTYPES:
            stored = values.flatten(1).to(_DTYPES[self.bits])
            return stored.view(torch.uint8), stored.float().view_as(values)
        if not values.shape[2]:
            return values.new_empty(len(values), 0, dtype=torch.uint8), values
        magnitudes = values.abs()
        if self.bits == 4:
            octets, indices = _even_levels(magnitudes)
        else:
            octets, indices = _shared_levels(magnitudes, 1 << (self.bits - 1))
        codes = (indices << 1) | (values >= 0)
        octets = torch.cat([octets, pack_codes(codes.flatten(1), self.bits)], dim=1)
        return octets, self.decode(octets, *values.shape[1:])

    def decode(self, octets: Tensor, sets: int, count: int) -> Tensor:
        """Return the values (n, sets, count), float32, of bytes (n, nbytes(sets, count) or more).

        With 32 bits they may share the bytes' memory.
        """
        shape = (octets.shape[0], sets, count)
        if self.bits in _DTYPES:
            values = octets[:, : self.nbytes(sets, count)].flatten().view(_DTYPES[self.bits])
            return values.view(shape).float()
        if not count:
            return torch.empty(shape, device=octets.device, dtype=torch.float32)
        split = self._levels_nbytes(sets, count)
        if self.bits == 4:
            levels = _read_even_levels(octets[:, :split], sets)
        else:
            levels = _read_shared_levels(octets[:, :split], sets, count, 1 << (self.bits - 1))
        codes = unpack_codes(octets[:, split:], sets * count, self.bits).reshape(shape)
        magnitudes = levels if self.bits == 1 else levels.gather(2, (codes >> 1).long())
        return (codes & 1).float().mul_(2).sub_(1).mul_(magnitudes)

    def _levels_nbytes(self, sets: int, count: int) -> int:
        if self.bits in _DTYPES or not count:
            return 0
        if self.bits == 4:
            return 4 * sets
        ratios = 0 if self.bits == 1 else 1 << (self.bits - 1)
        return 2 + ratios + -(-sets // _sets_per_scale(count))


def _sets_per_scale(count: int) -> int:
    return max(1, _VALUES_PER_SCALE // count)


def _even_levels(magnitudes: Tensor) -> tuple[Tensor, Tensor]:
    low, high = (m[..., None].bfloat16() for m in magnitudes.aminmax(dim=2))
    octets = torch.cat([low, high], dim=2).flatten(1).view(torch.uint8)
    unit = (high.float() - low.float()) / 7
    indices = (magnitudes - low.float()) / torch.where(unit > 0, unit, 1.0)
    # bfloat16 may have rounded the extremes inwards.
    return octets, indices.round_().clamp_(0, 7).to(torch.uint8)


def _read_even_levels(octets: Tensor, sets: int) -> Tensor:
    low, high = octets.flatten().view(torch.bfloat16).view(-1, sets, 2).float().split(1, dim=2)
    return torch.arange(8, device=octets.device) * ((high - low) / 7) + low


def _shared_levels(magnitudes: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the bytes that describe ``count`` levels, and the index of each magnitude's level."""
    _, sets, values = magnitudes.shape
    shared = _sets_per_scale(values)
    sums = cut(magnitudes.sum(2), shared).sum(2)
    sizes = torch.full(
        sums.shape[1:], float(shared * values), device=sums.device, dtype=torch.float32
    )
    sizes[-1] -= -sets % shared * values
    means = sums / sizes
    largest = means.amax(1, keepdim=True).bfloat16()
    steps = (torch.log2(largest.float() / means) * _SCALE_STEPS).round_()
    # A mean of zero is infinitely many steps away, or none that is a number.
    codes = steps.nan_to_num_(nan=_NO_SCALE).clamp_(0, _NO_SCALE).to(torch.uint8)
    head = [largest.view(torch.uint8)]
    indices = torch.zeros_like(magnitudes, dtype=torch.uint8)
    if count > 1:
        scales = largest.float() * _scale_table(codes.device)[codes.int()]
        scales = _expand(scales, shared, sets)[..., None]
        relative = torch.where(scales > 0, magnitudes / scales, 1.0)
        ratios = _ratios(relative, count)
        head.append(ratios)
        levels = _ratio_table(ratios.device)[ratios.int()]
        for low, high in itertools.pairwise(levels.unbind(1)):
            indices += relative > ((low + high) / 2)[:, None, None]
    return torch.cat([*head, codes], dim=1), indices


def _ratios(relative: Tensor, count: int) -> Tensor:
    """Return the mean of each of ``count`` classes of relative magnitudes as bytes (n, count)."""
    flat = relative.flatten(1)
    classes = [torch.ones_like(flat)]
    means = [torch.ones(len(flat), 1, device=flat.device, dtype=torch.float32)]
    while len(classes) < count:
        halves = [
            half
            for members, mean in zip(classes, means, strict=True)
            for half in (members * (flat <= mean), members * (flat > mean))
        ]
        # The mean of a class without members does not matter, as long as classes ascend.
        parents = [mean for mean in means for _ in range(2)]
        sizes = [half.sum(1, keepdim=True) for half in halves]
        means = [
            torch.where(size > 0, (half * flat).sum(1, keepdim=True) / size.clamp(min=1), parent)
            for half, size, parent in zip(halves, sizes, parents, strict=True)
        ]
        classes = halves
    steps = (torch.log2(torch.cat(means, dim=1)) * _RATIO_STEPS).round_() + _RATIO_ONE
    return steps.nan_to_num_(nan=_RATIO_ONE).clamp_(0, 255).to(torch.uint8)


def _read_shared_levels(octets: Tensor, sets: int, values: int, count: int) -> Tensor:
    ratios = count if count > 1 else 0
    largest = octets[:, :2].flatten().view(torch.bfloat16).float()[:, None]
    codes = octets[:, 2 + ratios :].int()
    levels = (largest * _scale_table(octets.device)[codes])[..., None]
    if ratios:
        levels = levels * _ratio_table(octets.device)[octets[:, None, 2 : 2 + ratios].int()]
    # 16 bits can store the decoded values.
    return _expand(levels.bfloat16().float(), _sets_per_scale(values), sets)


def _expand(of_groups: Tensor, shared: int, sets: int) -> Tensor:
    """Repeat values of groups (n, groups, ...) for each of their sets: (n, sets, ...)."""
    return of_groups.repeat_interleave(shared, dim=1)[:, :sets]


@functools.lru_cache(maxsize=8)
def _scale_table(device: torch.device) -> Tensor:
    table = torch.exp2(-torch.arange(256, dtype=torch.float64) / _SCALE_STEPS)
    table[_NO_SCALE] = 0.0
    return table.float().to(device)


@functools.lru_cache(maxsize=8)
def _ratio_table(device: torch.device) -> Tensor:
    steps = torch.arange(256, dtype=torch.float64) - _RATIO_ONE
    return torch.exp2(steps / _RATIO_STEPS).float().to(device)

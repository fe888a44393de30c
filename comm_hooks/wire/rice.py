"""Rice code: the gaps between sorted integers, with few bits for short gaps.

Rice & Plaunt, IEEE Trans. Commun. 1971; a Golomb code with a power of two as its parameter.  A gap
g becomes g >> b in unary (that many zeros and a one) and its b low bits as they are.

The number of bits depends on the gaps.  Their sum in a set of C places is at most C, so sets differ
little, and many sets together hardly: the unary bits of all sets of a row share one stream with
slightly more room than random sets take.  Elements that do not fit are not sent, and stay in the
residual; the largest elements in gradients and momenta of transformers take within 2 % of the bits
of random ones, so it is rare.
"""

import functools
import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from comm_hooks.kernels.bits import set_places
from comm_hooks.transfers import to_device
from comm_hooks.wire.places import PlacesCode

_MARGIN = 1.01
_DEVIATIONS = 4


class Rice(PlacesCode):
    """The Rice code for ``count`` ascending distinct integers in ``range(universe)``."""

    @property
    def low_bits(self) -> int:
        return _parameter(self.universe, self.count)[0]

    def stream_bits(self, sets: int) -> int:
        # The room for the unary parts.
        low_bits, expected = _parameter(self.universe, self.count)
        # The parts of gaps that are no multiple of 2^b are uniform and nearly independent.
        deviation = math.sqrt(sets * self.count / 12)
        room = math.ceil(_MARGIN * sets * expected + _DEVIATIONS * deviation)
        most = sets * (self.count + ((self.universe - self.count) >> low_bits))
        return min(room, most)

    def encode(self, indices: Tensor, first: npt.NDArray[np.int64]) -> tuple[Tensor, Tensor | None]:
        rows, sets, count = indices.shape
        room = self.stream_bits(sets)
        gaps = indices.int()
        gaps[..., 1:] -= indices[..., :-1] + 1
        gaps = _rotated(gaps, first).flatten(1)
        ends = ((gaps >> self.low_bits) + 1).cumsum(1)
        # Elements that do not fit go to a spare place behind the stream.
        bits = torch.zeros(rows, room + 1, dtype=torch.bool, device=indices.device)
        bits.scatter_(1, (ends - 1).clamp_(max=room), True)
        present = (ends <= room).view(rows, sets, count)
        return self._join(bits[:, :room], gaps), _if_some_lack(present, -first)

    def decode(
        self, octets: Tensor, sets: int, first: npt.NDArray[np.int64]
    ) -> tuple[Tensor, Tensor | None]:
        rows, count = octets.shape[0], self.count
        room = self.stream_bits(sets)
        bits, lows = self._split(octets, sets)
        places = set_places(bits[:, None], sets * count, missing=room)[:, 0]
        present = (places < room).view(rows, sets, count)
        zeros = places.int()
        zeros[:, 1:] -= places[:, :-1] + 1
        gaps = (zeros << self.low_bits) | lows
        indices = (gaps.view(rows, sets, count) + 1).cumsum(2, dtype=torch.int32) - 1
        back = -first
        # Behind the last index that fitted there are only guesses.
        indices = _rotated(indices.clamp_(0, self.universe - 1), back)
        return indices.long(), _if_some_lack(present, back)


def _rotated(coded: Tensor, first: npt.NDArray[np.int64]) -> Tensor:
    """Return ``coded`` (n, sets, count), rotated so that set ``first`` of each row comes first."""
    rows, sets, _ = coded.shape
    order = torch.arange(sets) + torch.from_numpy(first)[:, None]
    order = order % sets + torch.arange(0, rows * sets, sets)[:, None]
    order = to_device(order.flatten(), coded.device)
    return coded.flatten(0, 1).index_select(0, order).view_as(coded)


def _if_some_lack(present: Tensor, first: npt.NDArray[np.int64]) -> Tensor | None:
    """Return ``present``, rotated by ``first``; on the CPU None if all indices are present."""
    is_known = present.device.type == "cpu"  # an accelerator would have to be waited for
    return None if is_known and bool(present.all()) else _rotated(present, first)


@functools.lru_cache(maxsize=1024)
def _parameter(universe: int, count: int) -> tuple[int, float]:
    """Return the low bits b of the shortest code, and a random set's expected unary bits."""
    best = (0, math.inf)
    for low_bits in range(universe.bit_length()):
        unary = count * (1 + _expected_quotient(universe, count, 1 << low_bits))
        if count * low_bits + unary < count * best[0] + best[1]:
            best = (low_bits, unary)
    return best


def _expected_quotient(universe: int, count: int, divisor: int) -> float:
    """Return the mean ``gap // divisor`` between ``count`` random integers below ``universe``."""

    def log_choose(n: int) -> float:
        return math.lgamma(n + 1) - math.lgamma(n - count + 1)

    return sum(
        math.exp(log_choose(universe - gap) - log_choose(universe))
        for gap in range(divisor, universe - count + 1, divisor)
    )

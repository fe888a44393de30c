"""GPU kernel: add a residual and choose the largest elements of every block, in one pass.

1. v = x + factor e, with the elements x of one block and the residual e; it replaces x;
2. magnitudes of floats are ordered like their bits as integers, so the k-th largest of a block is
   found by bisecting integers: count the larger ones, continue in one half.  The search ends when a
   threshold splits off exactly k; else it ends at the k-th largest, and the first of its ties are
   taken.  It begins with the least of the maxima of k or more groups of elements as lower bound,
   and takes 9 rounds for 64 of 4096, 31 at most;
3. a prefix sum over the block gives each element its place among the k: ascending, no sort.

Coding the k values is separate: blocks share scales (comm_hooks/wire/values.py), so the payload,
and with it the residual, depends on all blocks.

With a residual it reaches 60 % of the bandwidth of a copy: x and e are read and v is written once.
Without one the search is the same for a third of the bytes, and 60 % are out of reach.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from comm_hooks.kernels.residual import Residual
from comm_hooks.kernels.triton.launching import launch

_ELEMENTS_OF_WARP = 512
# Of a thread, for 16 elements: with less it would use memory, with more fewer blocks fit.
_REGISTERS = 80


@triton.jit
def _threshold(keys, count, LENGTH: tl.constexpr, GROUPS: tl.constexpr):
    """Return a t with exactly ``count`` keys >= t, or with ties the ``count``-th largest key."""
    maxima = tl.max(tl.reshape(keys, [GROUPS, LENGTH // GROUPS]), 1)
    low = tl.min(maxima, 0)
    high = tl.max(maxima, 0)
    while low < high:
        middle = high - (high - low) // 2
        reached = tl.sum((keys >= middle).to(tl.int32), 0)
        high = tl.where(reached == count, middle, tl.where(reached > count, high, middle - 1))
        low = tl.where(reached >= count, middle, low)
    return low


@triton.jit
def _select(
    rows,
    residuals,
    factors,
    places,
    values,
    numel,
    size,
    blocks,
    count,
    TILE: tl.constexpr,
    GROUPS: tl.constexpr,
    COMPENSATE: tl.constexpr,
):
    vector = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    start = vector * numel + block * size
    place = tl.arange(0, TILE)
    inside = (place < size) & (block * size + place < numel)
    elements = tl.load(rows + start + place, mask=inside, other=0.0)
    if COMPENSATE:
        residual = tl.load(residuals + start + place, mask=inside, other=0.0).to(tl.float32)
        elements += residual * tl.load(factors + vector)
        tl.store(rows + start + place, elements, mask=inside)

    # What is behind a block is zero here; the zeros of the block, if any are chosen, come first.
    keys = elements.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    threshold = _threshold(keys, count, TILE, GROUPS)
    chosen = (keys >= threshold).to(tl.int32)
    surplus = tl.sum(chosen, 0) - count
    if surplus > 0:
        ties = (keys == threshold).to(tl.int32)
        kept = tl.cumsum(ties, 0) <= tl.sum(ties, 0) - surplus
        chosen = tl.where(kept, chosen, chosen - ties)
    position = tl.cumsum(chosen, 0) - 1

    first = (vector * blocks + block) * count
    tl.store(places + first + position, place.to(tl.int64), mask=chosen != 0)
    tl.store(values + first + position, elements, mask=chosen != 0)


def block_top_k(
    rows: Tensor, size: int, count: int, residual: Residual | None = None
) -> tuple[Tensor, Tensor]:
    """Like :func:`comm_hooks.kernels.top_k.block_top_k`; ``size`` is at most LARGEST_BLOCK."""
    if residual and not rows.is_contiguous():
        residual.add_to(rows)
        residual = None
    rows = rows.contiguous()
    numel = rows.shape[1]
    blocks = triton.cdiv(numel, size)
    shape = (len(rows), blocks, count)
    places = torch.empty(shape, dtype=torch.int64, device=rows.device)
    values = torch.empty(shape, device=rows.device, dtype=torch.float32)
    tile = max(32, triton.next_power_of_2(size))
    warps = min(16, max(1, tile // _ELEMENTS_OF_WARP))
    launch(
        _select,
        len(rows) * blocks,
        rows,
        residual.vectors.contiguous() if residual else rows,
        residual.factors() if residual else rows,
        places,
        values,
        numel,
        size,
        blocks,
        count,
        TILE=tile,
        GROUPS=triton.next_power_of_2(count),
        COMPENSATE=residual is not None,
        warps=warps,
        registers=_REGISTERS if tile == warps * _ELEMENTS_OF_WARP else None,
    )
    return places, values

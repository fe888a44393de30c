"""Block top-k, and the addition of the residual before it, in one pass.

1. v = x + factor e, for the elements of one block, in registers; it replaces x;
2. the magnitude of a float orders like the integer that its bits are, so the k-th largest of a
   block is found by bisecting integers: count how many are at least as large, go on in one half.
   It is done as soon as a threshold splits off exactly k; else it ends at the k-th largest, and the
   first of those that tie with it are taken.  It begins with the least of the maxima of k or more
   groups of elements as lower bound, and takes 9 rounds for 64 of 4096, 31 at most;
3. a prefix sum over the block says which of the k places an element goes to: ascending, no sort.

What is not here is done for the k entries alone: values are coded with scales that blocks share
(comm_hooks/wire/values.py), so what is sent, and with it the rest, is known after all blocks are.

Why this should reach 60 % of a copy: x and e are read and v is written once, in transactions of
128 bytes, and the k entries are 1/64 of that.  By the compiled code an element takes some 70
instructions and 3 to 5 for each round, about 110, where an H100 has 190 in the time that 12 bytes
take at 60 %.  A round ends with a sum over all threads of a block, which wait for it; meanwhile
another block of the same multiprocessor goes on, for two of them fit its registers.
"""

import torch
import triton
import triton.language as tl

from comm_hooks.kernels.triton.launching import COMPILE_OPTIONS, on_device_of


@triton.jit
def _threshold(keys, count, LENGTH: tl.constexpr, GROUPS: tl.constexpr):
    """Return an integer that exactly ``count`` keys reach, or the one that ties beyond it have."""
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


def block_top_k(vectors: torch.Tensor, count: int) -> torch.Tensor:
    """Return the places of the largest elements of every block, ascending.

    As :func:`comm_hooks.kernels.top_k.block_top_k`; of equal ones the first are taken.
    Blocks have at most ``LARGEST_BLOCK`` elements.
    """
    return top_k_feedback(vectors.contiguous().flatten(1), vectors.shape[2], count)[0]


def top_k_feedback(
    rows: torch.Tensor,
    size: int,
    count: int,
    *,
    residuals: torch.Tensor | None = None,
    factors: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add the residuals to vectors and choose the largest elements of every block.

    Of equal ones the first are taken.

    Args:
        rows: (n, numel), float32, contiguous; with ``residuals`` the sum is written to it.
        size: elements per block, at most ``LARGEST_BLOCK``.  The last block of a row is padded with
            zeros where it is shorter.
        count: how many to choose of each block, 1 to ``size``.
        residuals: (n, numel), float32 or bfloat16, contiguous.
        factors: (n,), float32, what each residual is multiplied by before it is added.

    Returns:
        ``(places, values)``: int64, in the block and ascending, and float32, both
        (n, blocks, count).
    """
    numel = rows.shape[1]
    blocks = triton.cdiv(numel, size)
    shape = (len(rows), blocks, count)
    places = torch.empty(shape, dtype=torch.int64, device=rows.device)
    values = torch.empty(shape, device=rows.device)
    tile = max(32, triton.next_power_of_2(size))
    with on_device_of(rows):
        _select[(len(rows) * blocks,)](
            rows,
            rows if residuals is None else residuals,
            rows if factors is None else factors,
            places,
            values,
            numel,
            size,
            blocks,
            count,
            TILE=tile,
            GROUPS=triton.next_power_of_2(count),
            COMPENSATE=residuals is not None,
            num_warps=min(16, max(1, tile // 512)),
            **COMPILE_OPTIONS,
        )
    return places, values


def reference_top_k_feedback(
    rows: torch.Tensor,
    size: int,
    count: int,
    *,
    residuals: torch.Tensor | None = None,
    factors: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Do the same as :func:`top_k_feedback` in the plainest way."""
    if residuals is not None and factors is not None:
        rows += residuals.float() * factors[:, None]
    padded = torch.nn.functional.pad(rows, (0, -rows.shape[1] % size)).unflatten(1, (-1, size))
    # A stable sort takes the first of equal ones.
    order = padded.abs().sort(dim=2, descending=True, stable=True).indices
    places = order[..., :count].sort(dim=2).values
    return places, padded.gather(2, places)

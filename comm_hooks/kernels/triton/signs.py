"""GPU kernels: encode signs, one bit per element and a scale per block, and decode them.

Each reaches 60 % of the bandwidth of a copy:

* encode: a program holds a block in registers, so every element is read once, for its magnitude,
  its sign and its residual.  With ``subtract`` it is written once, too, as in a copy.  A residual
  to be added is read once;
* decode: writes every element once and reads a bit for each, of every rank.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from comm_hooks.kernels.residual import Residual
from comm_hooks.kernels.triton.launching import launch

_TILE = 2048


@triton.jit
def _encode(
    rows,
    residuals,
    factors,
    scales,
    bits,
    numel,
    size,
    blocks,
    nbytes,
    TILE: tl.constexpr,
    COMPENSATE: tl.constexpr,
    SUBTRACT: tl.constexpr,
    GIVEN: tl.constexpr,
):
    vector = (tl.program_id(0) // blocks).to(tl.int64)
    block = tl.program_id(0) % blocks
    octet, bit = tl.arange(0, TILE // 8)[:, None], tl.arange(0, 8)[None, :]
    place = octet * 8 + bit
    element = block * size + place
    inside = (place < size) & (element < numel)
    values = tl.load(rows + vector * numel + element, mask=inside, other=0.0)
    if COMPENSATE:
        residual = tl.load(residuals + vector * numel + element, mask=inside, other=0.0)
        values += residual.to(tl.float32) * tl.load(factors + vector)
        if not SUBTRACT:
            tl.store(rows + vector * numel + element, values, mask=inside)
    length = tl.minimum(size, numel - block * size)
    if GIVEN:
        scale = tl.load(scales + vector * blocks + block)
    else:
        scale = tl.sum(tl.sum(tl.abs(values), 1), 0) / length
        tl.store(scales + vector * blocks + block, scale)

    is_positive = values >= 0
    octets = tl.sum((is_positive & inside).to(tl.int32) << bit, 1)
    first = block * size // 8
    octet = tl.arange(0, TILE // 8)
    tl.store(bits + vector * nbytes + first + octet, octets.to(tl.uint8), mask=octet * 8 < length)
    if SUBTRACT:
        rest = values - tl.where(is_positive, scale, -scale)
        tl.store(rows + vector * numel + element, rest, mask=inside)


@triton.jit
def _decode(
    out,
    scales,
    bits,
    alpha,
    numel,
    size,
    blocks,
    tiles,
    ranks,
    scales_of_rank,
    scales_of_vector,
    bits_of_rank,
    bits_of_vector,
    TILE: tl.constexpr,
    ADD: tl.constexpr,
):
    """Sum, in rank order, the decoded elements of all ranks in a part of one block."""
    line = tl.program_id(0) // tiles
    vector = (line // blocks).to(tl.int64)
    start = line % blocks * size
    # A block may begin within a byte, then its first tile begins a few elements before it.
    first = start // 8 + tl.program_id(0) % tiles * (TILE // 8)
    octet = first + tl.arange(0, TILE // 8)
    bit = tl.arange(0, 8)[None, :]
    element = octet[:, None] * 8 + bit
    stop = tl.minimum(start + size, numel)
    inside = (element >= start) & (element < stop)
    target = out + vector * numel + element
    scales += vector * scales_of_vector + line % blocks
    octets = bits + vector * bits_of_vector + octet
    total = tl.load(target, mask=inside, other=0.0) if ADD else tl.zeros([TILE // 8, 8], tl.float32)
    for _ in range(ranks):
        scale = tl.load(scales) * alpha
        signs = tl.load(octets, mask=octet * 8 < stop, other=0).to(tl.int32)[:, None]
        total += tl.where((signs >> bit) & 1 != 0, scale, -scale)
        scales += scales_of_rank
        octets += bits_of_rank
    tl.store(target, total, mask=inside)


def encode_signs(
    rows: Tensor,
    size: int,
    *,
    residual: Residual | None = None,
    subtract: bool = False,
    scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Like :func:`comm_hooks.kernels.signs.encode_signs`, with additions in another order.

    Args:
        rows: (n, numel), float32, contiguous.
        size: at most ``LARGEST_BLOCK``, and a multiple of 8: a byte of signs has one writer.
        residual, subtract, scales: see :func:`comm_hooks.kernels.signs.encode_signs`.
    """
    count, numel = rows.shape
    blocks = triton.cdiv(numel, size)
    given = scales is not None
    if scales is None:
        scales = torch.empty(count, blocks, device=rows.device, dtype=torch.float32)
    bits = torch.empty(count, triton.cdiv(numel, 8), dtype=torch.uint8, device=rows.device)
    tile = max(256, triton.next_power_of_2(min(size, numel)))
    launch(
        _encode,
        count * blocks,
        rows,
        residual.vectors.contiguous() if residual else rows,
        residual.factors() if residual else rows,
        scales.contiguous(),
        bits,
        numel,
        size,
        blocks,
        bits.shape[1],
        TILE=tile,
        COMPENSATE=residual is not None,
        SUBTRACT=subtract,
        GIVEN=given,
        warps=max(1, tile // 512),
    )
    return scales, bits


def decode_signs(
    out: Tensor, scales: Tensor, octets: Tensor, size: int, *, alpha: float, add: bool
) -> None:
    """Like :func:`comm_hooks.kernels.signs.decode_signs`, in one pass; ``out`` is contiguous.

    Only the last dimension of scales and octets must be contiguous.
    """
    count, numel = out.shape
    blocks = triton.cdiv(numel, size)
    tile = min(_TILE, max(32, triton.next_power_of_2(min(size, numel))))
    tiles = triton.cdiv(min(size, numel) + (7 if size % 8 else 0), tile)
    launch(
        _decode,
        count * blocks * tiles,
        out,
        scales,
        octets,
        alpha,
        numel,
        size,
        blocks,
        tiles,
        len(scales),
        scales.stride(0),
        scales.stride(1),
        octets.stride(0),
        octets.stride(1),
        TILE=tile,
        ADD=add,
        warps=max(1, tile // 512),
    )

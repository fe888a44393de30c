"""Compressors that send some elements: the largest, random ones, or 1/N for each of N ranks."""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from comm_hooks.compressors.base import Compressor, write
from comm_hooks.kernels.pieces import Blocks, cut
from comm_hooks.kernels.residual import Residual
from comm_hooks.kernels.scatter import scatter_sum
from comm_hooks.kernels.top_k import block_top_k
from comm_hooks.randomness import Draw, Keys, as_array, fork, random_below, stratified_indices
from comm_hooks.requirements import require_choice, require_flag, require_positive, require_within
from comm_hooks.transfers import to_device
from comm_hooks.wire.index_codes import INDEX_CODES, IndexCode, places_code
from comm_hooks.wire.places import PlacesCode
from comm_hooks.wire.sections import join, word_aligned
from comm_hooks.wire.values import VALUE_BITS, ValueCode

MAX_BLOCK_SIZE = 65536
# The number of payloads that are decoded together, in fewer and larger operations: for 64 of 4096
# they need about as much memory as the vector.  More, up to so many entries in all.
_RANKS_AT_ONCE = 8
_ENTRIES_AT_ONCE = 1 << 15


@dataclass(frozen=True)
class TopK(Compressor):
    """The largest elements in magnitude of every block, with their signs.

    Selecting within blocks (MicroAdam, DeMo, SparseLoCo) makes the selection parallel, the indices
    short and the payload's size static.

    1. cut the vector into equal blocks of at most ``block_size`` elements;
    2. keep the ``ceil(density x block)`` elements of largest magnitude of each;
    3. send their places (2 + log2(1/density) bits each, or half a bit less) and their values.

    Args:
        density: the fraction of elements that is kept, in (0, 1].
        block_size: the largest block, 1 to 65536 elements.
        value_bits: 32 (float32), 16 (bfloat16), or the sign and 0, 1, 2 or 3 bits of magnitude: 1,
            2, 3 or 4 (:class:`~comm_hooks.wire.values.ValueCode`), which cost little with error
            feedback.
        index_code: the code of the places: ``"elias_fano"`` has room for any places; ``"rice"``
            takes half a bit less each and has room for the places of random and most other vectors:
            elements that do not fit, of the last blocks in an order drawn for every key, are left
            out.  If more than about a quarter is kept, both are a bitmap.
        overlap: p, in [0, 1]: the sum of an element that c ranks send is divided by c^p.  0: the
            sum; exchanges return means over all ranks.  1: the mean over the senders.  1/2: the
            size that one rank sends, if ranks send noise, since c terms add up to sqrt(c).  For
            optimizers with a step that makes up for ranks that did not send: with the sum the step
            would be too long where all ranks send.

    Shapes: vector (d,) -> payload uint8.  Ties in magnitude are broken arbitrarily.
    Use with :class:`~comm_hooks.memory.ErrorFeedback`: without it the other elements are lost.
    Not supported: summing payloads (each rank sends other places).

    Example::

        >>> topk = TopK(density=0.25)
        >>> payload = topk.compress(torch.tensor([0.0, -3.0, 1.0, 0.5]), key=0)
        >>> topk.decompress(payload, 4, key=0)
        tensor([ 0., -3.,  0.,  0.])
    """

    density: float = 1 / 64
    block_size: int = 4096
    value_bits: int = 16
    index_code: IndexCode = "elias_fano"
    overlap: float = 0.0

    def __post_init__(self) -> None:
        require_selection(self, self.density, self.block_size, self.value_bits)
        require_within(self, "overlap", self.overlap, "[0, 1]")
        require_choice(self, "index_code", self.index_code, INDEX_CODES)

    @property
    def unbiased(self) -> bool:
        return self.density == 1 and self.value_bits == 32

    contractive = True

    @property
    def adds_up(self) -> bool:
        return not self.overlap

    @property
    def _values(self) -> ValueCode:
        return ValueCode(self.value_bits)

    def _plan(self, numel: int) -> tuple[Blocks, PlacesCode]:
        blocks = Blocks(numel, self.block_size)
        count = math.ceil(self.density * blocks.size)
        return blocks, places_code(self.index_code, blocks.size, count)

    def _values_nbytes(self, blocks: Blocks, code: PlacesCode) -> int:
        return word_aligned(self._values.nbytes(blocks.count, code.count))

    def payload_nbytes(self, numel: int, *, world_size: int = 1) -> int:
        blocks, code = self._plan(numel)
        return self._values_nbytes(blocks, code) + word_aligned(code.nbytes(blocks.count))

    def encode(self, rows: Tensor, draw: Draw) -> Tensor:
        return self._select(rows, draw)[0]

    def extract(self, rows: Tensor, draw: Draw, residual: Residual | None = None) -> Tensor:
        payloads, places, sent = self._select(rows, draw, residual)
        rows.scatter_add_(1, places, -sent)
        return payloads

    def _select(
        self, rows: Tensor, draw: Draw, residual: Residual | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the payloads of rows, and the sent elements: places and values, (n, k)."""
        blocks, code = self._plan(rows.shape[1])
        places, values = block_top_k(rows, blocks.size, code.count, residual)
        codes, present = code.encode(places, _first_blocks(blocks, draw.keys))
        if present is not None:
            values.masked_fill_(~present, 0.0)
        octets, sent = self._values.encode(values)
        return join(octets, codes), *_in_rows(blocks, places, sent, present)

    def decode(
        self, out: Tensor, payloads: Tensor, draw: Draw, *, alpha: float = 1.0, add: bool = False
    ) -> None:
        self._decode_ranks(out, payloads[None], draw.keys, alpha, add)

    def decode_sum(self, out: Tensor, payloads: Tensor, draw: Draw, *, alpha: float = 1.0) -> None:
        blocks, code = self._plan(out.shape[1])
        entries = len(out) * blocks.count * code.count
        at_once = max(_RANKS_AT_ONCE, _ENTRIES_AT_ONCE // entries)
        if self.overlap:  # the number of senders of an element is known when all are decoded
            at_once = len(payloads)
        for number, group in enumerate(payloads.split(at_once)):
            self._decode_ranks(out, group, draw.keys, alpha, add=number > 0)

    def _decode_ranks(
        self, out: Tensor, payloads: Tensor, keys: Keys, alpha: float, add: bool
    ) -> None:
        """Write ``alpha`` times the sum of N ranks' payloads, (N, n, nbytes), or add it."""
        blocks, code = self._plan(out.shape[1])
        split = self._values_nbytes(blocks, code)
        octets, all_keys = payloads.flatten(0, 1), np.tile(as_array(keys), len(payloads))
        coded = self._values.decode(octets[:, :split], blocks.count, code.count)
        first = _first_blocks(blocks, all_keys)
        found, present = code.decode(octets[:, split:], blocks.count, first)
        shape = (len(payloads), len(out), blocks.count, code.count)
        places, values = (t.view(shape) for t in _in_rows(blocks, found, coded, present))
        if self.overlap and len(payloads) > 1:
            scatter_sum(out, places, (values != 0).float(), blocks.size, alpha=1.0, add=False)
            entries = places.transpose(0, 1).flatten(1)
            senders = out.gather(1, entries).clamp_(min=1.0).pow_(-self.overlap)
            values = values * senders.unflatten(1, (len(payloads), *shape[2:])).transpose(0, 1)
        scatter_sum(out, places, values, blocks.size, alpha=alpha, add=add)


def _first_blocks(blocks: Blocks, keys: Keys) -> npt.NDArray[np.int64]:
    """Return, for each row, the block with indices coded first, drawn from the row's key."""
    return (fork(keys, 0) % np.uint64(blocks.count)).astype(np.int64)


def _in_rows(
    blocks: Blocks, places: Tensor, values: Tensor, present: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Turn places in blocks into indices in rows, (n, k); return them and the sent values."""
    in_rows = (places + blocks.starts(places.device)[:, None]).flatten(1)
    # If fewer elements of the last block than are kept are not zero, some of the places may lie in
    # its padding, where a coarse code turns the zero into something else.
    is_sent = in_rows < blocks.numel
    if present is not None:
        is_sent &= present.flatten(1)
    values = values.flatten(1).masked_fill(~is_sent, 0.0)
    return in_rows.clamp_(max=blocks.numel - 1), values


def require_selection(owner: object, density: float, block_size: int, value_bits: int) -> None:
    """Raise ``ValueError`` unless these are valid arguments of :class:`TopK`."""
    require_within(owner, "density", density, "(0, 1]")
    require_positive(owner, "block_size", block_size)
    if block_size > MAX_BLOCK_SIZE:
        raise ValueError(
            f"{type(owner).__name__}: block_size must be at most {MAX_BLOCK_SIZE}, got {block_size}"
        )
    require_choice(owner, "value_bits", value_bits, VALUE_BITS)


@dataclass(frozen=True)
class RandomK(Compressor):
    """k = density x d random elements, the same ones on every rank, so no index is sent.

    1. cut the vector into k equal strata and draw one element of each (from the key);
    2. send it, times the size of its stratum when ``unbiased``.

    Unbiased, the relative mean squared error is d/k - 1 (RandK in MARINA, omega = d/K - 1).
    With ``unbiased=False`` it is a projection, which error feedback needs.

    Args:
        density: k/d, the fraction of elements that is sent, in (0, 1].
        unbiased: whether elements are scaled by d/k.

    Shapes: vector (d,) float32 -> payload (k,) float32, k = round(density x d), at least 1.

    Example::

        >>> RandomK(density=0.5).compress(torch.ones(8), key=1)
        tensor([2., 2., 2., 2.])
    """

    density: float = 1 / 64
    unbiased: bool = True
    linear = True

    def __post_init__(self) -> None:
        require_within(self, "density", self.density, "(0, 1]")
        require_flag(self, "unbiased", self.unbiased)

    @property
    def contractive(self) -> bool:
        return not self.unbiased

    def kept(self, numel: int) -> int:
        """Return k, the number of elements that are sent of ``numel``."""
        return max(1, round(self.density * numel))

    def payload_nbytes(self, numel: int, *, world_size: int = 1) -> int:
        return 4 * self.kept(numel)

    def norm_bound(self, numel: int, *, world_size: int = 1) -> float:
        return float(-(-numel // self.kept(numel))) if self.unbiased else 1.0

    def encode(self, rows: Tensor, draw: Draw) -> Tensor:
        indices, sizes = stratified_indices(draw.keys, rows.shape[1], self.kept(rows.shape[1]))
        values = rows.gather(1, to_device(torch.from_numpy(indices), rows.device))
        if self.unbiased:
            values *= to_device(torch.from_numpy(sizes), rows.device)
        return values

    def decode(
        self, out: Tensor, payloads: Tensor, draw: Draw, *, alpha: float = 1.0, add: bool = False
    ) -> None:
        values = payloads.view(torch.float32)
        indices, _ = stratified_indices(draw.keys, out.shape[1], values.shape[1])
        if not add:
            out.zero_()
        out.scatter_add_(1, to_device(torch.from_numpy(indices), out.device), values * alpha)


@dataclass(frozen=True)
class PermK(Compressor):
    """Each rank sends its own 1/N of the elements, times N; together they send every element once.

    Szlendak, Tyurin & Richtarik, ICLR 2022.  Each run of N consecutive elements is dealt to the N
    ranks in a random cyclic order drawn from the key: every element goes to exactly one rank, to
    each with probability 1/N.  Where all ranks hold the same vector the mean is exact.

    Shapes: vector (d,) float32 -> payload (ceil(d / N),) float32.
    Not supported: any collective but ``"all_gather"``.

    Example::

        >>> v = torch.arange(4.0)
        >>> parts = [PermK().compress(v, key=5, rank=r, world_size=2) for r in range(2)]
        >>> sum(PermK().decompress(p, 4, key=5, rank=r, world_size=2) for r, p in enumerate(parts))
        tensor([0., 2., 4., 6.])
    """

    per_rank = True
    unbiased = True
    contractive = False

    def payload_nbytes(self, numel: int, *, world_size: int = 1) -> int:
        return 4 * -(-numel // world_size)

    def norm_bound(self, numel: int, *, world_size: int = 1) -> float:
        return float(world_size)

    def _own(self, count: int, draw: Draw, device: torch.device) -> Tensor:
        """Return the index of this rank's element in each of ``count`` runs, (n, count, 1)."""
        shifts = random_below(fork(draw.keys, 0), count, draw.world_size)
        own = (shifts + draw.rank) % draw.world_size
        return to_device(torch.from_numpy(own), device)[..., None]

    def encode(self, rows: Tensor, draw: Draw) -> Tensor:
        hands = cut(rows, draw.world_size)
        own = self._own(hands.shape[1], draw, rows.device)
        return hands.gather(2, own).squeeze(2).mul_(draw.world_size)

    def decode(
        self, out: Tensor, payloads: Tensor, draw: Draw, *, alpha: float = 1.0, add: bool = False
    ) -> None:
        values = payloads.view(torch.float32)
        own = self._own(values.shape[1], draw, out.device)
        hands = torch.zeros(*values.shape, draw.world_size, device=out.device, dtype=torch.float32)
        hands.scatter_(2, own, values[..., None])
        write(out, hands.flatten(1)[:, : out.shape[1]], alpha, add)

"""What arrives from other ranks: bodies of any bytes behind a header that fits, and headers."""

import functools
import tracemalloc
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from comm_hooks import Compressor, Identity, PayloadError
from comm_hooks.exchange.message import RoundContext
from comm_hooks.exchange.payload import PayloadFormat
from comm_hooks.randomness import derive_keys
from comm_hooks.wire.gathered_header import GatheredHeader
from comm_hooks.wire.header import Header, PendingChecks
from comm_hooks.wire.index_codes import INDEX_CODES, places_code
from comm_hooks.wire.stamp import Stamp
from comm_hooks.wire.summed_header import SummedHeader
from tests.compressors.catalog import ALL
from tests.fuzz.fuzzing import Draw, Finding

_NUMELS = (1, 2, 7, 64, 100, 333, 1000, 4097)
_STAMP = Stamp(configuration=0xC0FFEE, step=7, loads=3, hyperparameters=11, model=-5)
# A set bit may be written down as its place, in int64, before there turn out to be too many.
_BYTES_PER_BYTE = 8 * 8
# What interpreters and allocators take at times, whatever is decoded.
_SLACK = 1 << 14


def payloads(data: bytes) -> None:
    """Several ranks' payloads of several parts, decoded and averaged."""
    draw = Draw(data)
    compressor, numel = draw.choice(ALL), draw.choice(_NUMELS)
    ranks, rows = 1 + draw.below(3), 1 + draw.below(2)
    summed, looks_at_memory = bool(draw.below(2)) and compressor.linear, draw.below(64) == 0
    format_, matrices = _format(compressor, numel, ranks, rows, summed)
    honest = _honest(compressor, numel, ranks, rows, summed)
    received = honest.clone()
    _spoil(received[:, format_._header.nbytes :], draw)
    if isinstance(format_._header, GatheredHeader):  # else there is no checksum
        for rank, payload in enumerate(received):
            GatheredHeader(range(ranks), rank).write_(payload[None], _STAMP, torch.tensor(0.0))
    assert float(format_.check(received, RoundContext(_STAMP))) == 0
    if looks_at_memory:
        _decode(format_, matrices, honest)  # fills caches
        peak = _peak(format_, matrices, honest)
        most = peak + _BYTES_PER_BYTE * received.nbytes + _SLACK
        if (found := _peak(format_, matrices, received)) > most:
            raise Finding(f"{compressor}: {found} bytes for {numel} elements, honest ones {peak}")
    else:
        _decode(format_, matrices, received)


def single_payloads(data: bytes) -> None:
    """``Compressor.decompress``, by hand: any tensor for a payload, any number of elements."""
    draw = Draw(data)
    compressor = draw.choice(ALL)
    numel = draw.choice([*_NUMELS, 0, -1, 2**20])
    ranks = 1 + draw.below(3)
    wanted = 16
    if 0 < numel <= max(_NUMELS):
        wanted = compressor.payload_nbytes(numel, world_size=ranks)
    nbytes = max(0, wanted + draw.choice([0, 0, 0, 0, 0, 0, 1, -1, 4, -4, 1 << 12]))
    offset = draw.choice([0, 0, 0, 1, 2, 4])
    dtype = draw.choice([torch.uint8, torch.float32, torch.int64, torch.bool, torch.float64])
    octets = np.frombuffer(draw.octets(nbytes + offset), dtype=np.uint8).copy()
    payload = torch.from_numpy(octets)[offset:]
    if nbytes and offset == 0 and nbytes % dtype.itemsize == 0:
        payload = payload.view(dtype)
    if draw.below(8) == 0:
        payload = payload.view(1, -1)
    out = compressor.decompress(
        payload, numel, key=draw.below(1 << 63), rank=draw.below(ranks), world_size=ranks
    )
    assert out.shape == (numel,)


def places(data: bytes) -> None:
    """The codes of places: whatever comes out lies in its block, also on accelerators."""
    draw = Draw(data)
    universe = 1 + draw.below(300)
    count = draw.below(universe + 1)
    sets, rows = 1 + draw.below(4), 1 + draw.below(2)
    code = places_code(draw.choice(INDEX_CODES), universe, count)
    nbytes = code.nbytes(sets)
    octets = np.frombuffer(draw.octets(rows * nbytes), dtype=np.uint8).copy()
    first = np.array([draw.below(sets) for _ in range(rows)])
    found, present = code.decode(torch.from_numpy(octets).view(rows, nbytes), sets, first)
    assert found.shape == (rows, sets, count)
    assert present is None or present.shape == found.shape
    if count and not 0 <= int(found.min()) <= int(found.max()) < universe:
        raise Finding(f"{code}: places from {int(found.min())} to {int(found.max())}")


def gathered_headers(data: bytes) -> None:
    """Headers of gathered payloads: any change is refused."""
    _headers(Draw(data), GatheredHeader)


def summed_headers(data: bytes) -> None:
    """Headers of summed payloads: anything else than the sum is refused."""
    _headers(Draw(data), SummedHeader)


def _headers(draw: Draw, kind: type[Header]) -> None:
    ranks = 1 + draw.below(4)
    sent = _sent(kind, ranks)
    received = sent.clone()
    _spoil(received, draw)
    header = kind(range(ranks), draw.below(ranks))
    try:
        health = header.check(received, _STAMP, PendingChecks())
    except PayloadError:
        return
    same = received.view(torch.int32) == sent.view(torch.int32)
    if kind is SummedHeader:
        # The first number is the health, zeros have two signs, and the body is not looked at.
        same = received.view(torch.float32) == sent.view(torch.float32)
        same[:, 0] = same[:, header.nbytes // 4 :] = True
    if not same.all():
        raise Finding(f"{kind.__name__} took another header for its own, health {float(health)}")


@functools.cache
def _sent(kind: type[Header], ranks: int) -> torch.Tensor:
    header = kind(range(ranks), 0)
    width = -(-header.nbytes // 8) * 8 + 16
    every = torch.zeros(ranks, width, dtype=torch.uint8)
    for rank, payload in enumerate(every):
        kind(range(ranks), rank).write_(payload[None], _STAMP, torch.tensor(0.0))
    if kind is GatheredHeader:
        return every
    return every.view(torch.float32).sum(0, keepdim=True).view(torch.uint8)


def _spoil(received: torch.Tensor, draw: Draw) -> None:
    """Overwrite payloads (n, nbytes), uint8, with any bytes, or some of them."""
    nbytes = received.shape[1]
    if not nbytes:
        return
    rank, how = draw.below(len(received)), draw.below(5)
    octets = received[rank].numpy()
    if how == 0:
        octets[:] = np.frombuffer(draw.octets(nbytes), dtype=np.uint8)
    elif how == 1:
        octets[:] = draw.choice([0x00, 0xFF, 0x7F, 0x80, 0xAA])
    elif how == 2:
        for _ in range(1 + draw.below(3)):
            octets[draw.below(nbytes)] ^= 1 << draw.below(8)
    elif how == 3:
        start = draw.below(nbytes)
        stop = min(nbytes, start + draw.below(64))
        octets[start:stop] = np.frombuffer(draw.octets(stop - start), dtype=np.uint8)
    else:
        special = (np.nan, np.inf, -np.inf, -0.0, 3.4e38, 1e-45, 1.0, 2.0**24)
        words = received[rank].view(torch.float32)
        for _ in range(1 + draw.below(3)):
            words[draw.below(len(words))] = draw.choice(special)


def _format(
    compressor: Compressor, numel: int, ranks: int, rows: int, summed: bool
) -> tuple[PayloadFormat, list[torch.Tensor]]:
    exempt = Identity() if summed or rows == 1 else Identity(16)
    parts = [(exempt, 1, 5), (compressor, rows, numel)]
    matrices = [torch.empty(n, width) for _, n, width in parts]
    return PayloadFormat(parts, range(ranks), 0, summed=summed), matrices


@functools.lru_cache(maxsize=1 << 14)
def _honest(
    compressor: Compressor, numel: int, ranks: int, rows: int, summed: bool
) -> torch.Tensor:
    """Return payloads of random vectors, (ranks, nbytes), or (1, nbytes) their sum."""
    generator = torch.Generator().manual_seed(numel)
    format_, matrices = _format(compressor, numel, ranks, rows, summed)
    parts = [(c, *m.shape) for c, m in zip(format_._compressors, matrices, strict=True)]
    sent = []
    for rank in range(ranks):
        own = PayloadFormat(parts, range(ranks), rank, summed=summed)
        vectors = [torch.randn(m.shape, generator=generator) for m in matrices]
        stacks = [vector[None] for vector in vectors]
        sent += own.encode_all(stacks, _keys(matrices), torch.tensor(0.0), _STAMP)
    received = torch.stack(sent)
    if summed:
        received = received.view(torch.float32).sum(0, keepdim=True).view(torch.uint8)
    return received


def _decode(format_: PayloadFormat, matrices: list[torch.Tensor], received: torch.Tensor) -> None:
    format_.decode_sum(matrices, received, _keys(matrices), alpha=1 / 2)


def _keys(matrices: list[torch.Tensor]) -> list[Any]:
    return [derive_keys(0, 7, tuple(map(str, range(len(matrix))))) for matrix in matrices]


def _peak(format_: PayloadFormat, matrices: list[torch.Tensor], received: torch.Tensor) -> int:
    """Return the bytes of the largest tensor that decoding makes, or of NumPy's arrays together."""
    tracemalloc.start()
    try:
        with _Largest() as largest:
            _decode(format_, matrices, received)
        return max(largest.nbytes, tracemalloc.get_traced_memory()[1])
    except PayloadError:
        return max(largest.nbytes, tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()


class _Largest(TorchDispatchMode):
    """Sees every tensor that an operation returns."""

    nbytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self.nbytes = max(self.nbytes, leaf.nbytes)
        return result

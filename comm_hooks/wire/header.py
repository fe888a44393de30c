"""What stands before a payload: whose it is, and whether it arrived as it was sent.

16 bytes, little-endian:

    'C' 'H' | version | finite | configuration | step | checksum
    2 x u8    u8        u8       u32             u32    u32

``finite`` is 1 if all elements of the sender's vector are, else 0.  The configuration is a digest
of the settings and of the bucket's layout.  The checksum, over the rest of the header and the body,
is the sum of 32-bit words, each times an odd number, modulo 2^32: it changes with every single bit
and with almost any other fault, and takes one pass of plain integer arithmetic on any device.
"""

import functools
import zlib
from dataclasses import dataclass

import torch

from comm_hooks.errors import PayloadError

HEADER_NBYTES = 16
WIRE_VERSION = 1

_WORDS = HEADER_NBYTES // 4
_CHECKSUM = 3  # the header's last word
_MAGIC = int.from_bytes(b"CH", "little")
_FINITE_BIT = 24


@dataclass(frozen=True)
class Stamp:
    """What all payloads of one bucket and step have in common.

    Args:
        configuration: of settings and layout; see :func:`digest`.
        step: of the exchange.
    """

    configuration: int
    step: int

    def words(self) -> list[int]:
        """Return the header's first three words, with nothing said about finiteness."""
        return [_MAGIC | WIRE_VERSION << 16, self.configuration, self.step & 0xFFFFFFFF]


def digest(*described: object) -> int:
    """Return 32 bits that differ where the descriptions do.

    Example::

        >>> digest("topk", 64) == digest("topk", 32)
        False
    """
    return zlib.crc32(repr(described).encode())


def write_headers_(payloads: torch.Tensor, stamp: Stamp, health: torch.Tensor) -> None:
    """Write the headers of payloads (M, nbytes), uint8, whose bodies are written already.

    Args:
        health: float32 scalar on the payloads' device: finite where the sender's vector is.
    """
    words = payloads.view(torch.int32)
    for column, word in enumerate(stamp.words()):
        words[:, column] = _signed(word)
    # A tensor's value, not a Python number: an accelerator is not waited for.
    words[:, 0] += torch.isfinite(health).int() << _FINITE_BIT
    words[:, _CHECKSUM] = 0
    words[:, _CHECKSUM] = _checksum(words)


class HeaderCheck:
    """Compares the headers of payloads with what they should say.

    On the CPU at once.  What an accelerator holds is copied while it goes on computing and compared
    at the next opportunity; until then a payload that is not intact makes the result NaN, which
    every optimizer here skips.
    """

    def __init__(self) -> None:
        self._pending: list[tuple[torch.Tensor, torch.Event, Stamp, str]] = []

    def health(self, payloads: torch.Tensor, stamp: Stamp, senders: str = "rank") -> torch.Tensor:
        """Return 0 if all senders' vectors were finite, else NaN: a float32 scalar.

        Args:
            payloads: (N, nbytes), uint8, in rank order; 4-byte aligned rows.
            stamp: what this rank expects.
            senders: what an error calls them.

        Raises:
            PayloadError: for the first payload that is not what this rank expects.
        """
        self.settle()
        words = payloads.contiguous().view(torch.int32)
        claimed = words[:, _CHECKSUM]
        # The checksum was taken with zero in its own place.
        sums = _checksum(words) - claimed * (2 * _CHECKSUM + 1)
        found = torch.cat([words[:, :_WORDS], sums[:, None]], dim=1)
        finite = (words[:, 0] >> _FINITE_BIT) & 1
        if payloads.device.type == "cpu":
            _compare(found, stamp, senders)
            return torch.where(finite.all(), 0.0, torch.nan)
        kind, configuration, step = map(_signed, stamp.words())
        same = (words[:, 0] & ~(1 << _FINITE_BIT) == kind) & (words[:, 1] == configuration)
        same &= (words[:, 2] == step) & (sums == claimed)
        self._look_later(found, stamp, senders)
        return torch.where(finite.all() & same.all(), 0.0, torch.nan)

    def settle(self) -> None:
        """Raise ``PayloadError`` for what has been found since.  Waits for what is pending."""
        pending, self._pending = self._pending, []
        for found, event, stamp, senders in pending:
            event.synchronize()
            _compare(found, stamp, senders)

    def _look_later(self, found: torch.Tensor, stamp: Stamp, senders: str) -> None:
        copy = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
        copy.copy_(found, non_blocking=True)
        event = torch.Event(found.device)
        event.record()
        self._pending.append((copy, event, stamp, senders))


def _compare(found: torch.Tensor, stamp: Stamp, senders: str) -> None:
    wanted = stamp.words()
    finite = found[:, 0] & (1 << _FINITE_BIT)
    expected = torch.tensor([_signed(word) for word in wanted], dtype=found.dtype)
    stamps = found[:, :_CHECKSUM].clone()
    stamps[:, 0] -= finite
    if (stamps == expected).all() and torch.equal(found[:, _CHECKSUM], found[:, _WORDS]):
        return
    for rank, row in enumerate(found.tolist()):
        first, configuration, step, claimed, checksum = (word & 0xFFFFFFFF for word in row)
        version = (first >> 16) & 0xFF
        sender = f"{senders} {rank}"
        if first & 0xFFFF != _MAGIC:
            raise PayloadError(
                f"the payload of {sender} is not one of comm-hooks: all ranks must take part in "
                "the same round"
            )
        if version != WIRE_VERSION:
            raise PayloadError(
                f"the payload of {sender} is of version {version}, this rank's comm-hooks has "
                f"{WIRE_VERSION}: install the same version on all ranks"
            )
        if claimed != checksum:
            raise PayloadError(
                f"the payload of {sender} was damaged on the way: its checksum does not fit"
            )
        if configuration != wanted[1]:
            raise PayloadError(
                f"the payload of {sender} was made with other settings or of other parameters "
                "than this rank's: give every rank the same settings and the same tensors in the "
                "same order"
            )
        if step != wanted[2]:
            raise PayloadError(
                f"the payload of {sender} belongs to step {step}, this rank is at step "
                f"{wanted[2]}: load the state of the same step on all ranks"
            )


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


@functools.lru_cache(maxsize=8)
def _weights(count: int, device: torch.device) -> torch.Tensor:
    """Return distinct odd numbers, int32."""
    return torch.arange(count, dtype=torch.int32, device=device).mul_(2).add_(1)


def _checksum(words: torch.Tensor) -> torch.Tensor:
    """Return the checksum of each row of words (n, count), int32 that wrap around."""
    weights = _weights(words.shape[1], words.device)
    if words.device.type == "cpu":
        return torch.mv(words, weights)
    return (words * weights).sum(1).int()

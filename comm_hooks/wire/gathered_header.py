"""The header of payloads that are not summed on the wire: stamp, sender and checksum.

32 bytes, little-endian:

    'C' 'H' | version | finite | configuration | step | loads | hyperparameters | model
    2 x u8    u8        u8       u32             u32    u32     u32               u32
    sender | checksum
    u32      u32

``finite`` is 1 if all elements of the sender's vector are, else 0.  The words up to ``model`` are
the sender's :class:`~comm_hooks.wire.stamp.Stamp`; ``sender`` is its rank.  The checksum is over
the rest of the header and the body (:mod:`comm_hooks.wire.checksum`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from comm_hooks.errors import PayloadError
from comm_hooks.transfers import to_device
from comm_hooks.wire.checksum import checksums, signed, upper_half
from comm_hooks.wire.header import Header
from comm_hooks.wire.stamp import MAGIC, STAMP_WORDS, Stamp, refuse_disagreement

HEADER_NBYTES = 32

_MODEL, _SENDER, _CHECKSUM = STAMP_WORDS - 1, STAMP_WORDS, STAMP_WORDS + 1
_FINITE_BIT = 24


class GatheredHeader(Header):
    """The header of payloads that are not summed; it also detects damage and wrong senders.

    Args:
        ranks, place: see :class:`~comm_hooks.wire.header.Header`.
        covers_body: whether the checksum includes the body; not needed for vectors in full
            precision on links as fast as memory.
    """

    def __init__(self, ranks: Sequence[int], place: int, *, covers_body: bool = True) -> None:
        super().__init__(ranks, place)
        self._covers_body = covers_body

    @property
    def nbytes(self) -> int:
        return HEADER_NBYTES

    def write_(self, payloads: Tensor, stamp: Stamp, health: Tensor) -> None:
        words = payloads.view(torch.int32)
        own = self._ranks[self._place]
        words[:, :_CHECKSUM] = _words_of(stamp, [own], torch.isfinite(health).int())
        words[:, _CHECKSUM] = self._checksums(payloads)

    def _read(self, payloads: Tensor) -> tuple[Tensor, Tensor]:
        headers = payloads[:, :HEADER_NBYTES].contiguous().view(torch.int32)
        finite = (headers[:, 0] >> _FINITE_BIT) & 1
        health = torch.where(finite.all(), 0.0, torch.nan)
        return torch.cat([headers, self._checksums(payloads)[:, None]], dim=1), health

    def _require_fit(self, found: Tensor, stamp: Stamp, senders: str) -> None:
        rows = [[word & 0xFFFFFFFF for word in row] for row in found.tolist()]
        stamps = [[row[0] & ~(1 << _FINITE_BIT), *row[1:STAMP_WORDS]] for row in rows]
        names = [f"{senders} {rank}" for rank in self._ranks]
        for name, rank, row, words in zip(names, self._ranks, rows, stamps, strict=True):
            # A foreign payload has no checksum.
            if words[0] == MAGIC and row[_CHECKSUM] != row[-1]:
                raise PayloadError(
                    f"the payload of {name} was damaged on the way: its checksum does not fit; "
                    "check the network and the memory of the nodes"
                )
            if words[0] == MAGIC and row[_SENDER] != rank:
                raise PayloadError(
                    f"the payload in the place of {name} is that of {senders} {row[_SENDER]}: all "
                    "ranks must take part in the same rounds in the same order"
                )
        refuse_disagreement(stamps, names)
        # All of them are equal, but not to that of this rank.
        refuse_disagreement([stamps[0], stamp.words()], [names[0], "this rank"])

    def _fits(self, found: Tensor, stamp: Stamp) -> Tensor:
        finite = (found[:, 0] >> _FINITE_BIT) & 1
        expected = _words_of(stamp, self._ranks, finite)
        return (found[:, :_CHECKSUM] == expected).all() & (
            found[:, _CHECKSUM] == found[:, -1]
        ).all()

    def _checksums(self, payloads: Tensor) -> Tensor:
        """Return the checksum that each header must have as its last word: (n,), int32."""
        covered = payloads if self._covers_body else payloads[:, :HEADER_NBYTES]
        words = covered.contiguous().view(torch.int64)
        body = checksums(words[:, HEADER_NBYTES // 8 :])
        sender = words[:, _SENDER // 2] & 0xFFFFFFFF
        header = torch.cat([words[:, : _SENDER // 2], sender[:, None], body[:, None]], dim=1)
        return upper_half(checksums(header))


def _words_of(stamp: Stamp, senders: Sequence[int], finite: Tensor) -> Tensor:
    """Return the words of headers that precede their checksums: (n, words), int32.

    They are on the device of ``finite``; does not wait for an accelerator.
    """
    known = [*map(signed, stamp.known_words()), 0]
    rows = torch.tensor([[*known, sender] for sender in senders], dtype=torch.int32)
    words = to_device(rows, finite.device)
    words[:, 0] += finite << _FINITE_BIT
    words[:, _MODEL] = stamp.model
    return words

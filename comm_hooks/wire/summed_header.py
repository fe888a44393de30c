"""The header of payloads that are summed on the wire: float32 numbers with a meaningful sum.

All sums are exact for up to 8,192 ranks:

    health | the stamp, in pieces of 11 bits | a mark for each rank
    1        3 per word                        N

The health is 0 if all elements of the rank's vector are finite, else NaN.  Each rank adds its
:class:`~comm_hooks.wire.stamp.Stamp` to those of the others and writes 24 bits of it to its own
mark, where the others add nothing.  So the marks identify the ranks with another stamp, and the
sums the fields that differ.

The body has no checksum: a sum is rounded, which hides earlier damage.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from comm_hooks.errors import PayloadError
from comm_hooks.transfers import to_device
from comm_hooks.wire.checksum import checksums
from comm_hooks.wire.header import Header
from comm_hooks.wire.stamp import STAMP_WORDS, Stamp, refuse_disagreement

_PIECE_BITS = 11
_PIECES = 3  # of a word
_MARK_BITS = 24
_SUMS = STAMP_WORDS * _PIECES

MARKS_START = 1 + _SUMS
"""The number of the first rank's mark among the float32 of a payload."""


def summed_header_nbytes(world_size: int) -> int:
    """Return the size in bytes of the header of payloads that ``world_size`` ranks sum."""
    return 4 * (MARKS_START + world_size)


class SummedHeader(Header):
    """The header of payloads that are received as their sum."""

    def __init__(self, ranks: Sequence[int], place: int) -> None:
        super().__init__(ranks, place)
        self._known: tuple[Stamp, Tensor, Tensor] | None = None

    @property
    def nbytes(self) -> int:
        return summed_header_nbytes(len(self._ranks))

    def write_(self, payloads: Tensor, stamp: Stamp, health: Tensor) -> None:
        pieces, mark = self._pieces_and_mark(stamp, payloads.device)
        values = payloads[:, : self.nbytes].view(torch.float32)
        values[:, 0] = health
        values[:, 1:MARKS_START] = pieces
        values[:, MARKS_START:] = 0
        values[:, MARKS_START + self._place] = mark

    def _read(self, payloads: Tensor) -> tuple[Tensor, Tensor]:
        values = payloads[0, : self.nbytes].view(torch.float32)
        return values[1:], values[0]

    def _fits(self, found: Tensor, stamp: Stamp) -> Tensor:
        pieces, mark = self._pieces_and_mark(stamp, found.device)
        sums, marks = found[:_SUMS], found[_SUMS:]
        return (sums == len(self._ranks) * pieces).all() & (marks == mark).all()

    def _require_fit(self, found: Tensor, stamp: Stamp, senders: str) -> None:
        if self._fits(found, stamp):
            return
        own, ranks = stamp.words(), len(self._ranks)
        pieces, mark = (t.cpu() for t in self._pieces_and_mark(stamp, found.device))
        sums, alike = found[:_SUMS], (found[_SUMS:] == mark).tolist()
        strangers = found[_SUMS:][found[_SUMS:] != mark]
        odd = [rank for rank, like_own in zip(self._ranks, alike, strict=True) if not like_own]
        if odd == [self._ranks[self._place]]:
            raise PayloadError(_damaged(senders, odd))
        if odd and not alike[self._place]:
            raise PayloadError(
                f"the sum of {ranks} payloads is not one of comm-hooks: all ranks must take part "
                "in the same round"
            )
        if not odd:
            # All of them have the same stamp, but their sum is wrong.
            raise PayloadError(_damaged(senders, self._ranks))
        if (strangers == strangers[0]).all():
            # All strangers have the same stamp, so it follows from the sum.
            theirs: list[int | None] = _join((sums - alike.count(True) * pieces) / len(strangers))
        else:
            same = (sums == ranks * pieces).view(STAMP_WORDS, _PIECES).all(1).tolist()
            theirs = [word if here else None for word, here in zip(own, same, strict=True)]
        refuse_disagreement(
            [own if like_own else theirs for like_own in alike],
            [f"{senders} {rank}" for rank in self._ranks],
        )
        # The stamps are equal, only the marks are not.
        raise PayloadError(_damaged(senders, odd))

    def _pieces_and_mark(self, stamp: Stamp, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return the numbers of a stamp to be summed, and the mark of the stamp: float32."""
        if self._known is None or self._known[0] is not stamp:
            words = torch.tensor([*stamp.known_words(), 0])
            if isinstance(stamp.model, Tensor):
                words = to_device(words, stamp.model.device)
            # Not read: that would wait for an accelerator.
            words[-1] = stamp.model & 0xFFFFFFFF
            shifts = torch.arange(0, _PIECES * _PIECE_BITS, _PIECE_BITS, device=words.device)
            pieces = ((words[:, None] >> shifts) & ((1 << _PIECE_BITS) - 1)).flatten()
            bits = (checksums(words[None])[0] >> (64 - _MARK_BITS)) & ((1 << _MARK_BITS) - 1)
            # 0 is the mark of a rank that took no part.
            mark = bits.clamp(min=1)
            numbers = [to_device(known.float(), device) for known in (pieces, mark)]
            self._known = (stamp, numbers[0], numbers[1])
        return self._known[1:]


def _damaged(senders: str, ranks: Sequence[int]) -> str:
    who = f"{senders} {ranks[0]}"
    if len(ranks) > 1:
        who = f"one of {senders}s {', '.join(map(str, ranks))}"
    return (
        f"the payload of {who} was damaged on the way to the sum: its header does not fit; check "
        "the network and the memory of the nodes"
    )


def _join(pieces: Tensor) -> list[int | None]:
    """Return 32-bit words, joined from pieces of 11 bits; None where a piece is no such number."""
    words: list[int | None] = []
    for parts in pieces.view(-1, _PIECES).tolist():
        if all(part.is_integer() and 0 <= part < 1 << _PIECE_BITS for part in parts):
            words.append(sum(int(p) << i * _PIECE_BITS for i, p in enumerate(parts)))
        else:
            words.append(None)
    return words

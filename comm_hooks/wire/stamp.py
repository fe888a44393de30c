"""The stamp: header words that are equal in all payloads of one bucket and step.

Every rank receives the stamps of all ranks; if they differ, all ranks raise the same error.
"""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from torch import Tensor

from comm_hooks.errors import PayloadError

WIRE_VERSION = 2
MAGIC = int.from_bytes(b"CH", "little") | WIRE_VERSION << 16
_MASK = (1 << 32) - 1
_VERSION_MASK = 0xFF << 16

Words = Sequence[int | None]
"""The fields of one rank's stamp, 32 bits each; None for an unknown field that differs from the
known ones."""


@dataclass(frozen=True)
class Stamp:
    """Header words that identify step and settings, equal in all payloads of a bucket and step.

    Args:
        configuration: a digest of settings and layout; see :func:`digest`.
        step: the step of the exchange.
        loads: a digest of the last loaded state's run and of the steps since then; 0 without one.
        hyperparameters: a digest of the optimizer's hyperparameters in this step.
        model: a fingerprint of the replicas, an int32 scalar on the payloads' device
            (``comm_hooks.wire.checksum.fingerprint``); 0 in steps without a comparison.
    """

    configuration: int
    step: int
    loads: int = 0
    hyperparameters: int = 0
    model: int | Tensor = 0

    def words(self) -> list[int]:
        """Return the magic number and the fields as 32-bit numbers; may wait for an accelerator."""
        return [*self.known_words(), int(self.model) & _MASK]

    def known_words(self) -> list[int]:
        """Return :meth:`words` without the fingerprint, which may be on an accelerator."""
        words = (MAGIC, self.configuration, self.step, self.loads, self.hyperparameters)
        return [word & _MASK for word in words]


STAMP_WORDS = len(Stamp(0, 0).words())


def digest(*described: object) -> int:
    """Return a CRC-32 of plain values: if they differ, it differs with high probability."""
    return zlib.crc32(repr(described).encode())


def refuse_disagreement(stamps: Sequence[Words], senders: Sequence[str]) -> None:
    """Raise ``PayloadError`` if stamps differ, naming the senders and the field.

    The majority counts as right; in a tie, the group that includes the first sender.

    Args:
        stamps: the words of each sender's stamp.
        senders: the names of the senders, such as "rank 3".
    """
    for number, field in enumerate(zip(*stamps, strict=True)):
        of_value: dict[int | None, list[str]] = {}
        for sender, value in zip(senders, field, strict=True):
            of_value.setdefault(value, []).append(sender)
        if len(of_value) > 1:
            norm = max((v for v in of_value if v is not None), key=lambda v: len(of_value[v]))
            odd = next(value for value in of_value if value != norm)
            who, others = _listed(of_value[odd]), _listed(of_value[norm])
            _refuse_field(number, who, others, odd, norm)


def _listed(senders: Sequence[str]) -> str:
    if len(senders) == 1:
        return senders[0]
    kind = senders[0].rpartition(" ")[0]
    return f"{kind}s {', '.join(sender.rpartition(' ')[2] for sender in senders)}"


def _refuse_field(number: int, who: str, others: str, odd: int | None, norm: int) -> NoReturn:
    """Raise the error for senders ``who``: word ``number`` differs from that of ``others``."""
    if number == 0:
        magic = ~_VERSION_MASK & _MASK
        if odd is None or (odd ^ norm) & magic:
            # A sender with the right magic number is not a stranger.
            stranger = others if odd is not None and odd & magic == MAGIC & magic else who
            raise PayloadError(
                f"the payload of {stranger} is not one of comm-hooks: all ranks must take part in "
                "the same round"
            )
        raise PayloadError(
            f"the payload of {who} is of version {odd >> 16 & 0xFF}, that of {others} of "
            f"{norm >> 16 & 0xFF}: install the same comm-hooks on all ranks"
        )
    if number == 2 and odd is not None:
        raise PayloadError(
            f"the payload of {who} belongs to step {odd}, that of {others} to step {norm}: let all "
            "ranks take the same steps, from states of the same step"
        )
    raise PayloadError(
        (
            f"the payload of {who} was made with other settings or of other parameters than that "
            f"of {others}: give every rank the same settings and the same tensors in the same "
            "order",
            f"the payload of {who} belongs to another step than that of {others}: let all ranks "
            "take the same steps, from states of the same step",
            f"{who} has loaded another state than {others}, or at another step: load the states of "
            "one save on all ranks, after the same step, or on none",
            f"the optimizer of {who} has other hyperparameters in this step than that of "
            f"{others}, or trains other parameters, or has taken another number of steps: schedule "
            "learning rates and frozen parameters alike on all ranks, and let all ranks take the "
            "same number of steps",
            f"the parameters of {who} are not those of {others}: only some ranks have changed "
            "theirs; resume all from one checkpoint (verify_every=0 skips the comparison, for "
            "machines with different arithmetic)",
        )[number - 1]
    )

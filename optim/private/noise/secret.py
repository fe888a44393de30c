"""Secret random numbers for noise and sampling, which no other process can repeat."""

import hashlib
import math
import os
import weakref
from typing import NoReturn

import numpy as np

from comm_hooks.optim.private.errors import PrivacyError
from comm_hooks.requirements import require_kind


class Unrepeatable:
    """A base class that cannot be pickled or copied: a copy would draw the same secret numbers."""

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be saved, copied or sent: its secret removes the "
            "noise, and a copy would draw the same noise again. A new process draws a new secret"
        )


class Secret(Unrepeatable):
    """A key from the operating system, and the random streams that are derived from it.

    Differential privacy holds against observers that do not know the noise.  A seed that a user
    chose is known; the state of a generator in a checkpoint is known; and if a resumed run draws
    the same noise again, the difference of two releases shows the data clean.  So the key is drawn
    anew in every process, cannot be saved, and no stream is used twice: a stream's label has the
    purpose, the rank and the step.  A forked child process forgets the key.

    The key has 512 bits, hashed from 256 random bits.  A stream is a sequence of generators of
    NumPy's Philox (4x64, 10 rounds; Salmon et al., SC 2011) with a 128-bit key and start that are a
    hash of the label, keyed with the secret (BLAKE2b).  To try all keys is hopeless, and no two
    generators coincide.  Philox passes all known statistical tests but was not made to withstand
    cryptanalysis: no attack on it is known, nor is there a proof.  (``torch.Generator`` on a CPU
    keeps 32 bits of a seed: one released step tells which.)

    Args:
        key: any bytes; by default 32 from :func:`os.urandom`.  Ranks that draw the same share it.

    Example::

        >>> from comm_hooks.optim.private import Secret
        >>> secret = Secret()
        >>> secret.stream("noise", rank=0, step=7).generator().standard_normal(3).shape
        (3,)
    """

    def __init__(self, key: bytes | None = None) -> None:
        if key is not None:
            require_kind(self, "key", key, bytes)
        self._key = hashlib.blake2b(os.urandom(32) if key is None else key).digest()
        _secrets.add(self)

    def stream(self, purpose: str, *, rank: int, step: int) -> "Stream":
        """Return the stream of random numbers for a purpose, rank and step.

        Raises:
            PrivacyError: in a process that was forked off after the secret was drawn.
        """
        # The length makes labels unambiguous, for purposes of any characters.
        return Stream(self, f"{len(purpose)} {purpose} {rank:d} {step:d}")

    def seeds(self, label: str) -> tuple[int, int]:
        """Return the Philox key and the upper half of the counter for a label, 128 bits each."""
        if not self._key:
            raise PrivacyError(
                "Secret: this process was forked off after its secret had been drawn, and would "
                "repeat the noise of its parent: call make_private() in the process that trains"
            )
        digest = hashlib.blake2b(label.encode(), key=self._key, digest_size=32).digest()
        return int.from_bytes(digest[:16], "little"), int.from_bytes(digest[16:], "little")


class Stream:
    """Random numbers for one purpose, rank and step: a sequence of independent generators."""

    def __init__(self, secret: Secret, label: str) -> None:
        self._secret = secret
        self._label = label
        self._pieces = 0

    def seeds(self) -> tuple[int, int]:
        """Return Philox's key, 128 bits, and counter, 256 bits, for the next generator.

        The lower half of the counter is 0: it counts the generator's numbers, up to 2^130.
        """
        key, start = self._secret.seeds(f"{self._label} {self._pieces}")
        self._pieces += 1
        return key, start << 128

    def generator(self) -> np.random.Generator:
        """Return the next NumPy generator, independent of all others of this stream."""
        key, counter = self.seeds()
        return np.random.Generator(np.random.Philox(key=key, counter=counter))

    def draw(self, count: int, rate: float) -> list[int]:
        """Return a random subset of ``range(count)``: each number with probability ``rate``.

        The probability is rounded down to a multiple of 2^-53, never up: less is more private.
        """
        threshold = math.floor(rate * 2.0**53) * 2.0**-53
        found: list[int] = np.flatnonzero(self.generator().random(count) < threshold).tolist()
        return found


_secrets: weakref.WeakSet[Secret] = weakref.WeakSet()


def _forget_all() -> None:
    for secret in _secrets:
        secret._key = b""


os.register_at_fork(after_in_child=_forget_all)

"""Randomness that nobody can repeat: for the noise and for who is sampled."""

import hashlib
import os
from typing import NoReturn

import torch

from comm_hooks.compressors.base import require_kind


class Secret:
    """A key from the operating system, and the random streams that are derived from it.

    The guarantee of differential privacy holds against those who do not know the noise.  A seed
    that a user chose is known; the state of a generator in a checkpoint is known; and a resumed
    run that draws the same noise again lets the difference of two releases show the data clean.
    So the key is drawn anew in every process, cannot be saved, and no stream is used twice: labels
    tell apart what it is for, the rank and the step.

    Args:
        key: any bytes; by default 32 from :func:`os.urandom`.  Ranks that must draw alike share
            one.

    Not supported: noise that is safe against attacks on floating-point numbers (Mironov, CCS 2012)
    or cryptographically strong streams: a stream is a ``torch.Generator`` with a 64-bit seed.

    Example::

        >>> from comm_hooks.optim.private import Secret
        >>> secret = Secret()
        >>> torch.randn(3, generator=secret.stream("noise", rank=0, step=7)).shape
        torch.Size([3])
    """

    def __init__(self, key: bytes | None = None) -> None:
        if key is not None:
            require_kind(self, "key", key, bytes)
        self._key = hashlib.blake2b(os.urandom(32) if key is None else key).digest()

    def stream(
        self, purpose: str, *, rank: int, step: int, device: torch.device | str = "cpu"
    ) -> torch.Generator:
        """Return a generator for one purpose, rank and step: the same for the same three."""
        label = f"{purpose} {rank} {step}".encode()
        digest = hashlib.blake2b(label, key=self._key, digest_size=8).digest()
        # manual_seed() takes 64 bits, signed ones on some devices.
        seed = int.from_bytes(digest, "little") & ((1 << 63) - 1)
        return torch.Generator(device).manual_seed(seed)

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Secret cannot be saved, copied or sent: whoever knows it can remove the noise. A "
            "new process draws a new one"
        )

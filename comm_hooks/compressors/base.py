"""The contract between a vector and what crosses the wire."""

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch

from comm_hooks.errors import PayloadError
from comm_hooks.kernels.residual import Residual
from comm_hooks.randomness import Keys


class Compressor(ABC):
    """Turns a vector into a payload of known size and back.  Pure: no state, no communication.

    A compressor works on ``rows``: a float32 matrix (n, numel) of n equally long vectors, one key
    each, because layers repeat and one batched operation beats n small ones.  A subclass provides
    :meth:`payload_nbytes`, ``_compress`` and ``_decode``; the one-vector methods are derived.

    Class attributes say what a caller may rely on:

    * ``linear``: payloads may be summed on the wire; the sum decompresses to the sum.  Such
      payloads are float32, and ``compress`` is a linear map that depends on public state only.
    * ``unbiased``: the mean of ``decompress(compress(v))`` over keys is ``v``.
    * ``contractive``: ``|v - decompress(compress(v))|`` is below ``|v|`` (in mean square for
      compressors that draw), which is what keeps error feedback from growing without bound.
    * ``per_rank``: the payload depends on the rank even for equal vectors (:class:`PermK`), so it
      cannot be re-cut into shards or summed.
    """

    linear: ClassVar[bool] = False
    per_rank: ClassVar[bool] = False

    @property
    @abstractmethod
    def unbiased(self) -> bool: ...

    @property
    @abstractmethod
    def contractive(self) -> bool: ...

    @property
    def bounds_residuals(self) -> bool:
        """Whether residuals stay bounded, so that a memory may keep them."""
        return self.contractive

    @abstractmethod
    def payload_nbytes(self, numel: int, *, world_size: int = 1) -> int:
        """Return the payload's size in bytes: a multiple of 4 that depends on nothing else."""

    @abstractmethod
    def _compress(self, rows: torch.Tensor, keys: Keys, rank: int, world_size: int) -> torch.Tensor:
        """Return the payloads, one row each: float32 if ``linear``, else float32 or uint8."""

    @abstractmethod
    def _decode(
        self,
        out: torch.Tensor,
        payloads: torch.Tensor,
        keys: Keys,
        rank: int,
        world_size: int,
        alpha: float,
        add: bool,
    ) -> None:
        """Write ``alpha`` times the decompressed ``payloads`` (n, nbytes), uint8, to ``out``.

        With ``add`` they are added to what ``out`` (n, numel), float32, holds.
        """

    def _extract(self, rows: torch.Tensor, keys: Keys, rank: int, world_size: int) -> torch.Tensor:
        """Return the payloads, and subtract from ``rows``, in place, what they say.

        What a memory keeps is then in ``rows``.  To be overridden where that takes less than
        compressing and decompressing.
        """
        payloads = self._compress(rows, keys, rank, world_size)
        octets = payloads.contiguous().view(torch.uint8).view(len(rows), -1)
        self._decode(rows, octets, keys, rank, world_size, -1.0, add=True)
        return payloads

    def _extract_sum(
        self, rows: torch.Tensor, residual: Residual, keys: Keys, rank: int, world_size: int
    ) -> torch.Tensor:
        """Add the residual to ``rows``, in place, and do as :meth:`_extract`.

        To be overridden where one pass over memory does both.
        """
        residual.add_to(rows)
        return self._extract(rows, keys, rank, world_size)

    def _for_shards(self, rows: torch.Tensor, owners: int) -> "Compressor":
        """Return who compresses the shards of ``rows`` (n, numel), stacked as (owners * n, width).

        To be overridden where something in a payload belongs to a row as a whole.  What is returned
        writes payloads that this compressor reads.
        """
        return self

    def _decode_sum(
        self,
        out: torch.Tensor,
        payloads: torch.Tensor,
        keys: Keys,
        world_size: int,
        alpha: float,
    ) -> None:
        """Write ``alpha`` times the sum, in rank order, of payloads (N, n, nbytes) to ``out``.

        To be overridden where that takes less than decompressing one after the other.
        """
        for rank, octets in enumerate(payloads):
            self._decode(out, octets, keys, rank, world_size, alpha, add=rank > 0)

    def norm_bound(self, numel: int, *, world_size: int = 1) -> float:
        """Return the largest possible ``|compress(v)| / |v|``; infinite where there is none.

        Only meaningful for linear maps.  Clipping a vector to C bounds its payload by
        ``norm_bound * C``, which is the sensitivity that private training needs.
        """
        return math.inf

    def compress(
        self, vector: torch.Tensor, *, key: int, rank: int = 0, world_size: int = 1
    ) -> torch.Tensor:
        """Return the payload of ``vector``: 1-D, ``payload_nbytes(vector.numel())`` bytes.

        Args:
            vector: 1-D, floating point, finite, any device.
            key: drawn from (seed, step, parameter); the same on all ranks.
            rank, world_size: whose payload this is.  Only :class:`PermK` and stochastic rounding
                look at them.

        Raises:
            ValueError: if ``vector`` is not a non-empty 1-D floating-point tensor.
        """
        if vector.dim() != 1 or not vector.is_floating_point() or not vector.numel():
            raise ValueError(
                f"compress() needs a non-empty 1-D floating-point tensor, got {vector.dtype} of "
                f"shape {tuple(vector.shape)}: flatten the tensor or convert it"
            )
        return self._compress(vector.float()[None], (key,), rank, world_size)[0]

    def decompress(
        self,
        payload: torch.Tensor,
        numel: int,
        *,
        key: int,
        rank: int = 0,
        world_size: int = 1,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the float32 vector of ``numel`` elements that ``payload`` stands for.

        Args:
            payload: from :meth:`compress` with the same ``key``, ``rank`` and ``world_size``, or,
                for linear compressors, a sum of such payloads.

        Raises:
            PayloadError: if the payload's size is not ``payload_nbytes(numel)``, or its bytes are
                none that a compressor of these settings writes.
            ValueError: if the arguments are not of these kinds and shapes.
        """
        if isinstance(numel, bool) or not isinstance(numel, int) or numel < 1:
            raise ValueError(f"decompress() needs a positive number of elements, got {numel!r}")
        if not isinstance(payload, torch.Tensor) or payload.dim() != 1:
            what = getattr(payload, "shape", None)
            raise ValueError(
                "decompress() needs a payload as compress() returned it, a 1-D tensor, got "
                + (f"{type(payload).__name__}" if what is None else f"shape {tuple(what)}")
            )
        expected = self.payload_nbytes(numel, world_size=world_size)
        if payload.nbytes != expected:
            raise PayloadError(
                f"{self} decompresses {numel} elements from {expected} bytes, got {payload.nbytes}"
            )
        if out is None:
            out = torch.empty(numel, device=payload.device)
        elif out.shape != (numel,) or out.dtype != torch.float32 or not out.is_contiguous():
            raise ValueError(
                f"decompress() needs a contiguous float32 out of shape ({numel},), got {out.dtype} "
                f"of shape {tuple(out.shape)}"
            )
        payloads = payload.contiguous().view(torch.uint8)[None]
        if payloads.storage_offset() % 4:
            payloads = payloads.clone()  # cut out of something larger, where no float32 can begin
        self._decode(out[None], payloads, (key,), rank, world_size, 1.0, add=False)
        return out


def is_number(value: object) -> bool:
    """Return whether ``value`` is a float, or an int that a float can hold, and no boolean."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, float) or abs(value) <= sys.float_info.max


def in_one_line(value: object) -> str:
    """Return the ``repr`` of what somebody passed, in one line, as messages are."""
    try:
        return " ".join(repr(value).split())
    except ValueError:  # Python writes down no integer of more than 4,300 digits
        return f"what is too long to be shown, of the class {type(value).__name__}"


def _name_of(owner: object) -> str:
    """Return who is speaking: a name as it is, else that of the class."""
    return owner if isinstance(owner, str) else type(owner).__name__


def require_within(owner: object, name: str, value: float, interval: str) -> None:
    """Raise ``ValueError`` unless ``value`` is a number in an interval such as ``"[0, 1)"``."""
    low, high = map(float, interval[1:-1].split(","))
    at_ends = (low,) * (interval[0] == "[") + (high,) * (interval[-1] == "]")
    if not is_number(value) or not (low < value < high or value in at_ends):
        raise ValueError(
            f"{_name_of(owner)}: {name} must lie in {interval}, got {in_one_line(value)}"
        )


def require_kind(owner: object, name: str, value: object, *kinds: type) -> None:
    """Raise ``ValueError`` unless ``value`` is of one of the classes."""
    if not isinstance(value, kinds):
        names = [kind.__name__ for kind in kinds]
        listed = " or ".join(f"an {n}" if n[0] in "AEIOU" else f"a {n}" for n in names)
        raise ValueError(f"{_name_of(owner)}: {name} must be {listed}, got {in_one_line(value)}")


def require_callable(owner: object, name: str, value: object, why: str = "") -> None:
    """Raise ``ValueError`` unless ``value`` can be called."""
    if not callable(value):
        raise ValueError(
            f"{_name_of(owner)}: {name} must be callable, got {in_one_line(value)}{why}"
        )


def require_fraction(owner: object, name: str, value: float) -> None:
    """Raise ``ValueError`` unless ``value`` is a number in (0, 1]."""
    if not is_number(value) or not 0 < value <= 1:
        raise ValueError(
            f"{_name_of(owner)}: {name} is the fraction that is kept and must lie in (0, 1], "
            f"got {in_one_line(value)}"
        )


def require_choice(owner: object, name: str, value: object, choices: Sequence[object]) -> None:
    """Raise ``ValueError`` unless ``value`` is one of ``choices``, and of its type.

    True and 1.0 equal 1, but where an integer is asked for they are no number of bits.
    """
    fits = any(isinstance(value, type(choice)) and value == choice for choice in choices)
    if isinstance(value, bool) or not fits:
        listed = ", ".join(map(str, choices))
        raise ValueError(
            f"{_name_of(owner)}: {name} must be one of {listed}, got {in_one_line(value)}"
        )


def require_positive(owner: object, name: str, value: int) -> None:
    """Raise ``ValueError`` unless ``value`` is an integer of at least 1 that 64 bits can hold."""
    require_integer(owner, name, value, "an integer of at least 1")
    if not 1 <= value < 1 << 63:
        below = " and below 2^63" if value > 1 else ""
        raise ValueError(
            f"{_name_of(owner)}: {name} must be an integer of at least 1{below}, "
            f"got {in_one_line(value)}"
        )


def require_integer(owner: object, name: str, value: int, what: str = "an integer") -> None:
    """Raise ``ValueError`` unless ``value`` is an integer, or more than that, as ``what`` says."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{_name_of(owner)}: {name} must be {what}, got {in_one_line(value)}")


def require_flag(owner: object, name: str, value: bool) -> None:
    """Raise ``ValueError`` unless ``value`` is a boolean."""
    if not isinstance(value, bool):
        raise ValueError(
            f"{_name_of(owner)}: {name} must be true or false, got {in_one_line(value)}"
        )


class Blocks:
    """Cuts rows of ``numel`` elements into equal blocks of at most ``block_size``.

    Blocks of equal size need no special case for a tail: a row is padded with at most
    ``count - 1`` zeros in all, and a payload's size follows from ``numel`` alone.
    """

    def __init__(self, numel: int, block_size: int) -> None:
        self.numel = numel
        self.count = -(-numel // block_size)
        self.size = -(-numel // self.count)
        self.padded = self.count * self.size

    def split(self, rows: torch.Tensor) -> torch.Tensor:
        """View (or, where padding is needed, copy) rows (n, numel) as (n, count, size)."""
        if self.padded != self.numel:
            rows = torch.nn.functional.pad(rows, (0, self.padded - self.numel))
        return rows.reshape(rows.shape[0], self.count, self.size)

    def join(self, blocks: torch.Tensor) -> torch.Tensor:
        """View blocks (n, count, size) as rows (n, numel) without the padding."""
        return blocks.reshape(blocks.shape[0], self.padded)[:, : self.numel]


def write(out: torch.Tensor, values: torch.Tensor, alpha: float, add: bool) -> None:
    """Write ``alpha * values`` to ``out``, or add it."""
    if add:
        out.add_(values, alpha=alpha)
    else:
        torch.mul(values, alpha, out=out)


def word_aligned(nbytes: int) -> int:
    """Round up to a multiple of 4, so that float32 sections of a payload can be viewed in place."""
    return -(-nbytes // 4) * 4

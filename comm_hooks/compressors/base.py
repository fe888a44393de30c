"""The interface of compressors: from a vector to a payload and back."""

import math
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from comm_hooks.errors import PayloadError
from comm_hooks.kernels.residual import Residual
from comm_hooks.randomness import Draw

Granularity = Literal["parameter", "bucket"]


class Compressor(ABC):
    """Turns a vector into a payload of known size and back.  Pure: no state, no communication.

    A compressor works on ``rows``: a float32 matrix (n, numel) of n equally long vectors, with one
    random key each: layers repeat, and one batched operation beats n small ones.  A subclass
    provides :meth:`payload_nbytes`, :meth:`encode`, :meth:`decode` and the properties ``unbiased``
    and ``contractive``; everything else is derived from them.

    Class attributes state guarantees for callers:

    * ``linear``: payloads may be summed on the wire; the sum of payloads decompresses to the sum of
      vectors.  Payloads are float32, and ``compress`` is a linear map that depends on the key only.
    * ``unbiased``: the mean of ``decompress(compress(v))`` over keys is ``v``.
    * ``contractive``: ``|v - decompress(compress(v))|`` is below ``|v|`` (in mean square for
      compressors that draw), so that residuals of error feedback stay bounded.
    * ``per_rank``: the payload depends on the rank even for equal vectors (:class:`PermK`), so it
      cannot be re-cut into shards or summed.
    * ``granularity``: the default unit of compression, a ``"parameter"`` or a whole ``"bucket"``.
    """

    linear: ClassVar[bool] = False
    per_rank: ClassVar[bool] = False
    granularity: ClassVar[Granularity] = "parameter"

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

    @property
    def adds_up(self) -> bool:
        """Whether :meth:`decode_sum` writes the sum of the ranks' decoded vectors."""
        return True

    @abstractmethod
    def payload_nbytes(self, numel: int, *, world_size: int = 1) -> int:
        """Return the bytes of the payload of a vector of ``numel`` elements, a multiple of 4."""

    @abstractmethod
    def encode(self, rows: Tensor, draw: Draw) -> Tensor:
        """Return the payloads of ``rows`` (n, numel), float32, which do not change.

        Returns:
            The payloads: (n, payload_nbytes / 4) float32, or (n, payload_nbytes) uint8, which a
            ``linear`` compressor must not return.
        """

    @abstractmethod
    def decode(
        self, out: Tensor, payloads: Tensor, draw: Draw, *, alpha: float = 1.0, add: bool = False
    ) -> None:
        """Write ``alpha`` times the decompressed payloads to ``out``, or add them to it.

        Args:
            out: (n, numel), float32.
            payloads: (n, payload_nbytes), uint8, each aligned to 4 bytes; read only.
            draw: the random draw that was given to :meth:`encode`.
            alpha: a factor of the decompressed vectors.
            add: whether to add to ``out`` instead of overwriting it.
        """

    def extract(self, rows: Tensor, draw: Draw, residual: Residual | None = None) -> Tensor:
        """Add the residual to ``rows``, encode them, and leave the new residual in ``rows``.

        Override it if one pass can replace these three.

        Args:
            rows: (n, numel), float32, changed in place.
            residual: the residual to be added to the rows first; None: nothing is added.

        Returns:
            The payloads, as :meth:`encode` returns them.
        """
        if residual:
            residual.add_to(rows)
        payloads = self.encode(rows, draw)
        self.decode(rows, payloads.contiguous().view(torch.uint8), draw, alpha=-1.0, add=True)
        return payloads

    def decode_sum(self, out: Tensor, payloads: Tensor, draw: Draw, *, alpha: float = 1.0) -> None:
        """Write ``alpha`` times the sum, in rank order, of all ranks' payloads to ``out``.

        Compressors without :attr:`adds_up` scale each element of the sum.  Override it if there is
        a faster way than to decode one payload after the other.

        Args:
            out: (n, numel), float32.
            payloads: (N, n, payload_nbytes), uint8, of N ranks.
            draw: the random draw of any of the ranks.
        """
        for rank, octets in enumerate(payloads):
            self.decode(out, octets, replace(draw, rank=rank), alpha=alpha, add=rank > 0)

    def for_shards(self, rows: Tensor, owners: int) -> "Compressor":
        """Return the compressor for the shards, (owners * n, width), of ``rows`` (n, numel).

        Override it if a part of a payload, such as a scale, depends on the whole row.  The returned
        compressor writes payloads that this compressor reads.
        """
        return self

    def norm_bound(self, numel: int, *, world_size: int = 1) -> float:
        """Return the largest possible ``|compress(v)| / |v|``; infinite if there is none.

        Only meaningful for linear compressors.  Clipping a vector to norm C bounds the norm of its
        payload by ``norm_bound * C``, the sensitivity that private training needs.
        """
        return math.inf

    def compress(self, vector: Tensor, *, key: int, rank: int = 0, world_size: int = 1) -> Tensor:
        """Return the payload of ``vector``: 1-D, ``payload_nbytes(vector.numel())`` bytes.

        Args:
            vector: 1-D, floating point, finite, any device.
            key: drawn from (seed, step, parameter); the same on all ranks.
            rank, world_size: the sender's rank and the number of ranks; only :class:`PermK` and
                stochastic rounding use them.

        Raises:
            ValueError: if ``vector`` is not a non-empty 1-D floating-point tensor.
        """
        if vector.dim() != 1 or not vector.is_floating_point() or not vector.numel():
            raise ValueError(
                f"{self}: compress() needs a non-empty 1-D floating-point tensor, got "
                f"{vector.dtype} of shape {tuple(vector.shape)}: flatten the tensor or convert it"
            )
        return self.encode(vector.float()[None], Draw((key,), rank, world_size))[0]

    def decompress(
        self,
        payload: Tensor,
        numel: int,
        *,
        key: int,
        rank: int = 0,
        world_size: int = 1,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the decompressed float32 vector of ``numel`` elements.

        Args:
            payload: the result of :meth:`compress` with the same ``key``, ``rank`` and
                ``world_size``, or, for linear compressors, a sum of such payloads.

        Raises:
            PayloadError: if the size of the payload is not ``payload_nbytes(numel)``, or no
                compressor with these settings writes such bytes.
            ValueError: if ``numel``, ``payload`` or ``out`` has a wrong type, dtype or shape.
        """
        if isinstance(numel, bool) or not isinstance(numel, int) or numel < 1:
            raise ValueError(f"{self}: decompress() needs a positive integer numel, got {numel!r}")
        if not isinstance(payload, Tensor) or payload.dim() != 1:
            what = getattr(payload, "shape", None)
            raise ValueError(
                f"{self}: decompress() needs a payload as compress() returned it, 1-D, got "
                + (f"{type(payload).__name__}" if what is None else f"shape {tuple(what)}")
            )
        expected = self.payload_nbytes(numel, world_size=world_size)
        if payload.nbytes != expected:
            raise PayloadError(
                f"{self} decompresses {numel} elements from {expected} bytes, got {payload.nbytes}"
                ": pass the numel, world_size and compressor settings of compress()"
            )
        if out is None:
            out = torch.empty(numel, device=payload.device, dtype=torch.float32)
        elif out.shape != (numel,) or out.dtype != torch.float32 or not out.is_contiguous():
            raise ValueError(
                f"{self}: decompress() needs a contiguous float32 out of shape ({numel},), got "
                f"{out.dtype} of shape {tuple(out.shape)}"
            )
        payloads = payload.contiguous().view(torch.uint8)[None]
        if payloads.storage_offset() % 4:
            payloads = payloads.clone()  # a slice without the alignment of float32
        self.decode(out[None], payloads, Draw((key,), rank, world_size))
        return out


def write(out: Tensor, values: Tensor, alpha: float, add: bool) -> None:
    """Write ``alpha * values`` to ``out``; with ``add``, add it to ``out``."""
    if add:
        out.add_(values, alpha=alpha)
    else:
        torch.mul(values, alpha, out=out)

"""The layout of a bucket's parameters in a flat float32 workspace.

A bucket arrives as flat segments, one per parameter.  Small and one-dimensional parameters (norms,
biases) are exempt from compression: they are a fraction of a percent of the elements and suffer
most.  The others are grouped by length, so that a compressor sees one matrix per distinct length
with a parameter in each row, and repeated layers cost one batched operation, not a Python loop.

A layout is temporary: DDP rebuilds its buckets, torch.compile changes them, a resumed run has
others.  Everything that lasts (residuals, random keys) is tied to parameter names.
"""

import hashlib
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from comm_hooks.compressors.base import Compressor, Granularity
from comm_hooks.compressors.identity import Identity
from comm_hooks.kernels.residual import Residual
from comm_hooks.memory.rows import Rows


@dataclass(frozen=True)
class Segment:
    """The name, the shape and the treatment of one tensor of a bucket.

    Args:
        name: the name of the parameter.
        shape: the shape of the tensor.
        exempt: whether the tensor is sent uncompressed, in the exchange's ``exempt_bits``.
        exact: whether it is always sent in float32, as flags, counts and other extras are.
    """

    name: str
    shape: tuple[int, ...]
    exempt: bool
    exact: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Workspace:
    """One float32 tensor for the vectors of many parameters, with matrix views of its parts.

    Args:
        exact: the number of elements sent in float32; None if there are none.
        exempt: the number of elements sent uncompressed otherwise; None if there are none.
        groups: the parameters to compress: for each distinct length, their names and that length.
        device: the device of the tensor.
        granularity: see :class:`~comm_hooks.ExchangeSettings`.
        storage: a float32 tensor to work in, at least as long as all elements; None for a new one.

    Attributes:
        work: float32, all elements: exact ones, exempt ones, then the groups.
        exact, exempt: the uncompressed elements, one row each; None if there are none.
        groups: for each distinct length, a matrix view with a parameter to compress in each row.
        compressed: the rows that a compressor gets: ``groups``, or with ``granularity="bucket"``
            all of them as a single row.
    """

    def __init__(
        self,
        exact: int | None,
        exempt: int | None,
        groups: Sequence[tuple[Sequence[str], int]],
        device: torch.device,
        granularity: Granularity,
        storage: torch.Tensor | None = None,
    ) -> None:
        self.device = device
        self.granularity = granularity
        middle, start = exact or 0, (exact or 0) + (exempt or 0)
        sizes = [len(names) * numel for names, numel in groups]
        total = start + sum(sizes)
        if storage is None:
            storage = torch.zeros(total, device=device, dtype=torch.float32)
        self.work = storage[:total]
        self.exact = None if exact is None else Rows(("",), self.work[None, :middle])
        self.exempt = None if exempt is None else Rows(("",), self.work[None, middle:start])
        self._plain = [rows for rows in (self.exact, self.exempt) if rows]
        self.groups = [
            Rows(tuple(names), part.view(len(names), numel))
            for part, (names, numel) in zip(self.work[start:].split(sizes), groups, strict=True)
        ]
        self.compressed = self.groups
        if granularity == "bucket" and self.groups:
            digest = hashlib.blake2b(repr([g.names for g in self.groups]).encode()).hexdigest()
            self.compressed = [Rows((digest,), self.work[None, start:])]

    def vectors(self) -> list[Rows]:
        """Return views of the workspace: the uncompressed rows, then one matrix for each group."""
        return [*self._plain, *self.groups]

    def parts(self) -> list[Rows]:
        """Return the matrices to encode one by one: uncompressed rows, then :attr:`compressed`."""
        return [*self._plain, *self.compressed]

    def matrices(self) -> list[torch.Tensor]:
        """Return the matrix of each of :meth:`parts`."""
        return [part.matrix for part in self.parts()]

    def compressors(self, compressor: Compressor, exempt: Compressor) -> list[Compressor]:
        """Return the compressor of each of :meth:`parts`.

        Args:
            compressor: the compressor of the compressed rows.
            exempt: the compressor of the exempt row.
        """
        plain = [Identity() if rows is self.exact else exempt for rows in self._plain]
        return [*plain, *[compressor] * len(self.compressed)]

    def residuals(self, of_groups: Sequence[Residual | None]) -> list[Residual | None]:
        """Return the residual that is still to be added to each of :meth:`parts`; None: nothing.

        With ``granularity="bucket"`` the residuals are added here, in place.

        Args:
            of_groups: the residual of each of the groups.
        """
        of_compressed = list(of_groups)
        if self.compressed is not self.groups:
            for rows, residual in zip(self.groups, of_groups, strict=True):
                if residual:
                    residual.add_to(rows.matrix)
            of_compressed = [None] * len(self.compressed)
        return [*[None] * len(self._plain), *of_compressed]


class Layout(Workspace):
    """The workspace of one bucket, with a view for each of its parameters.

    Args:
        segments: the parameters of the bucket.
        device, granularity, storage: see :class:`Workspace`.

    Attributes:
        names: the names of all segments.
        views: each segment's part of the workspace, in its shape.
    """

    def __init__(
        self,
        segments: tuple[Segment, ...],
        device: torch.device,
        granularity: Granularity,
        storage: torch.Tensor | None = None,
    ) -> None:
        self.segments = segments
        self.names = {segment.name for segment in segments}
        exact = [s for s in segments if s.exact]
        exempt = [s for s in segments if s.exempt and not s.exact]
        by_length: dict[int, list[str]] = {}
        for segment in segments:
            if not segment.exempt and not segment.exact:
                by_length.setdefault(segment.numel, []).append(segment.name)
        super().__init__(
            # Parameters without elements have no row of their own.
            sum(s.numel for s in exact) or None,
            sum(s.numel for s in exempt) or None,
            [(names, numel) for numel, names in by_length.items()],
            device,
            granularity,
            storage,
        )
        plain = [*exact, *exempt]
        lengths = [s.numel for s in plain]
        pieces = self.work[: sum(lengths)].split(lengths)
        vectors = dict(zip((s.name for s in plain), pieces, strict=True))
        for rows in self.groups:
            vectors.update(zip(rows.names, rows.matrix, strict=True))
        self.views = [vectors[s.name].view(s.shape) for s in segments]

    def over(self, storage: torch.Tensor) -> "Layout":
        """Return a layout of the same segments that works in another tensor."""
        return Layout(self.segments, self.device, self.granularity, storage)

    def load(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy tensors shaped like the segments (any float dtype) into the workspace.

        Does nothing if the tensors are :attr:`views`.
        """
        if not self._are_views(tensors):
            torch._foreach_copy_(self.views, list(tensors))

    def store(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy the workspace back into tensors shaped like the segments."""
        if not self._are_views(tensors):
            torch._foreach_copy_(list(tensors), self.views)

    def _are_views(self, tensors: Sequence[torch.Tensor]) -> bool:
        return all(map(operator.is_, tensors, self.views))

"""How a bucket's parameters are laid out for a round.

A bucket arrives as flat segments, one per parameter.  Small and one-dimensional parameters (norms,
biases) are exempt from compression: they are a fraction of a percent of the elements and suffer
most.  The others are grouped by length, so that a compressor sees one matrix per distinct length
with a parameter in each row, and repeated layers cost one batched operation, not a Python loop.

A layout is an arrangement of the moment: DDP rebuilds its buckets, torch.compile changes them, a
resumed run has others.  Whatever must last (residuals, random keys) is tied to parameter names.
"""

import hashlib
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from comm_hooks.kernels.residual import Residual

Granularity = Literal["parameter", "bucket"]


@dataclass(frozen=True)
class Segment:
    """One parameter of a bucket: its name, the shape it arrives in, and whether it is exempt."""

    name: str
    shape: tuple[int, ...]
    exempt: bool

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(eq=False)
class Rows:
    """Equally long vectors as a float32 matrix (n, numel), with the name of each row."""

    names: tuple[str, ...]
    matrix: torch.Tensor


@dataclass(eq=False)
class Layout:
    """A workspace for one bucket, and the views of it that the steps of a round need.

    Attributes:
        work: float32, all elements: first the exempt ones, then the groups.
        exempt: what travels uncompressed, as one row; None if nothing does.
        groups: the parameters to compress, grouped by length.
        compressed: the rows a compressor sees: ``groups``, or with ``granularity="bucket"`` all of
            them as a single row.
        views: each segment's part of the workspace, in its shape.
    """

    segments: tuple[Segment, ...]
    device: torch.device
    granularity: Granularity
    work: torch.Tensor = field(init=False)
    exempt: Rows | None = field(init=False, default=None)
    groups: list[Rows] = field(init=False)
    compressed: list[Rows] = field(init=False)
    views: list[torch.Tensor] = field(init=False)

    def __post_init__(self) -> None:
        exempt = [s for s in self.segments if s.exempt]
        by_length: dict[int, list[Segment]] = {}
        for segment in self.segments:
            if not segment.exempt:
                by_length.setdefault(segment.numel, []).append(segment)
        self.work = torch.zeros(sum(s.numel for s in self.segments), device=self.device)

        views: dict[str, torch.Tensor] = {}
        start = 0
        for segment in exempt:
            views[segment.name] = self.work[start : start + segment.numel]
            start += segment.numel
        if exempt:
            self.exempt = Rows(("",), self.work[None, :start])
        first_compressed = start

        self.groups = []
        for numel, members in by_length.items():
            matrix = self.work[start : start + len(members) * numel].view(len(members), numel)
            views.update(zip((s.name for s in members), matrix, strict=True))
            self.groups.append(Rows(tuple(s.name for s in members), matrix))
            start += matrix.numel()

        self.compressed = self.groups
        if self.granularity == "bucket" and self.groups:
            digest = hashlib.blake2b(repr([g.names for g in self.groups]).encode()).hexdigest()
            self.compressed = [Rows((digest,), self.work[None, first_compressed:])]
        self.views = [views[s.name].view(s.shape) for s in self.segments]

    @property
    def names(self) -> set[str]:
        return {segment.name for segment in self.segments}

    def parts(self) -> list[Rows]:
        """Return everything that travels: the exempt row, if any, then the compressed rows."""
        return [self.exempt, *self.compressed] if self.exempt else self.compressed

    def residuals(self, of_groups: Sequence[Residual | None]) -> list[Residual | None]:
        """Return what is still to be added to each of :meth:`parts`, given that of each group.

        What no part has to itself is added at once.
        """
        of_compressed = list(of_groups)
        if self.compressed is not self.groups:
            for rows, residual in zip(self.groups, of_groups, strict=True):
                if residual:
                    residual.add_to(rows.matrix)
            of_compressed = [None] * len(self.compressed)
        return [None, *of_compressed] if self.exempt else of_compressed

    def load(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy tensors shaped like the segments (any float dtype) into the workspace.

        Nothing is to be done for :attr:`views` themselves.
        """
        if not self._are_views(tensors):
            torch._foreach_copy_(self.views, list(tensors))

    def store(self, tensors: Sequence[torch.Tensor]) -> None:
        """Copy the workspace back into tensors shaped like the segments."""
        if not self._are_views(tensors):
            torch._foreach_copy_(list(tensors), self.views)

    def _are_views(self, tensors: Sequence[torch.Tensor]) -> bool:
        return all(map(operator.is_, tensors, self.views))

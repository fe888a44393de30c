"""Divide the vectors of a bucket into shards."""

from collections.abc import Iterator, Sequence

import torch

from comm_hooks.exchange.layout import Workspace


class Shards:
    """Splits every vector into equal ranges of elements; each rank owns one of them.

    The owner of an element depends on its parameter alone, not on the bucket or the granularity:
    residuals of owners remain valid when DDP rebuilds its buckets.

    Args:
        whole: the workspace to divide.
        owners: the number of owners (ranks).

    Attributes:
        owned: a workspace for one owner's ranges, with the names of ``whole``.  Ranges that are
            shorter than others have zeros at their end.
    """

    def __init__(self, whole: Workspace, owners: int) -> None:
        self._owners = owners
        self._vectors = [rows.matrix for rows in whole.vectors()]
        exact, exempt = (
            None if rows is None else shard_width(rows.matrix.shape[1], owners)
            for rows in (whole.exact, whole.exempt)
        )
        self.owned = Workspace(
            exact,
            exempt,
            [(rows.names, shard_width(rows.matrix.shape[1], owners)) for rows in whole.groups],
            whole.device,
            whole.granularity,
        )

    def cut(self) -> list[torch.Tensor]:
        """Return copies of all shards: for each part of ``owned``, (owners, rows, width)."""
        stacks = [
            part.matrix.new_zeros(self._owners, *part.matrix.shape) for part in self.owned.parts()
        ]
        for vectors, shards in zip(self._vectors, self._shards_in(stacks), strict=True):
            cut_into(shards, vectors)
        return stacks

    def join(self, stacks: Sequence[torch.Tensor], into: Workspace) -> None:
        """Copy shards, as :meth:`cut` returns them, to a workspace like the divided one."""
        for rows, shards in zip(into.vectors(), self._shards_in(stacks), strict=True):
            join_from(shards, rows.matrix)

    def _shards_in(self, stacks: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return, for each matrix of vectors, a view by owning rank: (owners, rows, width)."""
        if self.owned.compressed is self.owned.groups:
            return list(stacks)
        *plain, bucket = stacks
        shapes = [rows.matrix.shape for rows in self.owned.groups]
        pieces = bucket[:, 0].split([shape.numel() for shape in shapes], dim=1)
        return [*plain, *(p.unflatten(1, shape) for p, shape in zip(pieces, shapes, strict=True))]


def shard_width(numel: int, owners: int) -> int:
    """Return the number of elements of each owner's shard of a vector, rounded up."""
    return -(-numel // owners)


def cut_into(shards: torch.Tensor, vectors: torch.Tensor) -> None:
    """Copy vectors (n, numel) to shards (owners, n, width), except for their padding."""
    for shard, columns in _pairs(shards, vectors):
        shard.copy_(columns)


def join_from(shards: torch.Tensor, vectors: torch.Tensor) -> None:
    """Copy shards (owners, n, width) to vectors (n, numel)."""
    for shard, columns in _pairs(shards, vectors):
        columns.copy_(shard)


def _pairs(
    shards: torch.Tensor, vectors: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield views of all full shards and their columns of ``vectors``, then of a shorter one."""
    width = shards.shape[2]
    full = vectors.shape[1] // width if width else 0
    if full:
        columns = vectors[:, : full * width].unflatten(1, (full, width))
        yield shards[:full], columns.transpose(0, 1)
    rest = vectors[:, full * width :]
    if rest.shape[1]:
        yield shards[full, :, : rest.shape[1]], rest

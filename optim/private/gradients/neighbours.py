"""Batches in which some of the samples are replaced, to see whether the others notice."""

from collections.abc import Iterator, Sequence

import torch

PER_BIT = 6  # batches for each bit of a row's number
_EXTREME = 1e3


def neighbours(leaves: Sequence[torch.Tensor]) -> Iterator[tuple[list[int], list[torch.Tensor]]]:
    """Yield rows that are kept, and a batch in which all other rows are replaced.

    Each bit of a row's number splits the rows into kept and others, and the other way round: so
    for all rows i != j one split keeps i and not j.  The others are

    * replaced by kept ones
    * made extreme: multiplied by 1000 and -1000; x becomes 1 - round(x) in tensors within [0, 1]

    Args:
        leaves: the tensors of a batch of at least two samples.
    """
    rows = len(leaves[0])
    for bit in range((rows - 1).bit_length()):
        for value in (0, 1):
            kept = [row for row in range(rows) if row >> bit & 1 == value]
            others = [row for row in range(rows) if row >> bit & 1 != value]
            places = list(range(rows))
            for count, other in enumerate(others):
                places[other] = kept[count % len(kept)]
            yield kept, [leaf[places] for leaf in leaves]
            for sign in (1.0, -1.0):
                yield kept, [_extreme(leaf, others, sign) for leaf in leaves]


def _extreme(leaf: torch.Tensor, others: list[int], sign: float) -> torch.Tensor:
    leaf = leaf.clone()
    if leaf.is_floating_point():
        rows = leaf[others]
        # Probabilities and masks must remain in their range.
        is_fraction = bool(((leaf >= 0) & (leaf <= 1)).all())
        leaf[others] = 1 - rows.round() if is_fraction else rows * (sign * _EXTREME)
    return leaf

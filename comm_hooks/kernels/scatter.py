"""Sum the sparse vectors of several ranks, in rank order."""

from torch import Tensor

from comm_hooks.kernels.operators import if_contiguous, operator


@operator(triton=if_contiguous)
def scatter_sum(
    out: Tensor, places: Tensor, values: Tensor, size: int, *, alpha: float, add: bool
) -> None:
    """Write ``alpha`` times the sum over ranks of sparse vectors to ``out``, or add it.

    Args:
        out: (n, numel), float32.
        places: (N, n, blocks, count), int64, for N ranks: indices into a row of ``out``, of
            elements of their block.  A rank's indices are distinct, except where values are 0.
        values: the elements at these places, float32, in the same shape.
        size: the number of elements per block.
        alpha, add: a factor of the values, and whether to add them to ``out``.
    """
    if not add:
        out.zero_()
    for rank_places, rank_values in zip(places, values, strict=True):
        out.scatter_add_(1, rank_places.flatten(1), rank_values.flatten(1) * alpha)


@scatter_sum.fast()
def _scatter_sum_at_once(
    out: Tensor, places: Tensor, values: Tensor, size: int, *, alpha: float, add: bool
) -> None:
    if not add:
        out.zero_()
    # A CPU adds to a row in the order in which the values are given; others in any order.
    in_rank_order = (tensor.transpose(0, 1).flatten(1) for tensor in (places, values * alpha))
    out.scatter_add_(1, *in_rank_order)

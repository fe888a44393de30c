"""The sum of sparse vectors that several ranks sent, added in rank order."""

import torch

from comm_hooks.kernels.triton import available


def scatter_sum(
    out: torch.Tensor,
    places: torch.Tensor,
    values: torch.Tensor,
    size: int,
    *,
    alpha: float,
    add: bool,
) -> None:
    """Write ``alpha`` times the sum over ranks of sparse vectors to ``out``, or ``add`` it.

    Args:
        out: (n, numel), float32.
        places: (N, n, blocks, count), int64, for N ranks: indices into a row of ``out``, of
            elements of their block.  Those of a rank are distinct, except where values are zero.
        values: likewise, float32.
        size: elements per block.

    Example::

        >>> out = torch.empty(1, 4)
        >>> places = torch.tensor([[[[0, 3]]], [[[0, 1]]]])
        >>> scatter_sum(out, places, torch.ones(2, 1, 1, 2), 4, alpha=0.5, add=False)
        >>> out
        tensor([[1.0000, 0.5000, 0.0000, 0.5000]])
    """
    if available(out) and out.is_contiguous():
        from comm_hooks.kernels.triton import scatter as on_gpu

        on_gpu.scatter_sum(out, places, values, size, alpha=alpha, add=add)
        return
    if out.device.type != "cpu":
        reference_scatter_sum(out, places, values, size, alpha=alpha, add=add)
        return
    if not add:
        out.zero_()
    # A CPU adds to a row in the order in which the values are given; others in any order.
    in_rank_order = (tensor.transpose(0, 1).flatten(1) for tensor in (places, values * alpha))
    out.scatter_add_(1, *in_rank_order)


def reference_scatter_sum(
    out: torch.Tensor,
    places: torch.Tensor,
    values: torch.Tensor,
    size: int,
    *,
    alpha: float,
    add: bool,
) -> None:
    """Do the same as :func:`scatter_sum` in the plainest way: rank after rank."""
    if not add:
        out.zero_()
    for rank_places, rank_values in zip(places, values, strict=True):
        out.scatter_add_(1, rank_places.flatten(1), rank_values.flatten(1) * alpha)

"""The magnitude of vectors, for tests whether they are zero or not finite."""

import math
from collections.abc import Sequence

import torch


def magnitudes(vectors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a number for each vector: 0 if all elements are 0, not finite if any is not.

    Otherwise it is positive and finite for elements of any magnitude, where a sum of squares
    overflows above 1.8e19 and is 0 below 1e-23.

    Args:
        vectors: flat tensors of one floating-point dtype on one device.

    Returns:
        The largest absolute values or the norms, (len(vectors),).
    """
    tensors = list(vectors)
    if tensors[0].device.type != "cpu":
        return torch.stack(torch._foreach_norm(tensors, math.inf))
    # The norm takes an eighth of the time on a CPU, and most often tells.
    found = torch.stack(torch._foreach_norm(tensors))
    for place in (~found.isfinite() | (found == 0)).nonzero().flatten().tolist():
        if tensors[place].numel():
            low, high = tensors[place].aminmax()
            found[place] = torch.maximum(high, -low)
    return found

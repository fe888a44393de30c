"""Add Gaussian noise drawn from a key of 128 bits, on a GPU without extra memory."""

from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from comm_hooks.kernels.triton import PAIRS, available


def add_gaussian_(values: Tensor, std: float, key: int, counter: int) -> None:
    """Add independent N(0, std^2) to every element, in place: float64, rounded once.

    Two numbers are made of three of the four words of a block of Philox, by Box and Muller,

        std sqrt(-2 log u) (cos 2 pi v, sin 2 pi v)

    with u and v uniform in [0, 1): u of 128 bits, so that the tails end at 13.3 standard
    deviations, and v of 64.  The first call on a GPU compares some numbers with the reference.

    Args:
        values: float32, contiguous.
        std: the standard deviation.
        key: the key of Philox, 128 bits.
        counter: the first counter of Philox, 256 bits; the lower 128 are 0.

    Raises:
        RuntimeError: if the GPU draws other numbers than the reference.
    """
    if not (available(values[None]) and values.is_contiguous()):
        reference_add_gaussian_(values, std, key, counter)
        return
    _check(values.device)
    from comm_hooks.kernels.triton import gaussian as on_gpu

    on_gpu.add_gaussian_(values, std, key, counter)


def reference_add_gaussian_(values: Tensor, std: float, key: int, counter: int) -> None:
    """Add the noise of :func:`add_gaussian_` in numpy and torch: the reference.

    A GPU's logarithms, sines and cosines may differ in the last bit of float64.
    """
    tiles = -(-values.numel() // (2 * PAIRS))
    words = np.random.Philox(key=key, counter=counter).random_raw(4 * PAIRS * tiles)
    high, low, turn, _ = words.reshape(-1, 4).T
    # The least is 2^-128, whose logarithm is finite.
    radius = std * np.sqrt(-2.0 * np.log(high * 2.0**-64 + (low + 1.0) * 2.0**-128))
    angle = turn * (2 * np.pi * 2.0**-64)
    pairs: npt.NDArray[np.float64] = np.stack([radius * np.cos(angle), radius * np.sin(angle)])
    noise = torch.from_numpy(pairs.reshape(2, tiles, PAIRS).swapaxes(0, 1).reshape(-1))
    exact = values.double().view(-1) + noise[: values.numel()].to(values.device)
    values.copy_(exact.view_as(values))


@cache
def _check(device: torch.device) -> None:
    """Compare the noise of a GPU with the reference, once: wrong noise would go unnoticed."""
    from comm_hooks.kernels.triton import gaussian as on_gpu

    key, counter = 2**128 // 3, 2**128 // 7 << 128
    expected = torch.zeros(5 * PAIRS, dtype=torch.float32)
    reference_add_gaussian_(expected, 3.0, key, counter)
    found = torch.zeros(5 * PAIRS, device=device, dtype=torch.float32)
    on_gpu.add_gaussian_(found, 3.0, key, counter)
    if not torch.allclose(found.cpu(), expected, rtol=1e-6, atol=1e-12):
        raise RuntimeError(
            f"noise drawn on {device} differs from the reference and does not protect the data: "
            "train on another device, and report this GPU, its driver's version and that of Triton"
        )

"""Gaussian noise on tensors, drawn from secret streams."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch

from comm_hooks.kernels.gaussian import add_gaussian_
from comm_hooks.kernels.triton import available
from comm_hooks.optim.private.noise.secret import Stream

Values = npt.NDArray[np.floating]

# The noise of a piece, float64, stays in the cache.
_PIECE = 1 << 16


def add_noise_(tensors: Sequence[torch.Tensor], std: float, stream: Stream) -> None:
    """Add independent N(0, std^2) to every element, in place.

    On a CPU NumPy's ziggurat draws it in float64: it follows the normal distribution to 8.5
    standard deviations within 1e-8, and ends at 12.2, where 3e-34 is left.  (float32 from 32
    uniform bits ends at 5.8: a value beyond that shows that a sample was there.)  On a GPU a kernel
    draws it from the words of the same generator, and it ends at 13.3.  The sum is rounded once.
    """
    rest = []
    for tensor in tensors:
        if tensor.is_contiguous() and available(tensor[None]):
            add_gaussian_(tensor, std, *stream.seeds())
        else:
            rest.append(tensor)

    def add(values: Values, generator: np.random.Generator) -> None:
        noise = generator.standard_normal(values.size)
        noise *= std
        noise += values
        values[:] = noise

    on_pieces_(rest, add, stream)


def on_pieces_(
    tensors: Sequence[torch.Tensor],
    change: Callable[[Values, np.random.Generator], None],
    stream: Stream,
) -> None:
    """Call ``change`` on blocks of tensors, in threads; each block has a generator of its own.

    The noise does not depend on the number of threads.  Tensors of a GPU are copied to the CPU and
    back, since PyTorch's generators of GPUs have only 64 bits of seed.
    """
    on_cpu = [tensor.cpu().contiguous() for tensor in tensors]
    pieces = [piece.numpy() for t in on_cpu for piece in t.view(-1).split(_PIECE)]
    generators = (stream.generator() for _ in pieces)
    workers = min(torch.get_num_threads(), len(pieces))
    if workers > 1:
        # NumPy and its generators release the interpreter's lock.
        with ThreadPoolExecutor(workers) as threads:
            list(threads.map(change, pieces, generators))
    else:
        for piece, generator in zip(pieces, generators, strict=False):
            change(piece, generator)
    for tensor, changed in zip(tensors, on_cpu, strict=True):
        if changed is not tensor:
            tensor.copy_(changed)

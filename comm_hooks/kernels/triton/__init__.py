"""GPU kernels in Triton, one module per operator.  Each passes over the data once.

A function here has the signature of its counterpart in :mod:`comm_hooks.kernels`, an
:class:`~comm_hooks.kernels.operators.Operator`, which calls it if :func:`available` is true.  The
modules import Triton; this one does not, so that ``import comm_hooks`` does not either.  Triton
comes with PyTorch's builds for CUDA.

They also run, slowly, in Triton's interpreter on the CPU, with ``TRITON_INTERPRET=1`` set before
Triton is imported: ``tests/kernels/triton`` tests them without a GPU.
"""

from importlib.util import find_spec

import torch
from torch import Tensor

# The most elements of a block that one program holds in registers.
LARGEST_BLOCK = 16384
# Gaussian noise comes in tiles of this many elements and as many behind them: cosines, and sines.
PAIRS = 512
# Kernels count the elements of a row, and those of an incomplete line behind it, in 32 bits.
_LARGEST_ROW = 1 << 30
_IS_INSTALLED = find_spec("triton") is not None


def available(tensor: Tensor) -> bool:
    """Return whether the kernels work on ``tensor``: float32, on a GPU, with Triton installed."""
    return (
        tensor.is_cuda
        and tensor.dtype == torch.float32
        and 0 < tensor[0].numel() < _LARGEST_ROW
        and _IS_INSTALLED
    )

"""What all kernels are launched with."""

from contextlib import AbstractContextManager, nullcontext

import torch


def on_device_of(tensor: torch.Tensor) -> AbstractContextManager[object]:
    """Make a tensor's GPU the current one, where Triton launches."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


# Products and sums are rounded one after the other, as torch does it, so that results are the same
# bits; and a loop's loads stay where they are written.
COMPILE_OPTIONS = {"enable_fp_fusion": False, "num_stages": 1}

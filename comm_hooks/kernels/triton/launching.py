"""Launch kernels."""

from contextlib import nullcontext
from typing import Any

import torch

# Products and sums are rounded one after the other, as torch does it, so that results are the same
# bits; and a loop's loads stay where they are written.
_COMPILE_OPTIONS = {"enable_fp_fusion": False, "num_stages": 1}


def launch(
    kernel: Any,
    programs: int,
    *args: Any,
    warps: int,
    registers: int | None = None,
    **constants: Any,
) -> None:
    """Launch a number of programs on the GPU of the first argument, a tensor.

    Args:
        kernel: made by ``triton.jit``.
        programs: their number.
        args: of the kernel, except its constants.
        warps: of each program.
        registers: of each thread, at most; by default the compiler decides.
        constants: known when the kernel is compiled.
    """
    on_device = torch.cuda.device(args[0].device) if args[0].is_cuda else nullcontext()
    with on_device:
        kernel[(programs,)](
            *args, **constants, num_warps=warps, maxnreg=registers, **_COMPILE_OPTIONS
        )

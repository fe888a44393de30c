"""Launch Triton kernels with the options that all of them need."""

from typing import Any

import torch

# Products and sums are rounded one after the other, as torch does it, so that results are the same
# bits; and a loop's loads stay where they are written.
_COMPILE_OPTIONS = {"enable_fp_fusion": False, "num_stages": 1}


def launch(
    kernel: Any,
    programs: int,
    *args: Any,
    warps: int = 4,
    registers: int | None = None,
    **constants: Any,
) -> None:
    """Launch a number of programs on the GPU of the first argument, a tensor.

    Args:
        kernel: a kernel made by ``triton.jit``.
        programs: the number of programs.
        args: the arguments of the kernel, except its constants.
        warps: the number of warps of each program.
        registers: the largest number of registers per thread; by default the compiler decides.
        constants: the arguments of the kernel that are known when it is compiled.
    """
    with torch.cuda.device_of(args[0]):  # the interpreter has tensors on the CPU
        kernel[(programs,)](
            *args, **constants, num_warps=warps, maxnreg=registers, **_COMPILE_OPTIONS
        )

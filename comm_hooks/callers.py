"""Whose line of code a warning is about."""

import sys
import sysconfig
import warnings
from pathlib import Path

_LIBRARIES = tuple(
    f"{folder}/"
    for folder in (
        Path(__file__).parent,
        *map(sysconfig.get_path, ("purelib", "platlib", "stdlib")),
    )
)


def warn_program(message: str) -> None:
    """Warn at the innermost line that belongs to no library.

    Between a step and the program that asks for it stand torch, and perhaps a learning rate
    scheduler, Accelerate and a trainer: the depth of the stack says nothing, and some of these
    filter the warnings that are attributed to others of them.
    """
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)

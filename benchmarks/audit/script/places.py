"""The lines of a script, told from those of libraries."""

import os
import sys
from pathlib import Path
from types import FrameType

import torch

import comm_hooks

_PACKAGE = str(Path(comm_hooks.__file__).parent)
_LIBRARIES = (_PACKAGE, str(Path(_PACKAGE).resolve()), str(Path(torch.__file__).parents[1]))


class Places:
    """Names the lines of a script and of the modules in its folder.

    Args:
        script: its path.
    """

    def __init__(self, script: Path) -> None:
        self._script = script

    def now(self) -> str:
        """Return the current line, such as ``"train.py:41"``."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if self._is_own(frame.f_code.co_filename):
                return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
            frame = frame.f_back
        return self._script.name

    def of(self, error: BaseException) -> str:
        """Return the line that raised an exception."""
        found, trace = self._script.name, error.__traceback__
        while trace is not None:
            filename = trace.tb_frame.f_code.co_filename
            if self._is_own(filename):
                found = f"{Path(filename).name}:{trace.tb_lineno}"
            trace = trace.tb_next
        return found

    def _is_own(self, filename: str) -> bool:
        if filename == str(self._script):
            return True
        inside = filename.startswith(str(self._script.parent) + os.sep)
        return inside and not filename.startswith(_LIBRARIES) and "site-packages" not in filename

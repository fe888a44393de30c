"""Interruptions, exit codes and folders of commands that run for minutes."""

import signal
import tempfile
from pathlib import Path

SKIPPED = 77  # as automake and others have it
INTERRUPTED = 130  # 128 + SIGINT, as shells have it


class Interruption:
    """Lets what is finished be reported when the rest is interrupted.

    Being asked to end (by timeout, CI or a scheduler) is treated as Ctrl-C is.

    Example::

        >>> with Interruption() as interruption:
        ...     raise KeyboardInterrupt
        >>> interruption.happened
        True
    """

    happened = False

    def __enter__(self) -> "Interruption":
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        self.happened = kind is KeyboardInterrupt
        return self.happened


def prepare_folder(out: Path, *inner: str) -> None:
    """Make the folder for results, and find out now rather than in ten minutes if that cannot be.

    Args:
        out: what ``--out`` says.
        inner: names of folders to make in it.

    Raises:
        ValueError: if nothing can be written there; the message names ``--out``.
    """
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name in inner:
            (out / name).mkdir(exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise ValueError(
            f"--out {out}: cannot write there ({error.strerror}); give another folder"
        ) from None

"""What ranks tell the launcher while they run: one JSON object per line, in a file of its own.

Standard streams would not do, since anything may print to them. Every event has the name of its
kind in ``"event"``; :func:`telling` makes those of kind ``process`` and ``error`` itself.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_POLL_SECONDS = 0.1

Event = dict[str, Any]
"""One thing a worker told; ``training.train`` lists most of them."""


class StalledError(RuntimeError):
    """The processes run on, but nothing has been heard of them for too long."""


class EventReader:
    """Reads what the workers write to ``path``, as they write it."""

    def __init__(self, path: Path) -> None:
        path.touch()
        self._file = path.open()

    def new_events(self) -> Iterator[Event]:
        """Yield what the workers told since the last call."""
        while True:
            start = self._file.tell()
            line = self._file.readline()
            if not line.endswith("\n"):
                self._file.seek(start)  # half a line: the rest is being written
                return
            yield json.loads(line)

    def follow(self, is_running: Callable[[], bool], stall_timeout: float) -> Iterator[Event]:
        """Yield events as they are told, until the processes have ended and all is read.

        Raises:
            StalledError: no event for ``stall_timeout`` seconds.
        """
        last_heard = time.monotonic()
        running = True
        while running:
            # Asked before reading: whatever was written before the end is read after it.
            running = is_running()
            for event in self.new_events():
                last_heard = time.monotonic()
                yield event
            if running and time.monotonic() - last_heard > stall_timeout:
                raise StalledError(f"hung: no progress for {stall_timeout:g} s")
            time.sleep(_POLL_SECONDS)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@contextmanager
def telling(path: Path) -> Iterator[Callable[[Event], None]]:
    """Give a worker the function that tells an event; an exception is told and raised again."""
    # Line-buffered appends: the lines of several ranks interleave, but never tear.
    with path.open("a", buffering=1) as events:

        def tell(event: Event) -> None:
            events.write(json.dumps(event) + "\n")

        tell({"event": "process", "pid": os.getpid()})
        try:
            yield tell
        except Exception as error:
            first_line = str(error).strip().split("\n")[0]
            reason = f"{type(error).__name__}: {first_line}"
            tell({"event": "error", "rank": int(os.environ["RANK"]), "reason": reason})
            raise

"""Reports of ranks to the launcher while they run: one JSON object per line, in a file of its own.

Standard streams would not do, since anything may print to them. Every event has the name of its
kind in ``"event"``; :func:`reporting` makes those of kind ``process`` and ``error`` itself.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_POLL_SECONDS = 0.1
_FILE = "events.jsonl"

Event = dict[str, Any]
Report = Callable[[Event], None]


class StalledError(RuntimeError):
    """The processes run on, but there has been no event for too long."""


class EventReader:
    """Reads the events of the workers as they are written, from a file in ``folder``."""

    def __init__(self, folder: Path) -> None:
        path = folder / _FILE
        path.touch()
        self._file = path.open()

    def new_events(self) -> Iterator[Event]:
        """Yield the events since the last call."""
        while True:
            start = self._file.tell()
            line = self._file.readline()
            if not line.endswith("\n"):
                self._file.seek(start)  # half a line: the rest is being written
                return
            yield json.loads(line)

    def follow(self, is_running: Callable[[], bool], stall_timeout: float) -> Iterator[Event]:
        """Yield events until the processes have ended and all is read.

        Raises:
            StalledError: no event for ``stall_timeout`` seconds.
        """
        last_heard = time.monotonic()
        running = True
        while running:
            # Asked before reading: an event that was written before the end is read after it.
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
def reporting(folder: Path) -> Iterator[Report]:
    """Return the function that reports an event; report an exception and raise it again.

    Ranks other than 0 report nothing else.
    """
    rank = int(os.environ["RANK"])
    # Line-buffered appends: the lines of several ranks interleave, but never tear.
    with (folder / _FILE).open("a", buffering=1) as events:

        def write(event: Event) -> None:
            events.write(json.dumps(event) + "\n")

        write({"event": "process", "rank": rank, "pid": os.getpid()})
        try:
            yield write if rank == 0 else lambda event: None
        except Exception as error:
            first_line = str(error).strip().split("\n")[0]
            reason = f"{type(error).__name__}: {first_line}"
            write({"event": "error", "rank": rank, "reason": reason})
            raise

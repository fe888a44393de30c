"""What was released, written down before it is: outside the checkpoint, and only ever longer."""

import fcntl
import itertools
import json
import operator
import os
import uuid
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from comm_hooks.compressors.base import require_kind
from comm_hooks.optim.private.accounting.events import (
    GaussianEvent,
    merged,
    steps_per_mechanism,
)

_FORMAT = 1
_HEADER_START = b'{"ledger": '


class Ledger:
    """An append-only file of releases.

    A step that a run goes back to, from a checkpoint or after a crash, was released all the same
    and is released again: counting in the checkpoint would count it once.  So the ledger is kept
    apart, and nothing in it is ever changed or removed.  It is written in JSON lines:

    1. a header, ``{"ledger": 1, "run": "...", "settings": {...}}``;
    2. ``{"noise_multiplier": ..., "sample_rate": ...}``: what the steps after this line are;
    3. ``1``, or another whole number: that many such steps.

    So a step takes two bytes.  A line is on the disk (fsync) before :meth:`record` returns, and the
    caller releases afterwards.  If a crash tore the last line, that counts as a step although
    nothing was released: too much is counted, never too little.

    One process at a time may have a ledger open, usually rank 0; the file is locked until
    :meth:`close` or the end of the process.

    Args:
        path: the file, which is continued where it exists; None for memory only, which forgets
            what a rolled-back run released: for tests, and for the ranks that do not write.
        settings: what a reader should know about the run, public and in JSON's types.  Kept in the
            header; another run that continues the file with other settings is warned.

    Raises:
        ValueError: if another process has the ledger open, if the file is not a ledger or a line
            in its middle cannot be read (with its number), and for settings that JSON cannot hold.
        OSError: if the file cannot be written.

    Not supported: Windows, and file systems without locks.

    Example::

        >>> from comm_hooks.optim.private.accounting import GaussianEvent
        >>> from comm_hooks.optim.private.ledger import Ledger
        >>> ledger = Ledger(None)
        >>> ledger.record(GaussianEvent(noise_multiplier=1.0, sample_rate=0.01))
        >>> ledger.record(GaussianEvent(noise_multiplier=1.0, sample_rate=0.01))
        >>> ledger.events()
        [GaussianEvent(noise_multiplier=1.0, sample_rate=0.01, steps=2)]
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        if path is not None:
            require_kind(self, "path", path, str, bytes, os.PathLike)
        self._history: list[GaussianEvent] = []
        # What the steps at the end of the file are.
        self._mechanism: tuple[float, float] | None = None
        self._fd: int | None = None
        self.path = None if path is None else os.fspath(path)
        self.run_id = uuid.uuid4().hex
        if settings is not None:
            require_kind(self, "settings", settings, Mapping)
        self.settings = dict(settings or {})
        try:
            header = json.dumps(
                {"ledger": _FORMAT, "run": self.run_id, "settings": self.settings}, allow_nan=False
            )
        except (TypeError, ValueError) as error:
            raise ValueError(f"Ledger: settings must be of JSON's types: {error}") from None
        if self.path is not None:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                self._lock()
                self._continue(header)
            except BaseException:
                self.close()
                raise

    def record(self, event: GaussianEvent) -> None:
        """Write an event down; call this before its steps are released.

        Raises:
            OSError: if it could not be written.  Then do not release; the ledger is closed.
            ValueError: if the ledger has been closed.
        """
        if self.path is not None:
            lines = f"{event.steps}\n"
            if event.mechanism != self._mechanism:
                lines = _mechanism_line(event) + lines
            self._append(lines.encode())
            self._mechanism = event.mechanism
        self._history[-1:] = merged([*self._history[-1:], event])

    def events(self) -> list[GaussianEvent]:
        """Return everything that was recorded, by this process and before it, in order."""
        return list(self._history)

    def reconcile(self, checkpoint_events: Iterable[GaussianEvent]) -> list[GaussianEvent]:
        """Make up for what a checkpoint knows and the ledger does not; return the history.

        For every noise multiplier and sample rate the larger number of steps wins, so that the
        result costs at least as much as either history, at every delta.  What the ledger lacks is
        written to it.  Warns wherever the two disagree.

        Call this after loading a checkpoint and before the first step: steps that were recorded in
        a new ledger while the old one was missing are taken for some of the checkpoint's.

        Args:
            checkpoint_events: the history that was saved.
        """
        saved = steps_per_mechanism(checkpoint_events)
        ours = steps_per_mechanism(self._history)
        where = f"the ledger {self.path}" if self.path is not None else "the ledger in memory"
        missing = [
            GaussianEvent(*mechanism, steps - ours.get(mechanism, 0))
            for mechanism, steps in saved.items()
            if steps > ours.get(mechanism, 0)
        ]
        after = sum(max(0, steps - saved.get(mechanism, 0)) for mechanism, steps in ours.items())
        # Before the warnings, which may be errors.
        for event in missing:
            self.record(event)
        if missing:
            added = sum(event.steps for event in missing)
            warnings.warn(
                f"{where} lacks {added} steps that the checkpoint counts: they are added. Was the "
                f"file lost, or is it that of another run?",
                stacklevel=2,
            )
        if after:
            warnings.warn(
                f"{where} counts {after} steps that the checkpoint does not: they were released "
                f"after it was saved, and still count",
                stacklevel=2,
            )
        return self.events()

    def close(self) -> None:
        """Unlock the file.  Nothing can be recorded in it any more."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> "Ledger":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a Ledger cannot be saved or copied: two of them would count apart. Save events()"
        )

    def _lock(self) -> None:
        assert self._fd is not None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(
                f"ledger {self.path} is open elsewhere: one process writes a ledger, usually rank "
                f"0. Is another run going on, or was it opened twice here?"
            ) from None

    def _continue(self, header: str) -> None:
        """Read what is there, make the last line whole, and write the header of a new file."""
        assert self._fd is not None
        with open(self._fd, "rb", closefd=False) as file:
            *lines, torn = file.read().split(b"\n")
        if not lines:
            # A header that a crash tore: no step can have been taken.
            if torn and not (torn + _HEADER_START[len(torn) :]).startswith(_HEADER_START):
                raise ValueError(f"ledger {self.path}: the file exists and is not a ledger")
            os.ftruncate(self._fd, 0)
            self._append(header.encode() + b"\n")
            _sync_folder(self.path)
            return
        self._read_header(lines[0])
        self._read_steps(lines[1:])
        if not torn:
            return
        message = f"ledger {self.path}: its last line was torn by a crash while it was written"
        os.ftruncate(self._fd, sum(len(line) + 1 for line in lines))
        if self._mechanism is None:
            warnings.warn(f"{message}, before the first step: nothing was released", stacklevel=3)
            return
        self.record(GaussianEvent(*self._mechanism, _steps_of(torn) or 1))
        warnings.warn(f"{message}: it counts as released, which it was not", stacklevel=3)

    def _read_header(self, line: bytes) -> None:
        try:
            header = json.loads(line)
            found, run_id, settings = header["ledger"], header["run"], header["settings"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ValueError(f"ledger {self.path}: the file exists and is not a ledger") from None
        if found != _FORMAT:
            raise ValueError(
                f"ledger {self.path}: its format is {found!r}; this version of comm-hooks reads "
                f"{_FORMAT}"
            )
        # As they would be read back: JSON has lists and no tuples.
        if self.settings and json.loads(json.dumps(self.settings)) != settings:
            warnings.warn(
                f"ledger {self.path} was begun with the settings {settings}, and this run has "
                f"{self.settings}: what was released before still counts",
                stacklevel=4,
            )
        self.run_id, self.settings = run_id, settings

    def _read_steps(self, lines: Sequence[bytes]) -> None:
        steps_of_lines: list[tuple[tuple[float, float], int]] = []
        for number, line in enumerate(lines, start=2):
            try:
                if steps := _steps_of(line):
                    if self._mechanism is None:
                        raise ValueError
                    steps_of_lines.append((self._mechanism, steps))
                else:
                    self._mechanism = _read_mechanism(line)
            except (ValueError, TypeError, KeyError, RecursionError):
                raise ValueError(
                    f"ledger {self.path}: line {number} cannot be read: {line[:80]!r}. Restore the "
                    f"file from a copy: what is missing from it was released"
                ) from None
        # A million events would take long to make: equal neighbours are added up first.
        for mechanism, group in itertools.groupby(steps_of_lines, key=operator.itemgetter(0)):
            noise_multiplier, sample_rate = mechanism
            total = sum(steps for _, steps in group)
            self._history.append(GaussianEvent(noise_multiplier, sample_rate, total))

    def _append(self, lines: bytes) -> None:
        if self._fd is None:
            raise ValueError(f"ledger {self.path} is closed: nothing can be recorded")
        try:
            while lines:
                lines = lines[os.write(self._fd, lines) :]
            os.fsync(self._fd)
        except OSError:
            # Half a line may have been written: it is made whole when the file is opened again.
            self.close()
            raise


def _mechanism_line(event: GaussianEvent) -> str:
    noise_multiplier, sample_rate = event.mechanism
    line = {"noise_multiplier": noise_multiplier, "sample_rate": sample_rate}
    return json.dumps(line) + "\n"


def _read_mechanism(line: bytes) -> tuple[float, float]:
    content = json.loads(line)
    if set(content) != {"noise_multiplier", "sample_rate"}:
        raise ValueError
    return GaussianEvent(content["noise_multiplier"], content["sample_rate"]).mechanism


def _steps_of(line: bytes) -> int:
    """Return the number that a line consists of; 0 if it is anything else."""
    # No run has more steps than 18 digits tell, and Python reads some thousands of digits at most.
    return int(line) if line.isdigit() and len(line) <= 18 else 0


def _sync_folder(path: str | None) -> None:
    """Make a new file's name last: fsync of the file alone need not."""
    assert path is not None
    folder = os.open(os.path.dirname(os.path.abspath(path)), os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)

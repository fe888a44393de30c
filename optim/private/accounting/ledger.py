"""An append-only file of releases, outside of checkpoints, written before each release."""

import fcntl
import hashlib
import itertools
import json
import os
import re
import uuid
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, NoReturn

from comm_hooks.optim.private.accounting.events import GaussianEvent, joined, steps_by
from comm_hooks.optim.private.errors import PrivacyError
from comm_hooks.requirements import require_kind

_FORMAT = 4
_HEADER_START = f'{{"ledger": {_FORMAT}, '.encode()
# The fields of a line that describes the steps after it.
_KEYS = [field.name for field in fields(GaussianEvent) if field.name != "steps"]
_STEP = b'"step ', b'"'
# The text before the seal, the seal, and the text after it.
_LINE = re.compile(rb'(.*)([0-9a-f]{16})("}?)', re.DOTALL)


class Ledger:
    """An append-only file of releases.

    A step that a run repeats, from a checkpoint or after a crash, is released twice; a count in the
    checkpoint would count it once.  So the ledger is kept apart, and nothing in it is ever changed
    or removed.  It is written in JSON lines:

    1. a header, ``{"ledger": 4}``;
    2. ``{"noise_multiplier": ..., "sample_rate": ...}``: the fields of a
       :class:`~comm_hooks.optim.private.accounting.GaussianEvent`, for the steps after this line;
    3. ``"step ..."``: one such step.

    A run is what one process records from opening the file to its end.  Every line has a seal, a
    digest of the line and of the previous seal: in place of the dots in 3, under the key ``"seal"``
    in 1 and 2.  Opening the file detects lines that were edited, torn or removed, but not whole
    lines missing at the end; :meth:`reconcile` adds those that a checkpoint counts.

    A line is on the disk (fsync) before :meth:`record` returns, and the caller releases afterwards.
    A last line that a crash tore counts as a step, although nothing was released: the count may be
    too large, never too small.

    One process at a time may have a ledger open, usually rank 0; the file is locked until
    :meth:`close` or the end of the process.  A file that was deleted, replaced or cut meanwhile is
    detected before the next entry.

    Args:
        path: the file, which is continued if it exists; None for a ledger in memory, which forgets
            the releases of a rolled-back run: for tests, and for the ranks that do not write.
        run: the name of the run that records; by default a random one.

    Raises:
        ValueError: if another process has the ledger open, if the file is not a ledger, or if a
            line in its middle cannot be read (with its number).
        OSError: if the file cannot be written.

    Not supported: Windows, and file systems without locks.

    Example::

        >>> from comm_hooks.optim.private.accounting import GaussianEvent
        >>> from comm_hooks.optim.private.accounting.ledger import Ledger
        >>> ledger = Ledger(None)
        >>> ledger.record(GaussianEvent(noise_multiplier=1.0, sample_rate=0.01))
        >>> ledger.record(GaussianEvent(noise_multiplier=1.0, sample_rate=0.01))
        >>> ledger.events()
        [GaussianEvent(noise_multiplier=1.0, sample_rate=0.01, steps=2)]
    """

    def __init__(
        self, path: str | os.PathLike[str] | None = None, *, run: str | None = None
    ) -> None:
        if path is not None:
            require_kind(self, "path", path, str, bytes, os.PathLike)
            if not os.fspath(path):
                raise ValueError(f"Ledger: path must be the name of a file, got {path!r}")
        if run is not None:
            require_kind(self, "run", run, str)
        self._history: list[GaussianEvent] = []
        # The kind of the steps at the end of the file.
        self._kind: GaussianEvent | None = None
        self._seal = b""
        self._fd: int | None = None
        self._size = 0
        self.path = None if path is None else os.fspath(path)
        self.run = run or uuid.uuid4().hex
        if self.path is not None:
            self._place = os.path.abspath(self.path)
            self._fd = os.open(self._place, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._continue()
            except BlockingIOError:
                self.close()
                raise ValueError(
                    f"ledger {self.path} is open elsewhere: one process writes a ledger, usually "
                    "rank 0. End the other run, or close the first Ledger of this process"
                ) from None
            except BaseException:
                self.close()
                raise

    def record(self, event: GaussianEvent) -> None:
        """Write an event to the ledger, before its steps are released.

        Raises:
            OSError: if the event could not be written.  Then do not release; the ledger is closed.
            PrivacyError: if the file was changed since the last write.  Then do not release.
            ValueError: if the ledger has been closed.
        """
        self._record(event if event.run is not None else replace(event, run=self.run))

    def _record(self, event: GaussianEvent) -> None:
        if self.path is not None:
            self._require_untouched()
            lines = b""
            if event.one != self._kind:
                lines = self._sealed(*_object({key: getattr(event, key) for key in _KEYS}))
            steps = [self._sealed(*_STEP) for _ in range(event.steps)]
            self._append(lines + b"".join(steps))
            self._kind = event.one
        if self._history and self._history[-1].one == event.one:
            event = replace(event, steps=self._history.pop().steps + event.steps)
        self._history.append(event)

    def events(self) -> list[GaussianEvent]:
        """Return all recorded events, by this process and before it, in order, without their runs.

        Consecutive events that differ only in ``steps`` are one.
        """
        return joined(replace(event, run=None) for event in self._history)

    def history(self) -> list[GaussianEvent]:
        """Return the events with the runs that made them."""
        return list(self._history)

    def reconcile(self, checkpoint_events: Iterable[GaussianEvent]) -> list[GaussianEvent]:
        """Add the steps that a checkpoint counts and the ledger lacks; return :meth:`events`.

        For every kind of event of every run the larger number of steps wins, so that the result
        costs at least as much as either history, at every delta.  Warns where the two disagree.

        Args:
            checkpoint_events: the :meth:`history` in the checkpoint.
        """
        saved = steps_by(lambda event: event.one, checkpoint_events)
        ours = steps_by(lambda event: event.one, self._history)
        where = f"the ledger {self.path}" if self.path is not None else "the ledger in memory"
        missing = [replace(kind, steps=steps) for kind, steps in (saved - ours).items()]
        after = (ours - saved).total()
        # Before the warnings, which may be errors.
        for event in missing:
            self._record(event)
        if missing:
            added = sum(event.steps for event in missing)
            warnings.warn(
                f"{where} lacks {added} steps that the checkpoint counts: they are added. Check "
                f"whether the file was lost, or belongs to another run",
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
        """Close and unlock the file.  From then on :meth:`record` raises ``ValueError``."""
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

    def _continue(self) -> None:
        """Read the file, complete a torn last line, and write the header of a new file."""
        assert self._fd is not None
        with open(self._fd, "rb", closefd=False) as file:
            content = file.read()
        *lines, torn = content.split(b"\n")
        if not lines:
            # A header that a crash tore: no step can have been taken.
            if not _is_torn_header(torn):
                raise ValueError(
                    f"ledger {self.path}: the file exists and is not a ledger: choose another path"
                )
            os.ftruncate(self._fd, 0)
            self._append(self._sealed(*_object({"ledger": _FORMAT})))
            _sync_folder(self._place)
            return
        self._read_header(lines[0])
        self._read_steps(lines)
        self._size = len(content) - len(torn)
        if not torn:
            return
        message = f"ledger {self.path}: its last line was torn by a crash while it was written"
        os.ftruncate(self._fd, self._size)
        if self._kind is None:
            warnings.warn(f"{message}, before the first step: nothing was released", stacklevel=3)
            return
        self._record(self._kind)
        warnings.warn(f"{message}: its step counts as released, but was not", stacklevel=3)

    def _read_header(self, line: bytes) -> None:
        try:
            found = json.loads(line)["ledger"]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise ValueError(
                f"ledger {self.path}: the file exists and is not a ledger: choose another path"
            ) from None
        if found != _FORMAT:
            raise ValueError(
                f"ledger {self.path}: its format is {found!r}; this version of comm-hooks reads "
                f"{_FORMAT}: continue with the version that wrote the file"
            )

    def _read_steps(self, lines: Sequence[bytes]) -> None:
        steps: list[GaussianEvent | None] = []
        for number, line in enumerate(lines, start=1):
            found = _LINE.fullmatch(line)
            if not found or self._sealed(found[1], found[3]) != line + b"\n":
                raise ValueError(
                    f"ledger {self.path}: line {number} is not as it was written, or does not "
                    f"follow the one before: {line[:80]!r}. Restore the file from a copy: the "
                    "missing steps were released"
                )
            if found[1] == _STEP[0]:
                steps.append(self._kind)
            elif number > 1:
                content = json.loads(line)
                self._kind = GaussianEvent(**{key: content[key] for key in _KEYS})
        # A million events would take long to make: equal neighbours are added up first.
        for kind, group in itertools.groupby(steps):
            assert kind is not None, "sealed, and thus written by record()"
            self._history.append(replace(kind, steps=len([*group])))

    def _sealed(self, before: bytes, after: bytes) -> bytes:
        """Return the next line, with its seal (see the class) between ``before`` and ``after``."""
        digest = hashlib.blake2b(self._seal + before + after, digest_size=8)
        self._seal = digest.hexdigest().encode()
        return before + self._seal + after + b"\n"

    def _require_untouched(self) -> None:
        if self._fd is None:
            raise ValueError(f"ledger {self.path} is closed: nothing can be recorded")
        own = os.fstat(self._fd)
        problem = None
        try:
            if not os.path.samestat(own, os.stat(self._place)):
                problem = "replaced"
        except FileNotFoundError:
            problem = "deleted"
        if own.st_size != self._size:
            problem = problem or f"changed from {self._size} to {own.st_size} bytes"
        if problem:
            raise PrivacyError(
                f"ledger {self.path} was {problem} while it was open: nothing more is released. "
                "Restore the file from a copy: the missing steps were released"
            )

    def _append(self, lines: bytes) -> None:
        assert self._fd is not None
        try:
            self._size += len(lines)
            while lines:
                lines = lines[os.write(self._fd, lines) :]
            os.fsync(self._fd)
        except OSError:
            # Half a line may have been written: it is completed when the file is opened again.
            self.close()
            raise


def _is_torn_header(content: bytes) -> bool:
    """Return whether a file without an end of line holds a header, or the beginning of one."""
    begins = (content + _HEADER_START[len(content) :]).startswith(_HEADER_START)
    # Text after a seal means that the ends of lines were removed.
    return begins and not re.search(rb'"seal": "[0-9a-f]{16}"}.', content, re.DOTALL)


def _object(content: Mapping[str, Any]) -> tuple[bytes, bytes]:
    """Return the text before and after the seal in a JSON line with ``content``."""
    return json.dumps(content)[:-1].encode() + b', "seal": "', b'"}'


def _sync_folder(path: str | bytes) -> None:
    """Write a new file's name to disk, which fsync of the file alone need not do."""
    folder = os.open(os.path.dirname(path), os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)

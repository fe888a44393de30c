"""What was released, written down before it is: outside the checkpoint, and only ever longer."""

import fcntl
import hashlib
import itertools
import json
import operator
import os
import re
import uuid
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from comm_hooks.optim.private.accounting.events import (
    GaussianEvent,
    merged,
    steps_of_each,
)
from comm_hooks.optim.private.errors import PrivacyError
from comm_hooks.requirements import require_kind

_FORMAT = 2
_HEADER_START = f'{{"ledger": {_FORMAT}, "run": '.encode()
# What a line says of the steps after it.
_KEYS = (
    "noise_multiplier",
    "sample_rate",
    "placement",
    "checkpoint_multiplier",
    "rank_multiplier",
)
_STEP = b'"step ', b'"'
# In one line, so that it is known how many a torn one can have had.
_MOST_STEPS = 1000
# What is before the seal, the seal, and what is after it.
_LINE = re.compile(rb'(.*)([0-9a-f]{16})("[\]}]?)', re.DOTALL)


class Ledger:
    """An append-only file of releases.

    A step that a run goes back to, from a checkpoint or after a crash, was released all the same
    and is released again: counting in the checkpoint would count it once.  So the ledger is kept
    apart, and nothing in it is ever changed or removed.  It is written in JSON lines:

    1. a header, ``{"ledger": 2, "run": "...", "settings": {...}}``;
    2. ``{"noise_multiplier": ..., "sample_rate": ...}``: what the steps after this line are,
       with where noise is added and who is protected by how much of it; see
       :class:`~comm_hooks.optim.private.accounting.GaussianEvent`;
    3. ``"step ..."``: one such step; or ``[12, "..."]``: that many, at most 1000.

    Where the dots are, and under ``"seal"`` in the others, is a digest of the line and of the seal
    before it: a line that was edited, torn or removed is noticed when the file is opened.  Whole
    lines that are missing at its end are not: what a checkpoint knows of them, :meth:`reconcile`
    makes up for.

    A line is on the disk (fsync) before :meth:`record` returns, and the caller releases afterwards.
    If a crash tore the last line, that counts as a step, or as all that could have been in it,
    although nothing was released: too much is counted, never too little.

    One process at a time may have a ledger open, usually rank 0; the file is locked until
    :meth:`close` or the end of the process.  What somebody else does to it meanwhile (deletes,
    replaces, cuts) is noticed before the next entry.

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
        >>> from comm_hooks.optim.private.accounting.ledger import Ledger
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
            if not os.fspath(path):
                raise ValueError(f"Ledger: path must be the name of a file, got {path!r}")
        self._history: list[GaussianEvent] = []
        # By this process, of each kind.
        self._recorded: dict[GaussianEvent, int] = {}
        # What the steps at the end of the file are.
        self._kind: GaussianEvent | None = None
        self._seal = b""
        self._fd: int | None = None
        self._size = 0
        self.path = None if path is None else os.fspath(path)
        self.run_id = uuid.uuid4().hex
        if settings is not None:
            require_kind(self, "settings", settings, Mapping)
        self.settings = dict(settings or {})
        try:
            header = {"ledger": _FORMAT, "run": self.run_id, "settings": self.settings}
            json.dumps(header, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ValueError(f"Ledger: settings must be of JSON's types: {error}") from None
        if self.path is not None:
            self._place = os.path.abspath(self.path)
            self._fd = os.open(self._place, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
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
            PrivacyError: if the file is not as this ledger left it.  Nor release then.
            ValueError: if the ledger has been closed.
        """
        self._record(event)
        self._recorded[event.one] = self._recorded.get(event.one, 0) + event.steps

    def _record(self, event: GaussianEvent) -> None:
        if self.path is not None:
            self._require_untouched()
            lines = b""
            if event.one != self._kind:
                lines = self._sealed(*_object({key: getattr(event, key) for key in _KEYS}))
            if event.steps == 1:
                lines += self._sealed(*_STEP)
            else:
                whole, rest = divmod(event.steps, _MOST_STEPS)
                for steps in [_MOST_STEPS] * whole + [rest] * bool(rest):
                    lines += self._sealed(*_several(steps))
            self._append(lines)
            self._kind = event.one
        self._history[-1:] = merged([*self._history[-1:], event])

    def events(self) -> list[GaussianEvent]:
        """Return everything that was recorded, by this process and before it, in order."""
        return list(self._history)

    def reconcile(self, checkpoint_events: Iterable[GaussianEvent]) -> list[GaussianEvent]:
        """Make up for what a checkpoint knows and the ledger does not; return the history.

        For every noise multiplier, sample rate and placement the larger number of steps wins, so
        that the result costs at least as much as either history, at every delta.  What the ledger
        lacks is written to it.  Warns wherever the two disagree.

        A checkpoint with more steps of a kind than the ledger was saved elsewhere: those that have
        been recorded here since the ledger was opened are none of its own, and count besides.  With
        fewer it is an older one of this run; one of another run is not told from that, so call this
        before the first step.

        Args:
            checkpoint_events: the history that was saved.
        """
        saved = steps_of_each(checkpoint_events)
        ours = steps_of_each(self._history)
        where = f"the ledger {self.path}" if self.path is not None else "the ledger in memory"
        missing = [
            replace(kind, steps=steps - ours.get(kind, 0) + self._recorded.get(kind, 0))
            for kind, steps in saved.items()
            if steps > ours.get(kind, 0)
        ]
        after = sum(max(0, steps - saved.get(kind, 0)) for kind, steps in ours.items())
        # Before the warnings, which may be errors.
        for event in missing:
            self._record(event)
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

    def _continue(self, header: Mapping[str, Any]) -> None:
        """Read what is there, make the last line whole, and write the header of a new file."""
        assert self._fd is not None
        with open(self._fd, "rb", closefd=False) as file:
            content = file.read()
        *lines, torn = content.split(b"\n")
        if not lines:
            # A header that a crash tore: no step can have been taken.
            if not _is_torn_header(torn):
                raise ValueError(f"ledger {self.path}: the file exists and is not a ledger")
            os.ftruncate(self._fd, 0)
            self._append(self._sealed(*_object(header)))
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
        self._record(replace(self._kind, steps=_most_steps_in(torn)))
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
        steps_of_lines: list[tuple[GaussianEvent | None, int]] = []
        for number, line in enumerate(lines, start=1):
            found = _LINE.fullmatch(line)
            if not found or self._sealed(found[1], found[3]) != line + b"\n":
                raise ValueError(
                    f"ledger {self.path}: line {number} is not as it was written, or does not "
                    f"follow the one before: {line[:80]!r}. Restore the file from a copy: what is "
                    "missing from it was released"
                )
            if found[1] == _STEP[0]:
                steps_of_lines.append((self._kind, 1))
            elif line.startswith(b"["):
                steps_of_lines.append((self._kind, json.loads(line)[0]))
            elif number > 1:
                content = json.loads(line)
                self._kind = GaussianEvent(**{key: content[key] for key in _KEYS})
        # A million events would take long to make: equal neighbours are added up first.
        for kind, group in itertools.groupby(steps_of_lines, key=operator.itemgetter(0)):
            assert kind is not None, "sealed, and thus written by record()"
            self._history.append(replace(kind, steps=sum(steps for _, steps in group)))

    def _sealed(self, before: bytes, after: bytes) -> bytes:
        """Return the next line, with its seal between these."""
        digest = hashlib.blake2b(self._seal + before + after, digest_size=8)
        self._seal = digest.hexdigest().encode()
        return before + self._seal + after + b"\n"

    def _require_untouched(self) -> None:
        """Raise ``PrivacyError`` unless the file is there and as this ledger left it."""
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
                "Restore the file from a copy: what is missing from it was released"
            )

    def _append(self, lines: bytes) -> None:
        assert self._fd is not None
        try:
            self._size += len(lines)
            while lines:
                lines = lines[os.write(self._fd, lines) :]
            os.fsync(self._fd)
        except OSError:
            # Half a line may have been written: it is made whole when the file is opened again.
            self.close()
            raise


def _is_torn_header(content: bytes) -> bool:
    """Return whether a line without an end is the beginning of a header, or all of it."""
    begins = (content + _HEADER_START[len(content) :]).startswith(_HEADER_START)
    # Where something follows a seal, somebody has removed the ends of lines.
    return begins and not re.search(rb'"seal": "[0-9a-f]{16}"}.', content, re.DOTALL)


def _object(content: Mapping[str, Any]) -> tuple[bytes, bytes]:
    """Return what is before and after the seal in a line of settings."""
    return json.dumps(content)[:-1].encode() + b', "seal": "', b'"}'


def _several(steps: int) -> tuple[bytes, bytes]:
    """Return the same of a line of several steps."""
    return f'[{steps}, "'.encode(), b'"]'


def _most_steps_in(torn: bytes) -> int:
    """Return how many steps there can have been at most in a line of which this is left."""
    if not torn.startswith(b"["):
        return 1
    number = re.match(rb"\[(\d{1,4}),", torn)
    return int(number[1]) if number else _MOST_STEPS


def _sync_folder(path: str | bytes) -> None:
    """Make a new file's name last: fsync of the file alone need not."""
    folder = os.open(os.path.dirname(path), os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)

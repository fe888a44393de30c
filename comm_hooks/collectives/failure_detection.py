"""Failure detection: name the ranks that are dead, late or in another collective."""

import hashlib
import json
import re
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from comm_hooks.collectives.requests import Request, Result
from comm_hooks.errors import PeerError

_LONGEST_SECONDS = 5.0
_POLL_SECONDS = 0.05
CLOSED = "the connections were closed by a failure"
_SILENT_STORE = (
    "the key-value store of the process group does not answer: the process that keeps it, often "
    "rank 0, has ended, is stopped or cannot be reached"
)
_LATE_SECONDS = 0.5
_NEARLY = 0.9  # the share of the timeout after which a wait has ended because of it
# The place in the source of a library, in its error messages.
_SOURCE = re.compile(r"\[\S+\.\w+:\d+\] ")


@dataclass
class Progress:
    """Counts the failures of this process in a process group, over all exchanges.

    A failure ends an epoch on all ranks: each of them gets an error, makes new connections, and
    goes on in the next epoch if the caller catches the error.  What ranks say through the store
    has the epoch in its name, so an old failure is not taken for a new one.

    Attributes:
        name: of the group's messages in the store, the same on all ranks of the group.
        epoch: the number of failures so far.
        compared: the number of comparisons of settings in the present epoch.
        connections: those of the present epoch, of all transports of the group.
        made: the number of exchanges of each kind that this process has made in the group.
    """

    name: str
    epoch: int = 0
    compared: int = 0
    connections: WeakSet[Any] = field(default_factory=WeakSet)
    made: Counter[int] = field(default_factory=Counter)

    def compare(self, epoch: int) -> str:
        """Count a new comparison of settings; return a name for it, the same on all ranks.

        Raises:
            RuntimeError: if the epoch has ended.
        """
        if epoch != self.epoch:
            raise RuntimeError(CLOSED)
        self.compared += 1
        return f"{epoch}.{self.compared}"

    def fail(self, epoch: int) -> None:
        """End an epoch, unless it has ended already, and close its connections.

        Ranks that wait for a message of this one then fail at once, and end the epoch, too.
        """
        if epoch == self.epoch:
            self.epoch, self.compared = epoch + 1, 0
            for connection in list(self.connections):
                connection.close()
            self.connections.clear()


_of_group: WeakKeyDictionary[dist.ProcessGroup, Progress] = WeakKeyDictionary()


def progress_of(group: dist.ProcessGroup) -> Progress:
    """Return the failures of this process in a process group, shared by all transports."""
    if group not in _of_group:
        ranks = repr(dist.get_process_group_ranks(group)).encode()
        name = f"comm_hooks {group.group_name} {hashlib.sha256(ranks).hexdigest()[:16]}"
        # The store may have messages of earlier groups of these ranks.
        store = dist.distributed_c10d._get_default_store()
        own = f"{name} of rank {dist.get_rank()}"
        try:
            generation = within(4 * _LONGEST_SECONDS, lambda: store.add(own, 1))
        except (TimeoutError, RuntimeError) as error:
            raise PeerError(_SILENT_STORE) from error
        _of_group[group] = Progress(f"{name} {generation}")
    return _of_group[group]


class FailureDetector:
    """Finds the ranks that made a collective fail, through the store of the process group.

    An error of a network library names an address and a port at best, a different one on every
    rank.  Here every rank that notices a failure writes a report with its collective to the store,
    and waits some seconds for the reports of the other ranks; the error names the ranks without a
    report, or with another collective.

    Args:
        store: the key-value store of these ranks.
        group: the process group of these ranks.
        timeout: the timeout of a collective.
    """

    def __init__(self, store: Store, group: dist.ProcessGroup, timeout: timedelta) -> None:
        self._store = PrefixStore("failures", store)
        self._ranks = dist.get_process_group_ranks(group)
        self._own = dist.get_rank()
        self._timeout = timeout
        self._progress = progress_of(group)
        self._reasons: dict[int, str] = {}

    def report(self, error: BaseException) -> None:
        """Write the error of this rank to the store, for the other ranks, which may be waiting."""
        epoch, text = self._progress.epoch, f"{type(error).__name__}: {_line(error)}"
        self._reasons.setdefault(epoch, f"rank {self._own} failed: {text}")
        with suppress(TimeoutError, RuntimeError):
            within(_LONGEST_SECONDS, lambda: self._say(epoch, "failure", text))
        self._progress.fail(epoch)

    def has_failed(self, ranks: Sequence[int], epoch: int) -> bool:
        """Return whether this rank or any of ``ranks`` has ended the epoch."""
        kinds = "signed", "failure"
        return epoch != self._progress.epoch or any(
            self._said(epoch, kind, rank) for kind in kinds for rank in ranks
        )

    def _say(self, epoch: int, kind: str, said: object) -> None:
        self._store.set(f"{epoch} {kind} {self._own}", json.dumps(said))

    def _said(self, epoch: int, kind: str, rank: int) -> Any:
        name = f"{epoch} {kind} {rank}"
        return json.loads(self._store.get(name)) if self._store.check([name]) else None

    @contextmanager
    def explaining(self, epoch: int, request: Request) -> Iterator[None]:
        """Return a context for a collective in an epoch, which an error in it ends.

        Raises:
            PeerError: in place of an error of the network library, with the ranks at fault; after
                some seconds of waiting for the reports of all ranks.
        """
        begin = time.monotonic()
        try:
            yield
        except PeerError:
            self._progress.fail(epoch)
            raise
        except (TimeoutError, RuntimeError) as error:
            waited = time.monotonic() - begin
            traceback.clear_frames(error.__traceback__)  # their messages keep connections open
            self._progress.fail(epoch)
            if epoch not in self._reasons:
                self._reasons[epoch] = self._find_reason(request, epoch, waited)
            reason = f"{self._reasons[epoch]} ({_line(error)})"
            raise PeerError(f"an exchange failed because {reason}") from error

    def _find_reason(self, request: Request, epoch: int, waited: float) -> str:
        longest = min(_LONGEST_SECONDS, self._timeout.total_seconds())
        signed: dict[int, dict[str, Any]] = {}
        failures: dict[int, str] = {}

        def call() -> None:
            self._say(epoch, "signed", {"waited": waited, "request": str(request)})
            until = time.monotonic() + longest
            while len(signed) < len(self._ranks) and time.monotonic() < until:
                for rank in set(self._ranks) - set(signed):
                    if said := self._said(epoch, "signed", rank):
                        signed[rank] = said
                    elif said := self._said(epoch, "failure", rank):
                        failures[rank] = said
                if failures:
                    return
                time.sleep(_POLL_SECONDS)

        try:
            within(2 * longest + 1, call)
        except (TimeoutError, RuntimeError):
            return _SILENT_STORE
        return self._told(signed, failures)

    def _told(self, signed: Mapping[int, Mapping[str, Any]], failures: Mapping[int, str]) -> str:
        """Return in words why a collective failed, from the reports of ranks that gave up."""
        if failures:
            rank, failure = next(iter(failures.items()))
            return f"rank {rank} failed: {failure}"
        timeout = f"{self._timeout.total_seconds():g} s"
        absent = [rank for rank in self._ranks if rank not in signed]
        if absent:
            return (
                f"{_named(absent)} did not take part: ended, stopped, or late by more than the "
                f"timeout of {timeout}"
            )
        # Ages: clocks of nodes may differ.
        first = max(signed, key=lambda rank: signed[rank]["waited"])
        longest = signed[first]["waited"]
        late = {rank: longest - note["waited"] for rank, note in signed.items()}
        late = {rank: after for rank, after in late.items() if after > _LATE_SECONDS}
        reasons = []
        if late and longest > _NEARLY * self._timeout.total_seconds():
            reasons.append(
                f"{_named(list(late))} came too late: {min(late.values()):.1f} s or more after "
                f"rank {first} (the timeout is {timeout})"
            )
        if different := different_requests({r: signed[r]["request"] for r in self._ranks}):
            reasons.append(different)
        return "; ".join(reasons) or "a connection was lost, although all ranks are running"


def different_requests(requests: Mapping[int, str]) -> str:
    """Return in words which ranks wait for which collective; empty if all wait for the same."""
    waits = [f"{ranks} for {request}" for request, ranks in ranks_by_value(requests).items()]
    return f"ranks waited for different things: {', '.join(waits)}" if len(waits) > 1 else ""


def ranks_by_value(values: Mapping[int, str]) -> dict[str, str]:
    """Return in words which ranks have each value."""
    found: dict[str, list[int]] = {}
    for rank, value in values.items():
        found.setdefault(value, []).append(rank)
    return {value: _named(ranks) for value, ranks in found.items()}


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _line(error: BaseException) -> str:
    return _SOURCE.sub("", (str(error) or repr(error)).splitlines()[0]).partition(". ")[0]


def within(seconds: float, call: Callable[[], Result]) -> Result:
    """Call a function in another thread and return its result, or raise its error.

    For calls of a store, which may never answer: its process may have ended, or be stopped.

    Raises:
        TimeoutError: if the function does not return in time; the thread is left behind.
    """
    future: Future[Result] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="comm-hooks failure detection", daemon=True).start()
    return future.result(seconds)

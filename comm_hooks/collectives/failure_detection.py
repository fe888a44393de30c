"""Failure detection: name the ranks that are dead, late or in another collective."""

import json
import re
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from comm_hooks.collectives.requests import AllGatherObject, Request
from comm_hooks.errors import PeerError

_LONGEST_SECONDS = 5.0
_POLL_SECONDS = 0.05
# The clocks of nodes differ by less.
_LATE_SECONDS = 0.5
# The place in the source of a library, in its error messages.
_SOURCE = re.compile(r"\[\S+\.\w+:\d+\] ")


@dataclass
class Progress:
    """Counts the rounds of this process in a process group, over all exchanges.

    Messages between ranks carry the number of their round: a rank that catches an error and
    continues must not take an old failure for a new one.

    Attributes:
        generation: the number of earlier groups of the same name in this process; their messages
            are still in the store.
        begun: the number of rounds that have begun, the present one included.
        forgiven: the number of the last round that had failed on this rank when the present round
            or comparison began.
        notices: the number of comparisons of settings within the present round.
    """

    generation: int = 0
    begun: int = 0
    forgiven: int = -1
    notices: int = 0
    _failed: int = -1

    def begin(self) -> int:
        """Count a new round; return its number, from 1."""
        self.begun += 1
        self.notices = 0
        self.forgiven = self._failed
        return self.begun

    def compare(self) -> str:
        """Count a new comparison of settings; return a name for it, the same on all ranks."""
        self.notices += 1
        self.forgiven = self._failed
        return f"{self.begun}.{self.notices}"

    def fail(self, number: int) -> None:
        """Record that the round of this number has failed on this rank."""
        self._failed = max(self._failed, number)


_generations: Counter[str] = Counter()
_of_group: WeakKeyDictionary[dist.ProcessGroup, Progress] = WeakKeyDictionary()


def progress_of(group: dist.ProcessGroup) -> Progress:
    """Return the round counter of this process in a process group, shared by all transports."""
    if group not in _of_group:
        name = group.group_name
        _of_group[group] = Progress(_generations[name])
        _generations[name] += 1
    return _of_group[group]


class FailureDetector:
    """Finds the ranks that made a collective fail, through the store of the process group.

    An error of a network library names an address and a port at best, a different one on every
    rank.  Here every rank that notices a failure writes a report with its collective to the store,
    and waits some seconds for the reports of the other ranks; the error names the ranks without a
    report, or with another collective.

    Args:
        store: the key-value store of these ranks.
        ranks: the global ranks of all members of the group.
        own: the global rank of this process.
        timeout: the timeout of a collective.
        progress: the round counter of this process in the group.
    """

    def __init__(
        self,
        store: Store,
        ranks: Sequence[int],
        own: int,
        timeout: timedelta,
        progress: Progress,
    ) -> None:
        self._store = PrefixStore("failures", store)
        self._ranks = ranks
        self._own = own
        self._timeout = timeout
        self._progress = progress
        self._reason = ""

    def report(self, error: BaseException, round_number: int) -> None:
        """Write the error of this rank to the store, for the other ranks, which may be waiting."""
        self._progress.fail(round_number)
        failure = {"round": round_number, "error": f"{type(error).__name__}: {_line(error)}"}
        _within(_LONGEST_SECONDS, lambda: self._say("failure", failure))

    def has_failed(self, ranks: Sequence[int]) -> bool:
        """Return whether any of ``ranks`` reported a failure since the last one on this rank."""
        kinds = ("signed", "failure")
        return any(self._said(kind, rank) for kind in kinds for rank in ranks)

    def _say(self, kind: str, said: Mapping[str, Any]) -> None:
        self._store.set(f"{kind} {self._own}", json.dumps(said))

    def _said(self, kind: str, rank: int) -> dict[str, Any] | None:
        """Return a rank's report of a kind; None if it has none, or only one of an old failure."""
        if not self._store.check([f"{kind} {rank}"]):
            return None
        said: dict[str, Any] = json.loads(self._store.get(f"{kind} {rank}"))
        return said if said["round"] > self._progress.forgiven else None

    def explain(self, error: BaseException, request: Request) -> PeerError:
        """Return an error that names the ranks at fault; wait some seconds for all reports.

        Args:
            error: the error of the network library.
            request: the collective that failed.
        """
        cause = _line(error)
        if self._reason:
            # Connections do not survive a failed collective: later errors have the same reason.
            return PeerError(f"an exchange failed because {self._reason} ({cause})")
        waited = min(_LONGEST_SECONDS, self._timeout.total_seconds())
        signed: dict[int, dict[str, Any]] = {}
        failures: dict[int, str] = {}
        number = self._progress.begun
        self._progress.fail(number)

        def call() -> None:
            self._say("signed", {"round": number, "at": time.time(), "request": str(request)})
            until = time.monotonic() + waited
            while time.monotonic() < until:
                for rank in set(self._ranks) - set(signed):
                    if said := self._said("signed", rank):
                        signed[rank] = said
                if len(signed) == len(self._ranks):
                    break
                time.sleep(_POLL_SECONDS)
            for rank in self._ranks:
                if said := self._said("failure", rank):
                    failures[rank] = said["error"]

        # In a thread of its own: a store whose process has ended may never answer.
        if not _within(2 * waited + 1, call):
            reason = (
                "the key-value store of the process group does not answer: the process that keeps "
                "it, often rank 0, has ended or cannot be reached"
            )
        else:
            reason = self._told(signed, failures)
        if not isinstance(request, AllGatherObject):
            self._reason = reason
        return PeerError(f"an exchange failed because {reason} ({cause})")

    def _told(self, signed: Mapping[int, Mapping[str, Any]], failures: Mapping[int, str]) -> str:
        """Return in words why a collective failed.

        Args:
            signed: the report of each rank that gave up: the round, the time and the collective.
            failures: the error of each rank that raised one, by rank.
        """
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
        first = min(signed, key=lambda rank: signed[rank]["at"])
        late = {rank: note["at"] - signed[first]["at"] for rank, note in signed.items()}
        late = {rank: after for rank, after in late.items() if after > _LATE_SECONDS}
        reasons = []
        if late:
            reasons.append(
                f"{_named(list(late))} came too late: {min(late.values()):.1f} s after rank "
                f"{first} had given up (the timeout is {timeout})"
            )
        if different := different_requests({r: signed[r]["request"] for r in self._ranks}):
            reasons.append(different)
        if not reasons:
            return "a connection was lost, although all ranks are running"
        return "; ".join(reasons)


def different_requests(requests: Mapping[int, str]) -> str:
    """Return in words which ranks wait for which collective; empty if all wait for the same.

    Example::

        >>> different_requests({0: "an all-reduce", 1: "an all-gather", 2: "an all-reduce"})
        'ranks waited for different things: ranks 0, 2 for an all-reduce, rank 1 for an all-gather'
    """
    of_request: dict[str, list[int]] = {}
    for rank, request in requests.items():
        of_request.setdefault(request, []).append(rank)
    if len(of_request) < 2:
        return ""
    waits = [f"{_named(ranks)} for {request}" for request, ranks in of_request.items()]
    return f"ranks waited for different things: {', '.join(waits)}"


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def _line(error: BaseException) -> str:
    return _SOURCE.sub("", (str(error) or repr(error)).splitlines()[0]).partition(". ")[0]


def _within(seconds: float, call: Any) -> bool:
    """Call a function in another thread; return whether it returned in time, without an error."""
    done = threading.Event()

    def run() -> None:
        try:
            call()
            done.set()
        except Exception:  # the store is gone
            return

    thread = threading.Thread(target=run, name="comm-hooks failure detection", daemon=True)
    thread.start()
    thread.join(seconds)
    return done.is_set()

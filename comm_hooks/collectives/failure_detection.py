"""Finds out, after a collective has failed, who is still there."""

import json
import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from comm_hooks.collectives.progress import Progress
from comm_hooks.collectives.requests import AllGatherObject, Request
from comm_hooks.errors import PeerError

_LONGEST_SECONDS = 5.0
_POLL_SECONDS = 0.05
# Clocks of nodes agree better than that.
_LATE_SECONDS = 0.5
# Where in a library's source an error arose.
_SOURCE = re.compile(r"\[\S+\.\w+:\d+\] ")


@dataclass(frozen=True)
class _Signature:
    """In which round and when a rank has given up, by its clock, and what it had asked for."""

    round: int
    at: float
    request: str


class RollCall:
    """Lets ranks tell each other, in the store by which they met, that a collective has failed.

    What a network library says of a lost connection is an address and a port at best, on every rank
    another one's.  Here every rank that notices a failure signs with what it was waiting for, waits
    for the others to do so, and those that do not, or waited for something else, are named.

    Args:
        store: of these ranks.
        ranks: all of them, as users count them.
        own: this rank, as users count it.
        timeout: after which a collective fails.
        progress: of this process among these ranks.
    """

    def __init__(
        self,
        store: Store,
        ranks: Sequence[int],
        own: int,
        timeout: timedelta,
        progress: Progress,
    ) -> None:
        self._store = PrefixStore("roll call", store)
        self._ranks = ranks
        self._own = own
        self._timeout = timeout
        self._progress = progress
        self._reason = ""

    def report(self, error: BaseException, round_number: int) -> None:
        """Tell the others, who may be waiting for this rank, why it does not come."""
        self._progress.fail(round_number)
        failure = {"round": round_number, "error": f"{type(error).__name__}: {_line(error)}"}
        _within(_LONGEST_SECONDS, lambda: self._say("failure", failure))

    def has_begun(self, ranks: Sequence[int]) -> bool:
        """Return whether one of these ranks has given up, or failed, since the last time."""
        kinds = ("signed", "failure")
        return any(self._said(kind, rank) for kind in kinds for rank in ranks)

    def _say(self, kind: str, said: Mapping[str, Any]) -> None:
        self._store.set(f"{kind} {self._own}", json.dumps(said))

    def _said(self, kind: str, rank: int) -> dict[str, Any] | None:
        """Return what a rank says of a round that has not failed here and been left behind."""
        if not self._store.check([f"{kind} {rank}"]):
            return None
        said: dict[str, Any] = json.loads(self._store.get(f"{kind} {rank}"))
        return said if said["round"] > self._progress.forgiven else None

    def explain(self, error: BaseException, request: Request) -> PeerError:
        """Return what to raise instead of an error of the network; takes some seconds at most.

        Args:
            error: of the network.
            request: what was asked of it.
        """
        cause = _line(error)
        if self._reason:
            # No network outlives a collective that has failed: what follows has the same reason.
            return PeerError(f"an exchange failed because {self._reason} ({cause})")
        waited = min(_LONGEST_SECONDS, self._timeout.total_seconds())
        signed: dict[int, _Signature] = {}
        failures: dict[int, str] = {}
        number = self._progress.begun
        self._progress.fail(number)

        def call() -> None:
            self._say("signed", {"round": number, "at": time.time(), "request": str(request)})
            until = time.monotonic() + waited
            while time.monotonic() < until:
                for rank in set(self._ranks) - set(signed):
                    if said := self._said("signed", rank):
                        signed[rank] = _Signature(**said)
                if len(signed) == len(self._ranks):
                    break
                time.sleep(_POLL_SECONDS)
            for rank in self._ranks:
                if said := self._said("failure", rank):
                    failures[rank] = said["error"]

        # In a thread of its own: if the keeper of the store is gone, too, it may never answer.
        if not _within(2 * waited + 1, call):
            reason = (
                "the store by which ranks found each other does not answer: the process that keeps "
                "it, often rank 0, has ended or cannot be reached"
            )
        else:
            reason = self._told(signed, failures)
        if not isinstance(request, AllGatherObject):
            self._reason = reason
        return PeerError(f"an exchange failed because {reason} ({cause})")

    def _told(self, signed: Mapping[int, "_Signature"], failures: Mapping[int, str]) -> str:
        """Return the reason, given what ranks have signed and what some of them say."""
        if failures:
            rank, failure = next(iter(failures.items()))
            return f"rank {rank} did: {failure}"
        timeout = f"{self._timeout.total_seconds():g} s"
        absent = [rank for rank in self._ranks if rank not in signed]
        if absent:
            return (
                f"{_named(absent)} did not take part: ended, stopped, or late by more than the "
                f"timeout of {timeout}"
            )
        first = min(signed, key=lambda rank: signed[rank].at)
        late = {rank: signature.at - signed[first].at for rank, signature in signed.items()}
        late = {rank: after for rank, after in late.items() if after > _LATE_SECONDS}
        reasons = []
        if late:
            reasons.append(
                f"{_named(list(late))} came too late: {min(late.values()):.1f} s after rank "
                f"{first} had given up (the timeout is {timeout})"
            )
        if different := different_requests({r: signed[r].request for r in self._ranks}):
            reasons.append(different)
        if not reasons:
            return "a connection was lost, although all ranks are there"
        return "; ".join(reasons)


def different_requests(requests: Mapping[int, str]) -> str:
    """Return in words which ranks wait for what; nothing if all wait for the same.

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
    """Call a function in another thread; return whether it came to its end in time."""
    done = threading.Event()

    def run() -> None:
        try:
            call()
            done.set()
        except Exception:  # the store is gone: there is nobody to tell
            return

    thread = threading.Thread(target=run, name="comm-hooks roll call", daemon=True)
    thread.start()
    thread.join(seconds)
    return done.is_set()

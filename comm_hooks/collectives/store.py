"""Gather plain values through the store of the process group, without a collective."""

import hashlib
import json
import time
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from comm_hooks.collectives.failure_detection import (
    FailureDetector,
    different_requests,
    progress_of,
    within,
)
from comm_hooks.collectives.requests import AllGatherObject, decoded, encoded
from comm_hooks.errors import PeerError

_FIRST_POLL_SECONDS = 0.001
_POLL_SECONDS = 0.05
_SECONDS_TO_ANSWER = 5.0
"""After the timeout: for a store that still answers."""


class StoreGather:
    """Gathers a plain value of every rank through the key-value store of the process group.

    A collective would hang if only some ranks take part, such as one that has made its optimizer
    again while the others exchange, and needs connections.  Instead

    1. every rank stores its value and a digest of it;
    2. it reads the digests of all ranks, and waits for those that are missing;
    3. it reads the values that have another digest than its value.

    Args:
        store: the key-value store of these ranks.
        group: the process group of these ranks.
        timeout_seconds: the longest time to wait for other ranks.
        failures: tells whether absent ranks have ended the epoch, so that waiting is useless.
    """

    def __init__(
        self,
        store: Store,
        group: dist.ProcessGroup,
        timeout_seconds: float,
        failures: FailureDetector,
    ) -> None:
        self._store = PrefixStore("notices", store)
        self._ranks, self._own = dist.get_process_group_ranks(group), dist.get_rank(group)
        self._progress = progress_of(group)
        self._timeout_seconds = timeout_seconds
        self._failures = failures

    def gather(self, request: AllGatherObject, epoch: int) -> list[Any]:
        """Return the values of all ranks, in rank order.

        Args:
            request: the value of this rank.
            epoch: see :class:`~comm_hooks.collectives.failure_detection.Progress`.

        Raises:
            PeerError: on all ranks, if ranks compare different things (settings, tensors).
            TimeoutError: if the value of a rank does not arrive in time.
        """
        if len(self._ranks) == 1:
            return [decoded(encoded(request.payload))]
        name = self._progress.compare(epoch)
        seconds = self._timeout_seconds + _SECONDS_TO_ANSWER
        found = within(seconds, lambda: self._gather(name, request, epoch))
        said = [decoded(each) for each in found]
        requests = dict(zip(self._ranks, (next(iter(each)) for each in said), strict=True))
        if reason := different_requests(requests):
            raise PeerError(f"an exchange failed because {reason}")
        return [each[str(request)] for each in said]

    def _gather(self, name: str, request: AllGatherObject, epoch: int) -> list[bytes]:
        text = json.dumps({str(request): request.payload}).encode()
        mark = hashlib.sha256(text).hexdigest()
        self._store.set(f"{name} value {self._own}", text.decode())
        self._store.set(f"{name} digest {self._own}", mark)
        places = [f"{name} digest {rank}" for rank in range(len(self._ranks))]
        self._wait(places, epoch)
        found = []
        for rank, place in enumerate(places):
            is_alike = self._store.get(place).decode() == mark
            found.append(text if is_alike else self._store.get(f"{name} value {rank}"))
        return found

    def _wait(self, places: Sequence[str], epoch: int) -> None:
        until, poll = time.monotonic() + self._timeout_seconds, _FIRST_POLL_SECONDS
        # Not Store.wait(): it would block all other threads of the store.
        while not self._store.check(list(places)):
            is_over = time.monotonic() > until or self._failures.has_failed(self._ranks, epoch)
            # Once more: a rank may have sent its value, and failed after that.
            if is_over and not self._store.check(list(places)):
                absent = sum(not self._store.check([place]) for place in places)
                raise TimeoutError(f"{absent} of {len(places)} ranks have sent no values")
            time.sleep(poll)
            poll = min(2 * poll, _POLL_SECONDS)

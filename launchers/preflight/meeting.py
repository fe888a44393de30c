"""Processes that meet in a key-value store, and give up on those that do not come.

The store is PyTorch's, at the endpoint where training will meet: finding it is a check in itself.
Everything is polled: a wait that ends can say who is missing, and prints nothing else.
"""

import json
import time
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from comm_hooks.launchers.network import Endpoint, port_is_taken, wait_for_port
from comm_hooks.launchers.output import complain

_POLL_SECONDS = 0.05
_PREFIX = "comm-hooks-preflight"


class MeetingError(ValueError):
    """The processes cannot meet; the message is one line for the user."""


class Meeting:
    """One process's access to what all of them tell.

    Args:
        store: a ``torch.distributed.Store`` shared by all.
        rank: of this process.
        size: how many there are.
        hosts: whether the store lives in this process, which must then leave last.
        member: what a process stands for in messages: a rank, or a node.
    """

    def __init__(
        self, store: Any, rank: int, size: int, *, hosts: bool, member: str = "rank"
    ) -> None:
        self.store = store
        self.rank = rank
        self.size = size
        self.member = member
        self._hosts = hosts

    def tell(self, what: str, value: Any) -> None:
        """Tell all processes something that can be written as JSON."""
        self.store.set(f"{what}/{self.rank}", json.dumps(value))

    def hear(
        self, what: str, ranks: Iterable[int], seconds: float
    ) -> tuple[dict[int, Any], list[int]]:
        """Return what those ranks told, by rank, and the ranks that did not within the time."""
        missing, heard = list(ranks), {}
        deadline = time.monotonic() + seconds
        while True:
            try:
                for rank in list(missing):
                    if self.store.check([f"{what}/{rank}"]):
                        heard[rank] = json.loads(self.store.get(f"{what}/{rank}"))
                        missing.remove(rank)
            except RuntimeError as error:
                raise MeetingError(
                    f"lost {self.member} 0, where all meet: what it said last tells why"
                ) from error
            if not missing or time.monotonic() > deadline:
                return heard, missing
            time.sleep(_POLL_SECONDS)

    def wait_for_all(self, what: str, ranks: Iterable[int], seconds: float) -> None:
        """Let those ranks go on together, and wait for late ones no longer than told."""
        self.tell(what, True)
        self.hear(what, ranks, seconds)

    def leave(self, seconds: float = 10.0) -> None:
        """End; the host of the store waits until those who came have read what they need."""
        self.tell("leaves", True)
        if self._hosts:
            came = [r for r in range(self.size) if self.store.check([f"facts/{r}"])]
            self.hear("leaves", came, seconds)


def meet(
    endpoint: Endpoint,
    rank: int | None,
    size: int,
    *,
    hosts: bool,
    seconds: float,
    origin: str,
    member: str,
) -> Meeting:
    """Find the store, or host it.

    Args:
        endpoint: where it is.
        rank: of this process; None to be given the next free one.
        size: how many processes there will be.
        hosts: whether to host the store here.
        seconds: how long to wait for a store that is elsewhere.
        origin: how this machine is called in a message.
        member: what a process stands for in messages: ``"rank"`` or ``"node"``.

    Raises:
        MeetingError: if the port is taken here, or nothing answers there.
    """
    if hosts and port_is_taken(endpoint.host, endpoint.port):
        raise MeetingError(
            f"port {endpoint.port} is in use on this machine: give another one, as in --head "
            f"{endpoint.host}:{endpoint.port + 1}"
        )
    if not hosts:
        if wait_for_port(endpoint, 0):
            complain("comm-hooks preflight", f"waiting for {endpoint} ...")
        reason = wait_for_port(endpoint, seconds)
        if reason:
            raise MeetingError(
                f"cannot reach the head at {endpoint} from {origin}: {reason}, for {seconds:g} s"
            )
    try:
        store: Any = dist.TCPStore(  # type: ignore[attr-defined]
            endpoint.host,
            endpoint.port,
            is_master=hosts,
            wait_for_workers=False,
            timeout=timedelta(seconds=max(seconds, 10.0)),
        )
        # The launcher's own store may be the same.
        store = prefixed(_PREFIX, store)
        if rank is None:
            rank = 0 if hosts else store.add("arrivals", 1)
    except RuntimeError as error:
        raise MeetingError(
            f"{endpoint} answers, but not as a PyTorch store: is another program using that port? "
            f"({str(error).splitlines()[0]})"
        ) from None
    return Meeting(store, rank, size, hosts=hosts, member=member)


def meet_alone() -> Meeting:
    """Return the meeting of one process."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    return Meeting(store, 0, 1, hosts=True)


def prefixed(prefix: str, store: Any) -> Any:
    """Return a store in which keys of others are not seen."""
    return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]

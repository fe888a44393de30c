"""A transport over gloo connections that belong to no process group of ``torch.distributed``."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import timedelta
from typing import Any, get_args

import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from comm_hooks.collectives.base import Transport
from comm_hooks.collectives.failure_detection import CLOSED, within
from comm_hooks.collectives.requests import (
    AllGather,
    AllReduce,
    AllToAll,
    Group,
    GroupKind,
    Request,
)
from comm_hooks.collectives.rings import Rings


class GlooRanks(Transport):
    """A transport over gloo connections that no other object uses.

    Not a process group, because ``new_group`` is collective over all ranks of the program, or with
    ``use_local_synchronization`` hangs unless its members belong to equally many other groups.

    Args:
        store: a key-value store that only these ranks use.
        rank, world_size: the rank of this process among these ranks, and their number.
        timeout: the timeout of a collective; None: torch's default.
        explaining: returns the context of a request, which explains errors of the network.

    Not supported: tensors on accelerators.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        timeout: timedelta | None,
        explaining: Callable[[Request], AbstractContextManager[None]],
    ) -> None:
        self._store = store
        self.rank = rank
        self.world_size = world_size
        self._timeout = timeout or dist.default_pg_timeout
        self._explaining = explaining
        self._parts: dict[Group, GlooRanks] = {}
        self._made: Rings | None = None
        self.is_closed = False

    @property
    def _rings(self) -> Rings:
        if self._made is None and not self.is_closed:
            context = within(self._timeout.total_seconds(), self._connected)
            self._made = Rings(context, self.rank, self.world_size)
        if (made := self._made) is None or self.is_closed:  # perhaps by another thread, just now
            self.close()
            raise RuntimeError(CLOSED)
        return made

    def _connected(self) -> Any:
        # Not every build of torch has it.
        from torch.distributed import ProcessGroupGloo

        made: Any = ProcessGroupGloo(self._store, self.rank, self.world_size, self._timeout)
        made.barrier().wait()  # a rank that closed its own at once would end those half made
        return made

    def connect(self, request: Request) -> None:
        """Make the connections for a round that begins with this request, if there are none yet.

        Call it in the main thread: a wait in a store blocks all its other threads, so that two
        ranks could wait for each other.
        """
        if request.group:
            for kind in get_args(GroupKind):
                self._part(replace(request.group, kind=kind)).connect(replace(request, group=None))
        elif self.world_size > 1:
            with self._explaining(request):
                _ = self._rings

    def close(self) -> None:
        """Close all connections: ranks that wait for a message of this one get an error."""
        self.is_closed = True
        for part in list(self._parts.values()):
            part.close()
        made, self._made = self._made, None
        if made:
            made.close()

    def perform(self, request: Request) -> Any:
        if request.group:
            return self._part(request.group).perform(replace(request, group=None))
        if self.world_size == 1:
            payload = request.payload
            return payload[None] if isinstance(request, AllGather) else payload
        with self._explaining(request):
            if isinstance(request, AllReduce):
                self._rings.all_reduce_(request.payload)
                return request.payload
            if isinstance(request, AllGather):
                return self._rings.all_gather(request.payload)
            if isinstance(request, AllToAll):
                return self._rings.all_to_all(request.payload)
        raise TypeError(f"no such request: {request}")

    def _part(self, group: Group) -> "GlooRanks":
        if group not in self._parts:
            members = group.members(self.rank, self.world_size)
            name = f"{group.kind} of {group.ranks_per_node} from {members[0]}"
            self._parts[group] = GlooRanks(
                PrefixStore(name, self._store),
                members.index(self.rank),
                len(members),
                self._timeout,
                self._explaining,
            )
        if self.is_closed:
            self.close()  # the new part, too
        return self._parts[group]

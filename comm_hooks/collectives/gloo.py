"""Ranks joined by gloo beside the process groups of ``torch.distributed``."""

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from comm_hooks.collectives.base import Transport, completed
from comm_hooks.collectives.requests import AllGather, AllReduce, AllToAll, Group, Request

# Of messages between two ranks: theirs have the upper bits of this, so that none meets one that the
# program sends on the same group, and lower ones that depend on their size.
_TAG = 0x63000000
_SIZE_MASK = 0xFFFFFF


class GlooRanks(Transport):
    """Ranks that only this library knows of, with connections of their own.

    Not a process group, because ``new_group`` takes all ranks of the program, or with
    ``use_local_synchronization`` hangs unless its members belong to equally many other groups.

    Args:
        store: how the ranks find each other; nobody else may use it.
        rank, world_size: among these ranks.
        timeout: after which a collective fails.
        explain: what to raise instead of an error of the network.

    Not supported: tensors on accelerators.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        timeout: timedelta | None,
        explain: Callable[[BaseException, Request], BaseException],
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._timeout = timeout or dist.default_pg_timeout
        self._explain = explain
        self._parts: dict[Group, GlooRanks] = {}

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._world_size

    @cached_property
    def _context(self) -> Any:
        # Not every build of torch has it.
        from torch.distributed import ProcessGroupGloo

        # Connects to all others, so not before it is needed.
        return ProcessGroupGloo(self._store, self._rank, self._world_size, self._timeout)

    def perform(self, request: Request) -> Any:
        if request.group:
            return self._part(request.group).perform(replace(request, group=None))
        try:
            return self._perform(request)
        except RuntimeError as error:
            raise self._explain(error, request) from error

    def _perform(self, request: Request) -> Any:
        payload = request.payload
        if isinstance(request, AllReduce):
            self._context.allreduce([payload]).wait()
            return payload
        if isinstance(request, AllToAll):
            return self._exchange_pairs(payload)
        if isinstance(request, AllGather):
            if self._world_size <= 2:
                return self._exchange_pairs(payload.expand(self._world_size, -1))
            reply = payload.new_empty(self._world_size * payload.numel())
            self._context._allgather_base(reply, payload).wait()
            return reply.view(self._world_size, -1)
        raise TypeError(f"no such request: {request}")

    def start(self, request: Request) -> torch.futures.Future[Any]:
        return completed(self.perform(request))

    def _part(self, group: Group) -> "GlooRanks":
        if group not in self._parts:
            members = group.members(self._rank, self._world_size)
            name = f"{group.kind} of {group.ranks_per_node} from {members[0]}"
            self._parts[group] = GlooRanks(
                PrefixStore(name, self._store),
                members.index(self._rank),
                len(members),
                self._timeout,
                self._explain,
            )
        return self._parts[group]

    def _exchange_pairs(self, rows: torch.Tensor) -> torch.Tensor:
        """Send row j to rank j; return the rows that come from all ranks."""
        reply = torch.empty_like(rows, memory_format=torch.contiguous_format)
        reply[self._rank] = rows[self._rank]
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        # Receives first: a send that meets a posted receive is not held up behind other data.
        tag = exchange_pairs_tag(rows)
        works = [self._context.recv([reply[rank]], rank, tag) for rank in others]
        works += [self._context.send([rows[rank]], rank, tag) for rank in others]
        for work in works:
            work.wait()
        return reply


def exchange_pairs_tag(rows: torch.Tensor) -> int:
    """Return the tag of messages as long as these rows.

    Gloo ends the process where a message is longer than what its receiver expects.  Those of ranks
    that mean different rounds do not meet at all, and time out.
    """
    return _TAG | rows[0].nbytes & _SIZE_MASK

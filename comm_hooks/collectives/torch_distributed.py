"""Requests over a ``torch.distributed`` process group."""

import atexit
import time
from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from comm_hooks.collectives.base import Transport, completed
from comm_hooks.collectives.requests import (
    AllGather,
    AllGatherObject,
    AllReduce,
    AllToAll,
    Request,
)

# The name since torch 2.13; older versions know only the other one.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

_SECONDS_FOR_THREADS_TO_END = 0.1


@cache
def _let_gloo_threads_end_at_exit() -> None:
    """Give gloo's threads the interpreter lock once more before the interpreter ends.

    A thread of gloo that has completed a collective takes the lock to free what Python lent it,
    possibly after the main thread has gone on.  If it asks while the interpreter finalizes, CPython
    ends it with ``pthread_exit``, which C++ answers with ``abort()``: a training run that succeeded
    ends with SIGABRT and "terminate called without an active exception", and torchrun calls it
    failed.  ``destroy_process_group`` does not help, a DDP model keeps the group alive.
    """
    atexit.register(time.sleep, _SECONDS_FOR_THREADS_TO_END)


class TorchDistributed(Transport):
    """A transport over a process group, the default one if ``group`` is None.

    All collectives are issued from the calling thread in the order of the calls, which gloo needs
    to match them.

    Raises:
        ValueError: if ``torch.distributed`` is not initialized.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ValueError(
                "torch.distributed is not initialized: call "
                "torch.distributed.init_process_group() before the first exchange"
            )
        world = dist.group.WORLD
        assert world is not None
        self._group = group if group is not None else world
        self._is_gloo = "gloo" in dist.get_backend(self._group)
        if self._is_gloo:
            _let_gloo_threads_end_at_exit()

    @property
    def rank(self) -> int:
        return dist.get_rank(self._group)

    @property
    def world_size(self) -> int:
        return dist.get_world_size(self._group)

    def perform(self, request: Request) -> Any:
        if isinstance(request, AllGatherObject):
            replies: list[Any] = [None] * self.world_size
            dist.all_gather_object(replies, request.payload, group=self._group)
            return replies
        if isinstance(request, AllToAll) and self._is_gloo:
            return self._pairwise_all_to_all(request.payload)
        works, reply = self._issue(request)
        for work in works:
            work.wait()
        return reply

    def start(self, request: Request) -> torch.futures.Future[Any]:
        works, reply = self._issue(request)
        if not works:
            return completed(reply)
        return works[0].get_future().then(lambda _: reply)

    def _issue(self, request: Request) -> tuple[list[Any], torch.Tensor]:
        """Begin a collective; return its work handle, if any, and the tensor it will fill."""
        payload = request.payload
        if isinstance(request, AllReduce):
            return [dist.all_reduce(payload, group=self._group, async_op=True)], payload
        if isinstance(request, AllGather):
            reply = payload.new_empty(self.world_size * payload.numel())
            work = _all_gather_single(reply, payload, group=self._group, async_op=True)
            return [work], reply.view(self.world_size, -1)
        if isinstance(request, AllToAll):
            reply = torch.empty_like(payload)
            work = dist.all_to_all_single(reply, payload, group=self._group, async_op=True)
            return [work], reply
        raise TypeError(f"no such request: {request}")

    def _pairwise_all_to_all(self, payload: torch.Tensor) -> torch.Tensor:
        """All-to-all by pairs: gloo's ``all_to_all_single`` leaves half of a slow link idle."""
        reply = torch.empty_like(payload)
        reply[self.rank] = payload[self.rank]
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        peers = {rank: dist.get_global_rank(self._group, rank) for rank in others}
        # Receives first: a send that meets a posted receive is not held up behind other data.
        works = [dist.irecv(reply[r], src=peers[r], group=self._group) for r in others]
        works += [dist.isend(payload[r], dst=peers[r], group=self._group) for r in others]
        for work in works:
            assert work is not None
            work.wait()
        return reply

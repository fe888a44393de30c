"""Requests over a ``torch.distributed`` process group."""

import atexit
import os
import time
import uuid
from collections.abc import Sequence
from datetime import timedelta
from functools import cache, cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from comm_hooks.collectives.base import Transport, completed, finish
from comm_hooks.collectives.gloo import GlooRanks, exchange_pairs_tag
from comm_hooks.collectives.notice_board import NoticeBoard
from comm_hooks.collectives.progress import progress_of
from comm_hooks.collectives.requests import (
    AllGather,
    AllGatherObject,
    AllReduce,
    AllToAll,
    Group,
    Request,
    Result,
    Round,
    encoded,
    gather_objects,
)
from comm_hooks.collectives.roll_call import RollCall
from comm_hooks.collectives.worker import RoundWorker

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

    How requests travel:

    * gloo, tensors on the CPU: an all-gather of two ranks and every all-to-all by sends to and
      receives from each rank, because gloo's own leave up to half of a slow link idle;
    * otherwise by the collectives of ``torch.distributed``.

    How rounds go on beside the caller (:meth:`run_async`):

    * one collective, tensors on the CPU: the calling thread issues it, gloo's threads do what
      follows;
    * several collectives, or sends and receives, on gloo: a thread takes rounds to their end, one
      after the other, over connections of its own (see
      :class:`~comm_hooks.collectives.worker.RoundWorker`).  The first such round makes them, which
      takes 10 ms or so and all ranks;
    * accelerators: all of it on a stream of their own, for which neither the caller nor its stream
      waits.

    All other collectives are issued from the calling thread in the order of the calls, which gloo
    needs to match them.

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
        configured = dist.get_backend_config(self._group).split(",")
        self._backends = dict(pair.split(":") for pair in configured)
        self._is_gloo = self._backends.get("cpu") == "gloo"
        self._ranks_per_node = _ranks_per_node(self._group)
        self._parts: dict[Group, dist.ProcessGroup] = {}
        self._worker: RoundWorker | None = None
        self._streams: dict[torch.device, Any] = {}
        store = dist.distributed_c10d._get_default_store()
        timeout = _timeout(self._group) or dist.default_pg_timeout
        # Of each group for itself: others may go on when one has failed.
        of_group = PrefixStore(f"comm_hooks {self._group.group_name}", store)
        self._progress = progress_of(self._group)
        self._roll_call = RollCall(of_group, self.ranks, dist.get_rank(), timeout, self._progress)
        self._board = NoticeBoard(
            of_group,
            self._group,
            timeout.total_seconds(),
            lambda absent: self._roll_call.has_begun([self.ranks[rank] for rank in absent]),
        )
        if self._is_gloo:
            _let_gloo_threads_end_at_exit()

    @property
    def rank(self) -> int:
        return dist.get_rank(self._group)

    @property
    def world_size(self) -> int:
        return dist.get_world_size(self._group)

    @property
    def ranks(self) -> Sequence[int]:
        return dist.get_process_group_ranks(self._group)

    @property
    def ranks_per_node(self) -> int | None:
        return self._ranks_per_node

    @cached_property
    def _gloo_parts(self) -> GlooRanks:
        return self._gloo_ranks()

    def _gloo_ranks(self) -> GlooRanks:
        """Return the same ranks with connections of their own.  Takes all ranks."""
        names = self.perform(AllGatherObject(uuid.uuid4().hex))
        default_store = dist.distributed_c10d._get_default_store()
        store = PrefixStore(f"comm_hooks {names[0]}", default_store)
        return GlooRanks(
            store, self.rank, self.world_size, _timeout(self._group), self._roll_call.explain
        )

    def perform(self, request: Request) -> Any:
        if request.group and self._goes_by_gloo(request):
            return self._gloo_parts.perform(request)
        group = self._part(request.group)
        if isinstance(request, AllGatherObject):
            if request.may_be_alone and not request.group:
                return self._compare(request)
            own = encoded(request.payload).to(self._device)
            return gather_objects(lambda part: self._perform(part, group), own)
        return self._perform(request, group)

    def _compare(self, request: Request) -> list[Any]:
        try:
            return self._board.gather(request.payload)
        except (TimeoutError, RuntimeError) as error:
            raise self._roll_call.explain(error, request) from error

    def _perform(self, request: Request, group: dist.ProcessGroup) -> torch.Tensor:
        try:
            works, reply = self._issue(request, group)
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise self._roll_call.explain(error, request) from error
        return reply

    @property
    def _device(self) -> torch.device:
        """A device whose memory this group can send."""
        if "cpu" in self._backends:
            return torch.device("cpu")
        kind = next(iter(self._backends))
        return torch.device(kind, torch.get_device_module(kind).current_device())

    def start(self, request: Request) -> torch.futures.Future[Any]:
        if self._goes_by_pairs(request) or (self._is_gloo and request.group):
            # Sends and receives have no futures on gloo.
            return self.run_async(_only(request))
        works, reply = self._issue(request, self._part(request.group))
        return works[0].get_future().then(lambda done: self._checked(done, request, reply))

    def begin_round(self) -> int:
        return self._progress.begin()

    def report(self, error: BaseException, round_number: int) -> None:
        self._roll_call.report(error, round_number)

    def _checked(
        self, done: torch.futures.Future[Any], request: Request, reply: torch.Tensor
    ) -> torch.Tensor:
        """Return the reply of a collective that has ended, if it has succeeded."""
        try:
            done.value()
        except Exception as error:
            raise self._roll_call.explain(error, request) from error
        return reply

    def run_async(
        self, round_: Round[Result], device: torch.device | None = None
    ) -> torch.futures.Future[Result]:
        if device is not None and device.type != "cpu":
            return self._run_on_stream(round_, device)
        if not self._is_gloo or self.world_size == 1:
            return super().run_async(round_, device)
        try:
            request = next(round_)
            # In the first round of all ranks; the next bucket must find them agreed.
            while isinstance(request, AllGatherObject):
                request = self.advance(round_, request)
        except StopIteration as stop:
            return completed(stop.value)
        if request.final and not request.group and not self._goes_by_pairs(request):
            return self._start_last(round_, request)
        if self._worker is None:
            self._worker = RoundWorker(self._gloo_ranks())
        return self._worker.submit(round_, request)

    def _start_last(self, round_: Round[Result], request: Request) -> torch.futures.Future[Result]:
        works, reply = self._issue(request, self._group)
        # One callback: an error that passes from one to the next loses its type on the way.
        return (
            works[0]
            .get_future()
            .then(lambda done: finish(round_, lambda: self._checked(done, request, reply)))
        )

    def _goes_by_gloo(self, request: Request) -> bool:
        payload = request.payload
        return self._is_gloo and isinstance(payload, torch.Tensor) and payload.device.type == "cpu"

    def _goes_by_pairs(self, request: Request) -> bool:
        if not self._goes_by_gloo(request) or self.world_size == 1:
            return False
        if isinstance(request, AllGather):
            # From three ranks on gloo's ring is as fast.
            return self.world_size == 2
        return isinstance(request, AllToAll)

    def _run_on_stream(
        self, round_: Round[Result], device: torch.device
    ) -> torch.futures.Future[Result]:
        """Queue all of a round on a side stream; the future orders whoever takes its value.

        One stream for everything: what a round allocates is then used and freed on the stream that
        it belongs to.  Waiting for a collective holds up that stream only.
        """
        accelerator = torch.get_device_module(device)
        if device not in self._streams:
            self._streams[device] = accelerator.Stream(device)
        side = self._streams[device]
        side.wait_stream(accelerator.current_stream(device))
        with accelerator.stream(side):
            result = self.run(round_)
            if isinstance(result, torch.Tensor):
                # Others have made it, and could reuse its memory too early.
                result.record_stream(side)
            return completed(result)

    def _part(self, part: Group | None) -> dist.ProcessGroup:
        """Return the process group of a part of the ranks, made at the first call.

        Collective among its members.
        """
        if part is None:
            return self._group
        if part not in self._parts:
            members = part.members(self.rank, self.world_size)
            ranks = [dist.get_global_rank(self._group, member) for member in members]
            backend = dist.get_backend_config(self._group)
            counts = self.perform(AllGatherObject(len(dist.distributed_c10d._world.pg_names)))
            if len(set(counts)) > 1:
                # new_group() would wait for members that go by another name.
                raise RuntimeError(
                    "ranks cannot be divided into nodes, because they belong to different numbers "
                    f"of process groups ({counts}): make the exchange before those groups"
                )
            self._parts[part] = _new_group(ranks, backend, like=self._group)
        return self._parts[part]

    def _issue(self, request: Request, group: dist.ProcessGroup) -> tuple[list[Any], torch.Tensor]:
        """Begin a collective; return its work handles and the tensor that they will fill."""
        payload, ranks = request.payload, dist.get_world_size(group)
        if self._goes_by_pairs(request):
            is_gather = isinstance(request, AllGather)
            return _exchange_pairs(payload.expand(ranks, -1) if is_gather else payload, group)
        if isinstance(request, AllReduce):
            return [dist.all_reduce(payload, group=group, async_op=True)], payload
        if isinstance(request, AllGather):
            reply = payload.new_empty(ranks * payload.numel())
            work = _all_gather_single(reply, payload, group=group, async_op=True)
            return [work], reply.view(ranks, -1)
        if isinstance(request, AllToAll):
            reply = torch.empty_like(payload)
            work = dist.all_to_all_single(reply, payload, group=group, async_op=True)
            return [work], reply
        raise TypeError(f"no such request: {request}")


def _only(request: Request) -> Round[Any]:
    return (yield request)


def _exchange_pairs(rows: torch.Tensor, group: dist.ProcessGroup) -> tuple[list[Any], torch.Tensor]:
    """Send row j to rank j; return the work handles and the rows that come from all ranks."""
    own = dist.get_rank(group)
    reply = torch.empty_like(rows, memory_format=torch.contiguous_format)
    reply[own] = rows[own]
    peers = {r: dist.get_global_rank(group, r) for r in range(len(rows)) if r != own}
    tag = exchange_pairs_tag(rows)
    # Receives first: a send that meets a posted receive is not held up behind other data.
    works = [dist.irecv(reply[r], src=peers[r], group=group, tag=tag) for r in peers]
    works += [dist.isend(rows[r], dst=peers[r], group=group, tag=tag) for r in peers]
    return works, reply


def _new_group(ranks: list[int], backend: str, *, like: dist.ProcessGroup) -> dist.ProcessGroup:
    """Make a group that only its own ranks have to make, with the timeout of another."""
    unsorted: dict[str, Any] = {} if ranks == sorted(ranks) else {"sort_ranks": False}
    group = dist.new_group(
        ranks,
        timeout=_timeout(like),
        backend=backend,
        use_local_synchronization=True,
        group_desc="comm_hooks",
        **unsorted,
    )
    assert isinstance(group, dist.ProcessGroup)
    return group


def _ranks_per_node(group: dist.ProcessGroup) -> int | None:
    """Return how many of a group share a node, by ``LOCAL_WORLD_SIZE``, which torchrun sets.

    None if it is not set, or if the group has not equally many consecutive ranks on each node.
    """
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 0))
    if not local_ranks:
        return None
    nodes = [rank // local_ranks for rank in dist.get_process_group_ranks(group)]
    count = nodes.count(nodes[0])
    expected = [node for node in dict.fromkeys(nodes) for _ in range(count)]
    return count if nodes == expected else None


def _timeout(group: dist.ProcessGroup) -> timedelta | None:
    """Return after how long a collective of a group fails; None where torch does not tell."""
    for device in ("cpu", "cuda"):
        try:
            return group._get_backend(torch.device(device)).options._timeout
        except (AttributeError, RuntimeError):
            continue
    return None

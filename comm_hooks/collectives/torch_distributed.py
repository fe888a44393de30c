"""A transport over a ``torch.distributed`` process group."""

import atexit
import os
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import cache, partial
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.constants import default_pg_nccl_timeout

from comm_hooks.collectives.base import Transport, completed
from comm_hooks.collectives.failure_detection import FailureDetector, progress_of
from comm_hooks.collectives.gloo import GlooRanks
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
from comm_hooks.collectives.store import StoreGather
from comm_hooks.collectives.worker import RoundWorker

# The name since torch 2.13; older versions know only the other one.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor

# Threads of gloo take the interpreter's lock to free the tensors of a collective, perhaps after the
# main thread has gone on, and abort the process if the interpreter has ended: they get it at exit.
_let_threads_end_at_exit = cache(partial(atexit.register, time.sleep, 0.1))

# Of all transports of a group, for blocking collectives.
_made_early: Counter[int] = Counter()
_gloo_of: WeakKeyDictionary[dist.ProcessGroup, GlooRanks] = WeakKeyDictionary()


class TorchDistributed(Transport):
    """A transport over a process group, the default one if ``group`` is None.

    Tensors on the CPU, on gloo, are sent by messages between two ranks
    (``comm_hooks.collectives.rings``), over connections of their own: the first exchange makes
    them, collectively, in about 10 ms.  Other tensors use the collectives of ``torch.distributed``.

    Rounds that :meth:`run_async` begins run concurrently with the caller:

    * gloo: a thread runs them, one after the other, over connections of its own
      (:class:`~comm_hooks.collectives.worker.RoundWorker`);
    * accelerators: on a stream of their own; neither the caller nor its stream waits.

    Raises:
        ValueError: if ``torch.distributed`` is not initialized, or this rank is not in the group.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ValueError(
                "torch.distributed is not initialized: call "
                "torch.distributed.init_process_group() before the first exchange"
            )
        if isinstance(group, int):  # torch.distributed.GroupMember.NON_GROUP_MEMBER
            raise ValueError(
                f"rank {dist.get_rank()} is not in the process group: only the ranks that were "
                "given to new_group() can exchange over it"
            )
        world = dist.group.WORLD
        assert world is not None
        self._group = group if group is not None else world
        configured = dist.get_backend_config(self._group).split(",")
        self._backends = dict(pair.split(":") for pair in configured)
        self._is_gloo = self._backends.get("cpu") == "gloo"
        if self._is_gloo:
            _let_threads_end_at_exit()
        self.ranks_per_node = _ranks_per_node(self._group)
        self._parts: dict[Group, dist.ProcessGroup] = {}
        self._worker: RoundWorker | None = None
        self._worker_epoch = -1
        self._epoch_of_step: int | None = None
        self._streams: dict[torch.device, Any] = {}
        store = dist.distributed_c10d._get_default_store()
        timeout = _timeout(self._group) or dist.default_pg_timeout
        # Of each group: others may continue when one has failed.
        self._progress = progress_of(self._group)
        self._begun_in = self._progress.epoch
        of_group = PrefixStore(self._progress.name, store)
        self._failures = FailureDetector(of_group, self._group, timeout)
        self._store_gather = StoreGather(
            of_group, self._group, timeout.total_seconds(), self._failures
        )

    @property
    def made(self) -> Counter[int]:
        return self._progress.made

    @property
    def rank(self) -> int:  # type: ignore[override]  # a constant of other transports
        return self._ask(dist.get_rank)

    @property
    def world_size(self) -> int:  # type: ignore[override]
        return self._ask(dist.get_world_size)

    @property
    def ranks(self) -> Sequence[int]:
        return self._ask(dist.get_process_group_ranks)

    def _ask(self, about: Callable[[dist.ProcessGroup], Result]) -> Result:
        """Return ``about(group)``; raise ``ValueError`` if the process group was destroyed."""
        try:
            return about(self._group)
        except (ValueError, KeyError):
            raise ValueError(
                "the process group that this exchange was made for has been destroyed: save "
                "before destroy_process_group(); make new optimizers and hooks for another group"
            ) from None

    @property
    def _gloo(self) -> GlooRanks:
        found = _gloo_of.get(self._group)
        if found is None or found.is_closed:
            found = _gloo_of[self._group] = self._gloo_ranks()
        return found

    def _gloo_ranks(self) -> GlooRanks:
        """Return a transport among the same ranks over new gloo connections.  Collective."""
        # Unique for this group and moment: the store outlives both.
        names = self._compare(AllGatherObject(uuid.uuid4().hex, about="connections"))
        default_store = dist.distributed_c10d._get_default_store()
        store = PrefixStore(f"comm_hooks {names[0]}", default_store)
        explaining = partial(self._failures.explaining, self.epoch)
        made = GlooRanks(store, self.rank, self.world_size, _timeout(self._group), explaining)
        self._progress.connections.add(made)
        return made

    def perform(self, request: Request) -> Any:
        if isinstance(request, AllGatherObject):
            if request.may_be_alone and not request.group:
                return self._compare(request)
            own = encoded(request.payload).to(self._device)
            return gather_objects(lambda r: self._perform(replace(r, group=request.group)), own)
        return self._perform(request)

    def _compare(self, request: AllGatherObject) -> list[Any]:
        with self._failures.explaining(self.epoch, request):
            return self._store_gather.gather(request, self.epoch)

    def _perform(self, request: Request) -> Any:
        payload = request.payload
        on_cpu = isinstance(payload, torch.Tensor) and payload.device.type == "cpu"
        if self._is_gloo and on_cpu:
            return self._gloo.perform(request)
        group = self._part(request.group)
        with self._failures.explaining(self.epoch, request):
            work, reply = self._issue(request, group)
            work.wait()
            return reply

    @property
    def _device(self) -> torch.device:
        """The device of tensors that the process group can send: the CPU if it is supported."""
        if "cpu" in self._backends:
            return torch.device("cpu")
        kind = next(iter(self._backends))
        return torch.device(kind, torch.get_device_module(kind).current_device())

    def report(self, error: BaseException) -> None:
        self._failures.report(error)

    def run_async(
        self, round_: Round[Result], device: torch.device | None = None
    ) -> torch.futures.Future[Result]:
        if device is not None and device.type != "cpu":
            return self._run_on_stream(round_, device)
        if not self._is_gloo or self.world_size == 1:
            return super().run_async(round_, device)
        self._epoch_of_step = self._begun_in
        try:
            request = next(round_)
            # Comparisons block: the next bucket needs their result.
            while isinstance(request, AllGatherObject):
                request = self.advance(round_, request)
            if self._worker is None or self._worker_epoch != self._begun_in:
                self._worker_ranks, self._worker_epoch = self._gloo_ranks(), self._begun_in
                self._worker = RoundWorker(self._worker_ranks)
            self._worker_ranks.connect(request)
        except StopIteration as stop:
            return completed(stop.value)
        finally:
            self._epoch_of_step = None
        return self._worker.submit(round_, request)

    def begin(self) -> None:
        self._begun_in = self._progress.epoch

    @property
    def epoch(self) -> int:  # type: ignore[override]
        """The epoch of the present step, which a failure in another thread may have ended."""
        return self._progress.epoch if self._epoch_of_step is None else self._epoch_of_step

    def _run_on_stream(
        self, round_: Round[Result], device: torch.device
    ) -> torch.futures.Future[Result]:
        """Queue a whole round on a side stream; readers of the future's value wait for that stream.

        One stream for everything: the memory of a round is then used and freed on the stream that
        it belongs to.  Waiting for a collective blocks that stream only.
        """
        accelerator = torch.get_device_module(device)
        if device not in self._streams:
            self._streams[device] = accelerator.Stream(device)
        side = self._streams[device]
        side.wait_stream(accelerator.current_stream(device))
        with accelerator.stream(side):
            result = self.run(round_)
            if isinstance(result, torch.Tensor):
                # Its stream could reuse the memory too early.
                result.record_stream(side)
            return completed(result)

    def _part(self, part: Group | None) -> dist.ProcessGroup:
        """Return the process group of a subgroup; the first call makes it, collectively."""
        if part is None:
            return self._group
        if part not in self._parts:
            members = part.members(self.rank, self.world_size)
            ranks = [dist.get_global_rank(self._group, member) for member in members]
            backend = dist.get_backend_config(self._group)
            counts = self.perform(AllGatherObject(len(dist.distributed_c10d._world.pg_names)))
            if len(set(counts)) > 1:
                # new_group() would wait for a group of another name.
                raise RuntimeError(
                    "ranks cannot be divided into nodes, because they belong to different numbers "
                    f"of process groups ({counts}): make the exchange before those groups"
                )
            unsorted: dict[str, Any] = {} if ranks == sorted(ranks) else {"sort_ranks": False}
            made = dist.new_group(
                ranks,
                timeout=_timeout(self._group),
                backend=backend,
                use_local_synchronization=True,  # collective among these ranks only
                group_desc="comm_hooks",
                **unsorted,
            )
            assert isinstance(made, dist.ProcessGroup)
            self._parts[part] = made
        return self._parts[part]

    def _issue(self, request: Request, group: dist.ProcessGroup) -> tuple[Any, torch.Tensor]:
        """Begin a collective; return its work handle and the tensor that it will fill."""
        payload, ranks = request.payload, dist.get_world_size(group)
        if isinstance(request, AllReduce):
            return dist.all_reduce(payload, group=group, async_op=True), payload
        if isinstance(request, AllGather):
            reply = payload.new_empty(ranks * payload.numel())
            work = _all_gather_single(reply, payload, group=group, async_op=True)
            return work, reply.view(ranks, -1)
        if isinstance(request, AllToAll):
            reply = torch.empty_like(payload)
            return dist.all_to_all_single(reply, payload, group=group, async_op=True), reply
        raise TypeError(f"no such request: {request}")


def made_in(group: dist.ProcessGroup | None) -> Counter[int]:
    """Return :attr:`TorchDistributed.made` of a group, by default the one that is or will be."""
    found = dist.group.WORLD if group is None else group
    return progress_of(found).made if isinstance(found, dist.ProcessGroup) else _made_early


def _ranks_per_node(group: dist.ProcessGroup) -> int | None:
    """Return the number of ranks of a group per node, from ``LOCAL_WORLD_SIZE`` of torchrun.

    None if it is not set, or if the group does not have equally many consecutive ranks per node.
    """
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 0))
    if not local_ranks:
        return None
    nodes = [rank // local_ranks for rank in dist.get_process_group_ranks(group)]
    count = nodes.count(nodes[0])
    expected = [node for node in dict.fromkeys(nodes) for _ in range(count)]
    return count if nodes == expected else None


def _timeout(group: dist.ProcessGroup) -> timedelta | None:
    """Return the timeout of a process group; None if its backends do not have one.

    A group made without a timeout (by a device mesh, for instance) reports torch's default, even if
    ``init_process_group`` was given another.  In that case return the world group's timeout.
    """
    timeout = _own_timeout(group)
    if timeout in (dist.default_pg_timeout, default_pg_nccl_timeout):
        return _own_timeout(dist.group.WORLD) or timeout
    return timeout


def _own_timeout(group: dist.ProcessGroup | None) -> timedelta | None:
    for device in ("cpu", "cuda"):
        try:
            return group._get_backend(torch.device(device)).options._timeout  # type: ignore
        except (AttributeError, RuntimeError):
            continue
    return None

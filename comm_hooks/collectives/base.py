"""The interface of transports, which carry out the collectives that a round requests."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch

from comm_hooks.collectives.requests import Request, Result, Round
from comm_hooks.profiling import SEND, record_function


class Transport(ABC):
    """One rank's access to a group of ranks: runs the collectives that rounds request.

    Attributes:
        rank: the rank of this process in the group.
        world_size: the number of ranks in the group.
        ranks_per_node: the number of ranks on a node; None if it is unknown or differs.
        epoch: the number of failures of the group so far, the same on all ranks within a step.
    """

    rank: int
    world_size: int
    ranks_per_node: int | None = None
    epoch: int = 0

    @cached_property
    def made(self) -> Counter[int]:
        """The number of exchanges of each kind that this process has made between these ranks."""
        return Counter()

    @property
    def ranks(self) -> Sequence[int]:
        """The global ranks of all members of the group, in the order of their group ranks."""
        return range(self.world_size)

    @property
    def own_name(self) -> int:
        """The global rank of this process."""
        return self.ranks[self.rank]

    @abstractmethod
    def perform(self, request: Request) -> Any:
        """Run a collective, blocking, and return its reply: the result on this rank."""

    def compute_once(
        self, what: str, reply: torch.Tensor, compute: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """Return ``compute()``, which depends only on a reply that is equal on all ranks.

        A transport that simulates several ranks may call ``compute`` once for all of them.

        Args:
            what: the name of the result, because several may be computed from one reply.
        """
        return compute()

    def run(self, round_: Round[Result], request: Request | None = None) -> Result:
        """Run a round, a generator of requests, to its end, blocking, and return its result.

        A round that has begun goes on with the ``request`` that it has yielded.
        """
        try:
            request = request or next(round_)
            while True:
                request = self.advance(round_, request)
        except StopIteration as stop:
            return stop.value

    def advance(self, round_: Round[Result], request: Request) -> Request:
        """Carry out a round's request and return the next request; raise errors inside the round.

        Raises:
            StopIteration: at the end of the round; its value is the round's result.
        """
        try:
            with record_function(SEND):
                reply = self.perform(request)
        except Exception as error:
            return round_.throw(error)
        return round_.send(reply)

    def run_async(
        self, round_: Round[Result], device: torch.device | None = None
    ) -> torch.futures.Future[Result]:
        """Begin a round and return a future of its result; by default run the round, blocking.

        Call :meth:`begin` before the first round of a step.

        Args:
            round_: the round; on an accelerator it must return a tensor.
            device: the device of the round's tensors; None: the CPU.
        """
        return completed(self.run(round_))

    def begin(self) -> None:  # noqa: B027
        """Begin a step: rounds that :meth:`run_async` begins from now on fail together."""

    def report(self, error: BaseException) -> None:
        """Tell the other ranks, which may be waiting, the error that ended a step on this rank.

        Does nothing by default.
        """
        return


def completed(value: Any) -> torch.futures.Future[Any]:
    """Return a future that is already completed, with ``value`` as its result."""
    is_accelerated = isinstance(value, torch.Tensor) and value.device.type != "cpu"
    future: torch.futures.Future[Any] = torch.futures.Future(
        devices=[value.device] if is_accelerated else None
    )
    future.set_result(value)
    return future


def after_all(
    futures: Sequence[torch.futures.Future[Result]], device: torch.device
) -> torch.futures.Future[Result]:
    """Return a future that completes after all rounds, with the result of the last round."""
    if len(futures) == 1 or device.type != "cpu":
        # On an accelerator they are on one stream, one after the other.
        return futures[-1]
    return torch.futures.collect_all(list(futures)).then(
        lambda done: [future.value() for future in done.value()][-1]
    )

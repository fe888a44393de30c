"""What carries requests: a transport."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch

from comm_hooks.collectives.requests import Request, Result, Round
from comm_hooks.profiling import SEND, record_function


class Transport(ABC):
    """One rank's access to a group of ranks."""

    @property
    @abstractmethod
    def rank(self) -> int: ...

    @property
    @abstractmethod
    def world_size(self) -> int: ...

    @property
    def ranks(self) -> Sequence[int]:
        """All ranks in their order, by the numbers under which users know them."""
        return range(self.world_size)

    @property
    def own_name(self) -> int:
        """The number under which users know this rank."""
        return self.ranks[self.rank]

    @property
    def ranks_per_node(self) -> int | None:
        """How many ranks share a node; None if that is not known or differs between nodes."""
        return None

    @abstractmethod
    def perform(self, request: Request) -> Any:
        """Run a collective to its end and return the reply."""

    @abstractmethod
    def start(self, request: Request) -> torch.futures.Future[Any]:
        """Begin a collective; the future holds the reply."""

    def alike(
        self, what: str, reply: torch.Tensor, compute: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        """Return ``compute()``, which follows from a reply that is the same on all ranks.

        A transport that plays several ranks may compute it for one of them.

        Args:
            what: tells apart what is computed from one reply.
        """
        return compute()

    def run(self, round_: Round[Result]) -> Result:
        """Run a round to its end, blocking, and return its result."""
        try:
            request = next(round_)
            while True:
                request = self.advance(round_, request)
        except StopIteration as stop:
            return stop.value

    def advance(self, round_: Round[Result], request: Request) -> Request:
        """Carry out a round's request and return the next one; an error arises inside the round.

        Raises:
            StopIteration: with the result, at the end of the round.
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
        """Run a round up to its final request and return a future of its result.

        Requests before the final one block the caller.  After the final reply only arithmetic is
        left, which runs wherever the future's callback does.

        Args:
            round_: on an accelerator it must return a tensor.
            device: where the tensors of the round are; None: the CPU.
        """
        try:
            request = next(round_)
            while not request.final:
                request = self.advance(round_, request)
        except StopIteration as stop:
            return completed(stop.value)
        with record_function(SEND):
            future = self.start(request)
        return future.then(lambda done: finish(round_, done.value))

    def begin_round(self) -> int:
        """Return the number of a round that begins, by which :meth:`report` tells it apart."""
        return 0

    def report(self, error: BaseException, round_number: int) -> None:
        """Tell the other ranks, who may be waiting for this one, what went wrong in a round.

        Where there is a way to: by default nobody is told.
        """
        return


def finish(round_: Round[Result], reply: Callable[[], Any]) -> Result:
    """Send the final reply, or throw the error that comes instead; return the round's result."""
    try:
        try:
            value = reply()
        except Exception as error:
            round_.throw(error)
        else:
            round_.send(value)
    except StopIteration as stop:
        return stop.value
    raise AssertionError("a round asked for more after its final request")


def completed(value: Any) -> torch.futures.Future[Any]:
    """Return a future that holds ``value`` already."""
    is_accelerated = isinstance(value, torch.Tensor) and value.device.type != "cpu"
    future: torch.futures.Future[Any] = torch.futures.Future(
        devices=[value.device] if is_accelerated else None
    )
    future.set_result(value)
    return future


def after_all(
    futures: Sequence[torch.futures.Future[Result]], device: torch.device
) -> torch.futures.Future[Result]:
    """Return a future of what the last of some rounds returns, when all of them have ended."""
    if len(futures) == 1 or device.type != "cpu":
        # On an accelerator all of them are on one stream, one after the other.
        return futures[-1]
    return torch.futures.collect_all(list(futures)).then(
        lambda done: [future.value() for future in done.value()][-1]
    )

"""Ranks as threads of one process, for code that runs rounds itself.

:class:`~comm_hooks.collectives.Simulated` drives single rounds; an optimizer or a training loop
runs rounds inside.  Here such code runs unchanged, once per rank, in a simulated world.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, Generic

from comm_hooks.collectives.base import Transport
from comm_hooks.collectives.requests import Request, Result, Round
from comm_hooks.collectives.simulated import Simulated


def run_ranks(function: Callable[[Transport], Result], world_size: int) -> list[Result]:
    """Call ``function(transport)`` as each rank of a simulated world; return all results.

    The ranks take turns: in rank order, each runs until it requests a collective or returns.  Only
    one of them runs at any time, so results do not depend on timing, global state (torch's random
    numbers, the warning filters) is used in the same order in every run, and no code needs to be
    thread-safe.  It takes as long as one rank after the other: this is for studies and tests.

    Every rank has a thread of its own, with torch's defaults (gradients enabled, no autocast).

    Args:
        function: receives its rank's transport, for ``Exchange(..., transport=transport)``.
        world_size: the number of ranks.

    Returns:
        The results of the ranks, in rank order.

    Raises:
        RuntimeError: if ranks ask for different collectives, where a real world would hang.
        BaseException: any exception of a rank.  The other ranks end at their collective.

    Not supported: accelerator devices other than the current one of the main thread.

    Example::

        >>> import torch
        >>> from comm_hooks import Exchange, Identity
        >>> from comm_hooks.collectives import run_ranks
        >>> def mean_of_ranks(transport):
        ...     vector = torch.full((2, 2), float(transport.rank))
        ...     Exchange(Identity(), transport=transport).average_({"vector": vector})
        ...     return vector[0, 0].item()
        >>> run_ranks(mean_of_ranks, world_size=3)
        [1.0, 1.0, 1.0]
    """
    world = Simulated(world_size)
    rounds = [_ThreadRank(function, rank, world_size).round() for rank in range(world_size)]
    try:
        return world.run(rounds)
    finally:
        for round_ in rounds:
            round_.close()


class _Ended(BaseException):
    """Raised in a rank's thread, at its next collective, when the simulated world has ended.

    Not an Exception, so that code with an ``except Exception`` does not continue.
    """


class _ThreadRank(Transport, Generic[Result]):
    """One rank in a thread: the transport for its function, and a round for the world."""

    def __init__(self, function: Callable[[Transport], Result], rank: int, world_size: int) -> None:
        self._function = function
        self.rank = rank
        self.world_size = world_size
        # A request, or the end of the rank: a function that returns its result or raises.
        self._said: SimpleQueue[Request | Callable[[], Result]] = SimpleQueue()
        self._replies: SimpleQueue[Any] = SimpleQueue()
        self._has_ended = False

    def perform(self, request: Request) -> Any:
        if not self._has_ended:
            self._said.put(request)
            reply = self._replies.get()
        if self._has_ended:
            raise _Ended
        return reply

    def round(self) -> Round[Result]:
        """Return a round that runs the rank's thread and makes the requests of its function."""
        thread = threading.Thread(
            target=self._live, name=f"rank {self.rank} of {self.world_size}", daemon=True
        )
        thread.start()
        try:
            while True:
                said = self._said.get()
                if not isinstance(said, Request):
                    return said()
                self._replies.put((yield said))
        finally:
            self._has_ended = True
            self._replies.put(None)  # wakes a thread that waits for a reply
            thread.join()

    def _live(self) -> None:
        future: Future[Result] = Future()
        try:
            future.set_result(self._function(self))
        except BaseException as error:
            future.set_exception(error)
        self._said.put(future.result)

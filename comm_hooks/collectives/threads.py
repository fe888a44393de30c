"""Ranks as threads of one process, for code that exchanges by itself.

:class:`~comm_hooks.collectives.Simulated` drives rounds; an optimizer or a training loop makes its
own, deep inside and as many as it likes.  Here such code runs unchanged, once per rank, and what it
asks of the network is passed to a simulated world.
"""

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic

import torch

from comm_hooks.collectives.base import Transport, completed
from comm_hooks.collectives.requests import Request, Result, Round
from comm_hooks.collectives.simulated import Simulated


def run_ranks(function: Callable[[Transport], Result], world_size: int) -> list[Result]:
    """Call ``function(transport)`` as each rank of a simulated world; return all results.

    The ranks take turns: in rank order, each runs until it asks for a collective or returns.  At
    no time does more than one of them run, so results do not depend on timing, what the process
    has only once (torch's random numbers, the warning filters) is used in the same order in every
    run, and nothing needs to be safe against other threads.  Nothing is faster than one rank after
    the other, either: this is for studies and tests.

    Every rank has a thread of its own, with torch's defaults for whatever belongs to a thread
    (gradients enabled, no autocast).

    Args:
        function: gets its rank's transport, for ``Exchange(..., transport=transport)``.
        world_size: how many ranks there are.

    Returns:
        What the ranks returned, in rank order.

    Raises:
        RuntimeError: if ranks ask for different collectives, where a real world would hang.
        BaseException: whatever a rank raises.  The other ranks end with it, at their collective.

    Not supported: accelerator devices other than the current one of the main thread.

    Example::

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
    """Raised at a rank's collective when the world has ended.

    No Exception, so that code which handles those does not go on.
    """


class _ThreadRank(Transport, Generic[Result]):
    """A rank's function, seen by itself as a network and by the world as a round."""

    def __init__(self, function: Callable[[Transport], Result], rank: int, world_size: int) -> None:
        self._function = function
        self._rank = rank
        self._world_size = world_size
        self._said: SimpleQueue[Request | _Returned[Result] | _Raised] = SimpleQueue()
        self._replies: SimpleQueue[Any] = SimpleQueue()
        self._has_ended = False

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def world_size(self) -> int:
        return self._world_size

    def perform(self, request: Request) -> Any:
        if not self._has_ended:
            self._said.put(request)
            reply = self._replies.get()
        if self._has_ended:
            raise _Ended
        return reply

    def start(self, request: Request) -> torch.futures.Future[Any]:
        return completed(self.perform(request))

    def round(self) -> Round[Result]:
        """Let the rank's thread run whenever this generator does."""
        thread = threading.Thread(
            target=self._live, name=f"rank {self._rank} of {self._world_size}", daemon=True
        )
        thread.start()
        try:
            while True:
                said = self._said.get()
                if isinstance(said, _Returned):
                    return said.value
                if isinstance(said, _Raised):
                    raise said.error
                self._replies.put((yield said))
        finally:
            self._has_ended = True
            self._replies.put(None)  # wakes a thread that waits for a reply
            thread.join()

    def _live(self) -> None:
        try:
            self._said.put(_Returned(self._function(self)))
        except BaseException as error:
            self._said.put(_Raised(error))


class _Returned(Generic[Result]):
    def __init__(self, value: Result) -> None:
        self.value = value


class _Raised:
    def __init__(self, error: BaseException) -> None:
        self.error = error

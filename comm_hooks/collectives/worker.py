"""A thread that runs rounds one after the other, concurrently with the caller."""

import os
import threading
import weakref
from queue import SimpleQueue
from typing import Any

import torch

from comm_hooks.collectives.gloo import GlooRanks
from comm_hooks.collectives.requests import Request, Result, Round
from comm_hooks.errors import PeerError

_SECONDS_TO_END = 5.0

# A round, its first request, and the future of its result.
_Job = tuple[Round[Any], Request, torch.futures.Future[Any]]


class RoundWorker:
    """A thread that runs rounds to their end, one after the other, in the order of submission.

    On gloo one thread must issue all collectives of a group, in the same order on all ranks:
    collectives that callbacks issue would be matched with the wrong ones.  So one thread, with a
    group of its own, finishes each round before it begins the next.

    After a round that fails the connections are closed, and later rounds fail: the other ranks may
    wait in the middle of it, and would take the messages of a later round for its own.

    The thread ends with this object, or with the process.  It does not exist after a fork.

    Args:
        transport: a transport that only this thread uses.
    """

    def __init__(self, transport: GlooRanks) -> None:
        self._process = os.getpid()
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        thread = threading.Thread(
            target=_work, args=(self._jobs, transport), name="comm-hooks rounds", daemon=True
        )
        thread.start()
        # At exit, too: while the interpreter finalizes, a daemon thread that takes its lock is
        # killed, and C++ calls abort().
        weakref.finalize(self, _end, self._jobs, thread)

    def submit(self, round_: Round[Result], request: Request) -> torch.futures.Future[Result]:
        """Queue a round that has yielded ``request``; return a future of the round's result.

        Futures are completed by the thread, in the order of the calls.

        Raises:
            RuntimeError: in a process that was forked after this object was made.
        """
        if os.getpid() != self._process:
            raise RuntimeError(
                "this process was forked after an exchange of gradients, so the thread that runs "
                "exchanges is missing: make the process group and the exchange after the fork"
            )
        future: torch.futures.Future[Result] = torch.futures.Future()
        # Only a callback can set an error that C++, and so DDP, can see.
        checked = future.then(lambda done: done.value())
        self._jobs.put((round_, request, future))
        return checked


# Not a method: a thread that held its object would keep it alive forever.
def _work(jobs: "SimpleQueue[_Job | None]", transport: GlooRanks) -> None:
    failure = ""
    # Hooks run with gradients off, too; the mode belongs to a thread.
    with torch.no_grad():
        while job := jobs.get():
            round_, request, future = job
            try:
                if failure:
                    raise PeerError(f"an earlier exchange failed: {failure}")
                result = transport.run(round_, request)
            except Exception as error:
                # Not the exception itself, which holds the round and with it the exchange.
                failure = failure or f"{type(error).__name__}: {error}"
                transport.close()
                future.set_exception(error)
            else:
                future.set_result(result)
            # A finished job must not keep its exchange alive until the next one.
            del job, round_, request, future


def _end(jobs: "SimpleQueue[_Job | None]", thread: threading.Thread) -> None:
    jobs.put(None)
    if thread is not threading.current_thread():
        thread.join(_SECONDS_TO_END)

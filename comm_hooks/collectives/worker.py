"""A thread that carries rounds out one after the other, while the caller goes on."""

import os
import threading
import weakref
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch

from comm_hooks.collectives.base import Transport
from comm_hooks.collectives.requests import Request, Result, Round
from comm_hooks.profiling import SEND, record_function

_SECONDS_TO_END = 5.0


class RoundWorker:
    """Takes rounds from their first request to their end, in the order in which they came.

    On gloo all collectives of a group must be issued by one thread, in an order that is the same
    on all ranks: those of a callback meet the wrong partners.  Rounds of several collectives can
    still go on beside the caller if each of them is finished before the next one begins, by one
    thread whose group nobody else uses.

    A round that fails before its final collective was done leaves the other ranks waiting in the
    middle of it: this rank's later rounds would meet theirs, so all of them fail with it.

    The thread ends with this object, or with the process.  Nothing of it is left after a fork.

    Args:
        transport: used by this thread alone.
    """

    def __init__(self, transport: Transport) -> None:
        self._process = os.getpid()
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        thread = threading.Thread(
            target=_work, args=(self._jobs, transport), name="comm-hooks rounds", daemon=True
        )
        thread.start()
        # At exit, too: a daemon thread that asks for the interpreter lock while the interpreter
        # finalizes is ended by force, which C++ answers with abort().
        weakref.finalize(self, _end, self._jobs, thread)

    def submit(self, round_: Round[Result], request: Request) -> torch.futures.Future[Result]:
        """Go on with a round that has asked for ``request``; return a future of its result.

        Futures are completed by the thread, in the order of the calls.

        Raises:
            RuntimeError: in a process that was forked after this object was made.
        """
        if os.getpid() != self._process:
            raise RuntimeError(
                "this process was forked from one that had exchanged already, and has no thread "
                "to exchange with: make process group and exchange after the fork"
            )
        future: torch.futures.Future[Result] = torch.futures.Future()
        # Only a callback can give a future an error that C++ sees, and DDP with it.
        checked = future.then(lambda done: done.value())
        self._jobs.put(_Job(round_, request, future))
        return checked


@dataclass
class _Job:
    round_: Round[Any]
    request: Request
    future: torch.futures.Future[Any]


class _OutOfStepError(RuntimeError):
    """This rank stopped in the middle of a round, and the others may wait for the rest of it."""


# Not a method: a thread that held its object would keep it alive forever.
def _work(jobs: "SimpleQueue[_Job | None]", transport: Transport) -> None:
    failure = ""
    # What belongs to a thread: hooks run with gradients off, too.
    with torch.no_grad():
        while job := jobs.get():
            try:
                if failure:
                    raise RuntimeError(f"an earlier exchange failed halfway: {failure}")
                result = _finish(job.round_, job.request, transport)
            except _OutOfStepError as error:
                cause = error.__cause__
                assert isinstance(cause, Exception)
                # Not the exception itself, which holds the round and with it the exchange.
                failure = f"{type(cause).__name__}: {cause}"
                job.future.set_exception(cause)
                del cause
            except Exception as error:
                job.future.set_exception(error)
            else:
                job.future.set_result(result)
            # A job that is done must not keep its exchange alive until the next one comes.
            del job


def _finish(round_: Round[Result], request: Request, transport: Transport) -> Result:
    is_in_step = False
    try:
        while True:
            try:
                with record_function(SEND):
                    reply = transport.perform(request)
            except Exception as error:
                request = round_.throw(error)
                continue
            is_in_step = request.final
            request = round_.send(reply)
    except StopIteration as stop:
        return stop.value
    except Exception as error:
        if is_in_step:
            raise
        raise _OutOfStepError from error


def _end(jobs: "SimpleQueue[_Job | None]", thread: threading.Thread) -> None:
    jobs.put(None)
    if thread is not threading.current_thread():
        thread.join(_SECONDS_TO_END)

"""Exchanges that are under way until the end of a backward pass."""

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch

from comm_hooks.profiling import WAIT, record_function


class Pending:
    """Ends a backward pass with the error of an exchange, if there was one, as it was raised.

    An error in the callback of a future is turned into text by C++, and DDP would raise a
    RuntimeError.  So errors are noted where they arise, and at the end of the backward pass, just
    before DDP looks at the futures, the first of them is raised from Python.
    """

    def __init__(self) -> None:
        self._futures: list[torch.futures.Future[Any]] = []
        self._error: Exception | None = None

    def begin(self) -> None:
        """Begin a backward pass."""
        self._futures, self._error = [], None
        # A rank that has left a join() takes part from outside.
        if torch._C._current_graph_task_id() != -1:
            torch.autograd.Variable._execution_engine.queue_callback(self._end)

    @contextmanager
    def noting(self) -> Generator[None]:
        """Note the first exception that leaves this context."""
        try:
            yield
        except Exception as error:
            self._error = self._error or error
            raise

    def add(self, future: torch.futures.Future[Any]) -> None:
        """Wait for a future at the end of the backward pass."""
        self._futures.append(future)

    def _end(self) -> None:
        futures, self._futures = self._futures, []
        try:
            with record_function(WAIT):
                for future in futures:
                    future.wait()
        except Exception:
            error, self._error = self._error, None
            if error is None:
                raise
            raise error from error.__cause__

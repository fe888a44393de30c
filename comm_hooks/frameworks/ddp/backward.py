"""Exchanges that are pending until the end of a backward pass."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch

from comm_hooks.profiling import WAIT, record_function


class PendingExchanges:
    """Waits for exchanges at the end of a backward pass, and raises their first error from Python.

    C++ turns an error in the callback of a future into text, and DDP would raise a RuntimeError.
    """

    def __init__(self) -> None:
        self._finish: Callable[[], None] | None = None
        self._futures: list[torch.futures.Future[Any]] = []
        self._error: Exception | None = None
        self._is_in_pass = False

    def begin(self, finish: Callable[[], None]) -> None:
        """Forget earlier exchanges, and wait for the new ones at the end of this backward pass.

        Args:
            finish: called after all exchanges, before DDP copies its buckets into gradients.
        """
        self._futures, self._error, self._finish = [], None, finish
        # There is no backward pass on a rank that has left a join().
        self._is_in_pass = torch._C._current_graph_task_id() != -1
        if self._is_in_pass:
            torch.autograd.Variable._execution_engine.queue_callback(self._end)

    @contextmanager
    def noting(self) -> Generator[None]:
        """Store the context's first exception, to raise it at the end of the backward pass."""
        try:
            yield
        except Exception as error:
            self._error = self._error or error
            raise

    def add(self, future: torch.futures.Future[Any], *, is_last: bool) -> None:
        """Wait for a future at the end of the backward pass; without one, after the last."""
        self._futures.append(future)
        if is_last and not self._is_in_pass:
            self._end()

    def _end(self) -> None:
        futures, self._futures = self._futures, []
        finish, self._finish = self._finish, None
        try:
            with record_function(WAIT):
                for future in futures:
                    future.wait()
        except Exception:
            error, self._error = self._error, None
            if error is None:
                raise
            raise error from error.__cause__
        if finish is not None:
            finish()

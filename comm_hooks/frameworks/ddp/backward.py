"""Exchanges that are pending until the end of a backward pass."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any

import torch

from comm_hooks.errors import PeerError
from comm_hooks.profiling import WAIT, record_function


class PendingExchanges:
    """Waits for exchanges at the end of a backward pass, and raises their first error from Python.

    An error in a hook, or in a future that DDP waits for, would end the reduction halfway and leave
    DDP unable to begin another one; C++ would make a RuntimeError of it.  So futures complete
    without an error, and the error is raised after DDP has finished.
    """

    def __init__(self) -> None:
        self._finish: Callable[..., None] | None = None
        self._futures: list[torch.futures.Future[Any]] = []
        self._error: Exception | None = None
        self._is_in_pass = False

    @property
    def has_failed(self) -> bool:
        """Whether an exchange of this backward pass has failed."""
        return self._error is not None

    def begin(self, finish: Callable[..., None]) -> None:
        """Forget earlier exchanges, and wait for the new ones at the end of this backward pass.

        Args:
            finish: called after all exchanges with ``has_failed=``, whether one has failed, before
                DDP copies its buckets into gradients.
        """
        self._futures, self._error, self._finish = [], None, finish
        # There is no backward pass on a rank that has left a join().
        self._is_in_pass = torch._C._current_graph_task_id() != -1
        if self._is_in_pass:
            _at_the_end(self._end)

    @contextmanager
    def noting(self) -> Generator[None]:
        """Keep the context's exception, to raise the first one at the end of the backward pass.

        An error of this rank comes before those of its later rounds, which fail because of it.
        """
        try:
            yield
        except PeerError as error:
            self._error = self._error or error
        except Exception as error:
            self._error = error if isinstance(self._error, PeerError | None) else self._error

    def add(self, future: torch.futures.Future[Any], *, is_last: bool) -> None:
        """Wait for a future at the end of the backward pass; without one, after the last."""
        self._futures.append(future)
        if is_last and not self._is_in_pass:
            self._end()
            self._raise()

    def _end(self) -> None:
        futures, self._futures = self._futures, []
        finish, self._finish = self._finish, None
        with self.noting(), record_function(WAIT):
            for future in futures:
                future.wait()
        if finish is not None:
            with self.noting():
                finish(has_failed=self.has_failed)
        if self._is_in_pass and self.has_failed:
            _at_the_end(self._raise)  # after DDP, which has its turn now

    def _raise(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error from error.__cause__


def _at_the_end(call: Callable[[], None]) -> None:
    """Call a function at the end of the backward pass, after those that were given before."""
    torch.autograd.Variable._execution_engine.queue_callback(call)

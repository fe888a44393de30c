"""Methods at which an audit looks on, by the name of what happens in them."""

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar
from unittest import mock

_Method = TypeVar("_Method", bound=Callable[..., Any])

EVENTS: dict[str, Callable[..., Any]] = {}
"""What can be observed of the modules that have been imported: event -> method."""


def observed(event: str) -> Callable[[_Method], _Method]:
    """Mark the method in which something happens.

    The event keeps its name where the method is renamed or moved, and :func:`observing` refuses one
    that is gone.
    """

    def mark(method: _Method) -> _Method:
        EVENTS[event] = method
        return method

    return mark


@contextmanager
def observing(observers: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Observe events in this process for a while.

    Args:
        observers: by event, what is called with the method and its arguments, and returns what the
            method would.

    Raises:
        KeyError: for an event that no imported module has.

    Example::

        >>> from comm_hooks.optim.private.data.poisson import PoissonSampler
        >>> sampler = PoissonSampler(num_samples=10, sample_rate=1.0, steps=3)
        >>> with observing({"draw": lambda method, sampler: list(method(sampler))[1:]}):
        ...     len(sampler.__iter__())
        2
    """
    with ExitStack() as exits:
        for event, observer in observers.items():
            method = EVENTS[event]
            *path, name = method.__qualname__.split(".")
            owner = functools.reduce(getattr, path, sys.modules[method.__module__])
            exits.enter_context(mock.patch.object(owner, name, _around(method, observer)))
        yield


def _around(method: Callable[..., Any], observer: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return observer(method, *args, **kwargs)

    return call

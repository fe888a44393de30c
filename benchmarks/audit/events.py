"""The methods of the library at which an audit observes a training, by qualified name."""

import functools
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

_PRIVATE = "comm_hooks.optim.private"

EVENTS = {
    "training": f"{_PRIVATE}.engine:PrivacyEngine.make_private",
    "participation": f"{_PRIVATE}.engine:PrivacyEngine.private_participation",
    "entry": f"{_PRIVATE}.engine:PrivacyEngine._record",
    "ledger": f"{_PRIVATE}.accounting.ledger:Ledger.__init__",
    "release": f"{_PRIVATE}.noise.mechanism:GaussianMechanism.round",
    "noise": f"{_PRIVATE}.noise.mechanism:GaussianMechanism._add_noise_",
    "draw": f"{_PRIVATE}.data.poisson:PoissonSampler.draw",
    "loader": f"{_PRIVATE}.data.poisson:PoissonLoader.__init__",
    "iteration": f"{_PRIVATE}.data.tickets:Tickets.start",
    "batch": f"{_PRIVATE}.data.tickets:Tickets.issue",
    "step": f"{_PRIVATE}.data.tickets:Tickets.spend",
    "clients": f"{_PRIVATE}.client_level:PrivateParticipation.turns",
    "contribution": f"{_PRIVATE}.client_level:_PrivateCollection.add",
    "clients' release": f"{_PRIVATE}.client_level:_PrivateCollection.finish",
    "client's message": f"{_PRIVATE}.client_level:_ClientGuard.clip_",
    "clients' noise": f"{_PRIVATE}.client_level:_ClientGuard.add_noise_",
    "round": "comm_hooks.optim.rounds.local_rounds:LocalRounds._conclude",
}
"""Event -> ``module:Class.method``.  Rename a method here where it is renamed in the library."""


def find(event: str) -> tuple[type, str]:
    """Return the class that defines an event's method, and the name of the method.

    Raises:
        AttributeError: if the class does not define the method.
    """
    path, name = EVENTS[event].rsplit(".", 1)
    owner = pkgutil.resolve_name(path)
    if name not in vars(owner):
        raise AttributeError(f"{EVENTS[event]} does not exist: update benchmarks/audit/events.py")
    return owner, name


@contextmanager
def observing(observers: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Replace the methods of events by observers in this process, and put them back at the end.

    Args:
        observers: by event, a function of the method and its arguments.  Its return value replaces
            the method's.

    Raises:
        KeyError: for an unknown event.
        AttributeError: if the library has no such method any more.

    Example::

        >>> from comm_hooks.optim.private.data.poisson import PoissonSampler
        >>> sampler = PoissonSampler(num_samples=10, sample_rate=1.0, steps=3)
        >>> with observing({"draw": lambda method, sampler: method(sampler)[1:]}):
        ...     len(sampler.draw())
        9
    """
    with ExitStack() as exits:
        for event, observer in observers.items():
            owner, name = find(event)
            replacement = _around(vars(owner)[name], observer)
            exits.enter_context(mock.patch.object(owner, name, replacement))
        yield


def _around(method: Callable[..., Any], observer: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        return observer(method, *args, **kwargs)

    return call

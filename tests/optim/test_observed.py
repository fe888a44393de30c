"""What can be observed of private training, by name."""

import sys
from pathlib import Path

import pytest

from benchmarks.audit.script.observer import Observer, Variant
from comm_hooks.optim import observed
from comm_hooks.optim.private.data.poisson import PoissonSampler


def test_an_observer_may_change_what_a_method_gets_and_returns() -> None:
    def skip_first(method, sampler):  # type: ignore[no-untyped-def]
        yield from list(method(sampler))[1:]

    sampler = PoissonSampler(10, 0.5, 3)
    with observed.observing({"draw": skip_first}):
        assert len(list(sampler)) == 2
    assert len(list(sampler)) == 3


def test_an_event_that_is_gone_is_refused() -> None:
    unknown = observed.observing({"sample": print})
    with pytest.raises(KeyError, match="sample"), unknown:
        pass


def test_the_audit_observes_every_event(tmp_path: Path) -> None:
    before = {event: _current(event) for event in observed.EVENTS}
    with Observer(tmp_path / "train.py", Variant("as it is"), 1, tmp_path, 0, None).watching():
        assert [event for event, method in before.items() if _current(event) is method] == []
    assert {event: _current(event) for event in observed.EVENTS} == before


def _current(event: str) -> object:
    """Return what is called where an event happens."""
    method = observed.EVENTS[event]
    owner = getattr(sys.modules[method.__module__], method.__qualname__.split(".")[0])
    return vars(owner)[method.__name__]

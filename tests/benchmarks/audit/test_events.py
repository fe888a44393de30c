"""The methods at which the audit observes a training."""

from pathlib import Path

import pytest

from benchmarks.audit import events
from benchmarks.audit.script.observer import Observer, Variant
from comm_hooks.optim.private.data.poisson import PoissonSampler


def test_an_observer_may_change_the_arguments_and_the_result_of_a_method() -> None:
    sampler = PoissonSampler(10, 1.0, 3)
    with events.observing({"draw": lambda method, sampler: method(sampler)[1:]}):
        assert [len(indices) for indices in sampler] == [9, 9, 9]
    assert [len(indices) for indices in sampler] == [10, 10, 10]


@pytest.mark.parametrize("event", events.EVENTS)
def test_the_method_of_an_event_exists_and_is_named_once(event: str) -> None:
    owner, name = events.find(event)
    method = vars(owner)[name]
    assert f"{method.__module__}:{method.__qualname__}" == events.EVENTS[event]


def test_a_renamed_method_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(events.EVENTS, "draw", events.EVENTS["draw"] + "ings")
    with pytest.raises(AttributeError, match=r"PoissonSampler\.drawings does not exist"):
        events.find("draw")


def test_an_unknown_event_is_refused() -> None:
    with pytest.raises(KeyError, match="sample"), events.observing({"sample": print}):
        pass


def test_the_audit_observes_every_event(tmp_path: Path) -> None:
    before = {event: _current(event) for event in events.EVENTS}
    with Observer(tmp_path / "train.py", Variant("as it is"), 1, tmp_path, 0, None).watching():
        assert [event for event, method in before.items() if _current(event) is method] == []
    assert {event: _current(event) for event in events.EVENTS} == before


def _current(event: str) -> object:
    """Return the function that is called where an event happens."""
    owner, name = events.find(event)
    return vars(owner)[name]

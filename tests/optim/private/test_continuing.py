"""What private training may go on from: states of private training whose releases are counted."""

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from comm_hooks import ErrorFeedback, Exchange, RandomK, TopK
from comm_hooks.collectives import run_ranks
from comm_hooks.collectives.base import Transport
from comm_hooks.collectives.simulated import Simulated
from comm_hooks.optim.private import DPAdamBC, DPMicroAdam, PrivacyEngine, PrivacyError
from comm_hooks.optim.private.accounting import GaussianEvent
from comm_hooks.optim.private.accounting.ledger import Ledger
from comm_hooks.optim.private.accounting.releases import Releases, saved_history
from comm_hooks.optim.private.noise.mechanism import GaussianMechanism
from tests.optim.private.saving import saved
from tests.optim.private.test_engine import private, small_model, take_steps

pytestmark = [
    pytest.mark.filterwarnings("ignore:world size is 1"),
    pytest.mark.filterwarnings("ignore:.*steps that the checkpoint does not"),
]

NOT_PRIVATE = "the state was not saved by private training"
UNCOUNTED = "and the ledger has only"


def sparse() -> Exchange:
    transport = Simulated(1)[0]
    return Exchange(TopK(density=1 / 16), ErrorFeedback(), min_numel=1, transport=transport)


def trained(steps: int = 4, **settings: Any) -> Any:
    engine, exchange = PrivacyEngine(), sparse()
    model = small_model()
    settings = {"placement": "local", "exchange": exchange, **settings}
    _, optimizer, loader = private(engine, model, torch.optim.Adam, **settings)
    take_steps(optimizer, loader, steps)
    return engine, exchange, optimizer, loader


def counts(releases: Any) -> list[tuple[str, float, int]]:
    """Return the steps by placement and noise, of all runs."""
    steps: Counter[tuple[str, float]] = Counter()
    for event in releases["events"]:
        steps[event["placement"], event["noise_multiplier"]] += event["steps"]
    return [(*kind, count) for kind, count in steps.items()]


def test_residuals_of_ordinary_gradients_are_refused() -> None:
    ordinary = sparse()
    ordinary.average_({"0.weight": 1e3 * torch.randn(48, 40)})
    _, exchange, _, _ = trained()
    before = saved(exchange.state_dict())
    for load in (exchange.load_state_dict, lambda state: exchange.load_state_dicts([state])):
        with pytest.raises(PrivacyError, match=NOT_PRIVATE):
            load(ordinary.state_dict())
    assert exchange.state_dict()["seal"] == before["seal"], "nothing has changed"


def test_nor_can_the_mark_be_taken_from_another_state() -> None:
    _, exchange, _, _ = trained()
    ordinary = sparse()
    ordinary.average_({"0.weight": 1e3 * torch.randn(48, 40)})
    forged = {**ordinary.state_dict(), "provenance": exchange.state_dict()["provenance"]}
    with pytest.raises(ValueError, match="does not match its digest"):
        exchange.load_state_dict(forged)


@pytest.mark.parametrize("make", [torch.optim.Adam, torch.optim.SGD])
def test_moments_of_ordinary_gradients_are_refused(make: Any) -> None:
    model = small_model()
    plain = make(model.parameters(), lr=0.1)
    model(torch.randn(8, 40)).square().mean().backward()
    plain.step()
    _, optimizer, _ = private(PrivacyEngine(), small_model(), make)
    with pytest.raises(PrivacyError, match=f"{NOT_PRIVATE}.*optimizer.inner"):
        optimizer.load_state_dict(plain.state_dict())
    optimizer.inner.load_state_dict(plain.state_dict())


def test_an_optimizer_that_has_stepped_is_refused() -> None:
    model = small_model()
    plain = torch.optim.Adam(model.parameters(), lr=0.1)
    model(torch.randn(8, 40)).square().mean().backward()
    plain.step()
    with pytest.raises(PrivacyError, match="this Adam has taken steps"):
        private(PrivacyEngine(), model, optimizer=plain)
    # These have a state before they have taken any.
    private(PrivacyEngine(), small_model(), torch.optim.Adagrad)


def test_an_optimizer_may_go_from_one_stage_of_private_training_to_the_next() -> None:
    engine, model = PrivacyEngine(), small_model()
    _, first, loader = private(engine, model, torch.optim.Adam)
    take_steps(first, loader, 3)
    _, second, loader = private(
        engine, model, optimizer=first.inner, sample_rate=0.5, noise_multiplier=2.0
    )
    take_steps(second, loader, 2)
    assert counts(second.state_dict()["releases"]) == [("central", 1.0, 3), ("central", 2.0, 2)]


@pytest.mark.parametrize("part", ["exchange", "optimizer"])
def test_a_run_that_goes_on_without_its_ledger_is_refused(part: str) -> None:
    before, exchange, optimizer, _ = trained()
    states = {"exchange": exchange.state_dict(), "optimizer": optimizer.state_dict()}
    engine, exchange, optimizer, loader = trained(steps=0)
    {"exchange": exchange, "optimizer": optimizer}[part].load_state_dict(saved(states[part]))
    with pytest.raises(PrivacyError, match=f"placement 'local', {UNCOUNTED} 0"):
        take_steps(optimizer, loader, 1)
    optimizer.zero_grad()
    with pytest.warns(UserWarning, match="lacks 4 steps"):
        engine.load_state_dict(before.state_dict())
    take_steps(optimizer, loader, 1)
    assert sum(event.steps for event in engine._history()) == 5


@pytest.mark.parametrize("make", [torch.optim.Adam, DPAdamBC, DPMicroAdam])
def test_a_run_with_its_ledger_goes_on_from_any_checkpoint(tmp_path: Path, make: Any) -> None:
    ledger = tmp_path / "ledger.jsonl"
    engine = PrivacyEngine(ledger=ledger)
    _, optimizer, loader = private(engine, small_model(), make)
    take_steps(optimizer, loader, 3)
    checkpoint = saved(
        {"optimizer": optimizer.state_dict(), "exchange": optimizer.mechanism.exchange.state_dict()}
    )
    take_steps(optimizer, loader, 2)  # which are lost
    engine.change(optimizer, noise_multiplier=2.0)
    take_steps(optimizer, loader, 1)
    engine._opened().close()
    for _ in range(2):
        engine = PrivacyEngine(ledger=ledger)
        _, optimizer, loader = private(engine, small_model(), make)
        optimizer.load_state_dict(checkpoint["optimizer"])
        optimizer.mechanism.exchange.load_state_dict(checkpoint["exchange"])
        take_steps(optimizer, loader, 1)
        assert counts(optimizer.state_dict()["releases"]) == [("central", 1.0, 4)]
        engine._opened().close()


def test_residuals_stay_with_their_placement_and_moments_need_not() -> None:
    before, exchange, optimizer, _ = trained()
    state = optimizer.state_dict()
    engine, model = PrivacyEngine(), small_model()
    central = sparse()
    _, optimizer, loader = private(engine, model, torch.optim.Adam, exchange=central)
    with pytest.raises(PrivacyError, match="placement 'local', and the present one is 'central'"):
        central.load_state_dict(exchange.state_dict())
    optimizer.load_state_dict(state)
    with pytest.warns(UserWarning, match="lacks 4 steps"):
        engine.load_state_dict(before.state_dict())
    take_steps(optimizer, loader, 1)


def test_what_may_be_published_has_no_history_and_goes_into_the_inner_optimizer() -> None:
    _, _, optimizer, _ = trained()
    released = optimizer.release_state_dict()
    assert released.keys() == {"state", "param_groups"}
    _, _, other, _ = trained(steps=0)
    with pytest.raises(PrivacyError, match=NOT_PRIVATE):
        other.load_state_dict(released)
    other.inner.load_state_dict(released)


@pytest.mark.parametrize(
    "found",
    [
        {},
        [],
        {"events": 3},
        {"events": [{"noise_multiplier": 1.0}]},
        {"events": [{"noise_multiplier": "x", "sample_rate": 0.1}]},
        {"events": [{"noise_multiplier": 1.0, "sample_rate": 0.1, "run": 3}]},
    ],
)
def test_what_no_run_can_have_saved(found: Any) -> None:
    with pytest.raises(ValueError, match=r"releases in a saved state|GaussianEvent"):
        Releases().check(found)


def ledger_of(*events: GaussianEvent, run: str = "run") -> Ledger:
    ledger = Ledger(None, run=run)
    for event in events:
        ledger.record(event)
    return ledger


def test_the_larger_count_of_an_event_must_be_in_the_ledger() -> None:
    event = GaussianEvent(1.0, 0.1, placement="local")
    other = GaussianEvent(2.0, 0.5, placement="local")
    releases = Releases()
    for _ in range(5):
        releases.enter(event, "run")
        releases.add("local", 1.0)
    releases.adopt(saved_history(replace(e, run="run") for e in (replace(event, steps=3), other)))
    assert releases.steps == {replace(event, run="run"): 5, replace(other, run="run"): 1}
    with pytest.raises(PrivacyError, match=UNCOUNTED):
        releases.require_counted(ledger_of(replace(event, steps=5)))
    releases.require_counted(ledger_of(replace(event, steps=5), other))


def test_a_release_without_a_ledger_counts_as_one_of_every_sample() -> None:
    releases = Releases()
    releases.add("local", 1.0)
    assert [*releases.steps] == [GaussianEvent(1.0, 1.0, placement="local")]


@pytest.mark.parametrize(
    "settings",
    [
        {"sample_rate": 0.05},
        {"noise_multiplier": 3.0},
        {"placement": "central"},
        {},  # a run with the same settings
    ],
)
@pytest.mark.parametrize("part", ["exchange", "optimizer"])
def test_the_ledger_of_another_run_does_not_stand_for_a_states_own(
    part: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    path = tmp_path / "ledger.jsonl"
    other = PrivacyEngine(ledger=path)
    _, optimizer, loader = private(
        other, small_model(), torch.optim.Adam, **{"placement": "local", **settings}
    )
    take_steps(optimizer, loader, 4)
    other._opened().close()
    _, exchange, optimizer, _ = trained()
    state = saved({"exchange": exchange, "optimizer": optimizer}[part].state_dict())
    engine, exchange, model = PrivacyEngine(ledger=path), sparse(), small_model()
    _, optimizer, loader = private(
        engine, model, torch.optim.Adam, exchange=exchange, placement="local"
    )
    {"exchange": exchange, "optimizer": optimizer}[part].load_state_dict(state)
    with pytest.raises(PrivacyError, match="a state that was loaded, comes from"):
        take_steps(optimizer, loader, 1)


def test_an_optimizer_of_another_engine_brings_its_releases() -> None:
    first, model = PrivacyEngine(), small_model()
    _, optimizer, loader = private(first, model, torch.optim.Adam)
    take_steps(optimizer, loader, 3)
    second = PrivacyEngine()
    _, optimizer, loader = private(second, model, optimizer=optimizer.inner)
    with pytest.raises(PrivacyError, match="a state that was loaded, comes from 3 releases"):
        take_steps(optimizer, loader, 1)
    optimizer.zero_grad()
    with pytest.warns(UserWarning, match="lacks 3 steps"):
        second.load_state_dict(first.state_dict())
    take_steps(optimizer, loader, 1)


@pytest.mark.filterwarnings("ignore:the ledger in memory lacks 3 steps")
def test_ranks_go_on_on_another_number_of_ranks() -> None:
    states = run_ranks(saved_on_rank, 3)
    assert (
        run_ranks(lambda transport: goes_on_on_rank(transport, saved(states)), 2)
        == [[("central", 1.0, 4)]] * 2
    )


def on_rank(transport: Transport) -> Any:
    exchange = Exchange(
        TopK(density=1 / 16),
        ErrorFeedback(),
        min_numel=1,
        collective="sharded",
        transport=transport,
    )
    engine, model = PrivacyEngine(), small_model()
    _, optimizer, loader = private(engine, model, torch.optim.Adam, exchange=exchange)
    return engine, exchange, optimizer, loader


def saved_on_rank(transport: Transport) -> Any:
    engine, exchange, optimizer, loader = on_rank(transport)
    take_steps(optimizer, loader, 3)
    return engine.state_dict(), optimizer.state_dict(), exchange.state_dict()


def goes_on_on_rank(transport: Transport, states: Any) -> Any:
    engine, exchange, optimizer, loader = on_rank(transport)
    engine.load_state_dict(states[0][0])
    optimizer.load_state_dict(states[0][1])
    exchange.load_state_dicts([state[2] for state in states])
    take_steps(optimizer, loader, 1)
    return counts(exchange.state_dict()["provenance"])


PLACES = {
    "central": TopK(density=0.25),
    "local": TopK(density=0.25),
    "shares": RandomK(density=0.25, unbiased=False),
}


@given(st.sampled_from([*PLACES]), st.integers(1, 4), st.integers(1, 4), st.integers(1, 6))
@example("central", 2, 3, 6)
@settings(max_examples=3)
def test_what_had_not_been_sent_is_sent_by_other_ranks(
    place: str, before: int, after: int, steps: int
) -> None:
    """With hardly any noise: a sum of C per step, on rank 0 alone, and then only a little more."""
    shape = 15, 7
    once, then = torch.randn(shape), 1e-6 * torch.ones(shape)
    once /= once.norm()

    def release(ranks: int, sums: torch.Tensor, count: int, states: Any) -> Any:
        def run(transport: Transport) -> Any:
            exchange = Exchange(PLACES[place], ErrorFeedback(), min_numel=1, transport=transport)
            mechanism = GaussianMechanism(
                exchange,
                place=place,  # type: ignore[arg-type]
                noise_multiplier=1e-9,
                max_grad_norm=1.0,
                expected_batch_size=1.0,
            )
            if states:
                exchange.load_state_dicts(states)
            own = sums if transport.rank == 0 else torch.zeros(shape)
            means = [
                mechanism.release({"w": own.clone()}).tensors["w"].clone() for _ in range(count)
            ]
            return torch.stack(means).sum(dim=0), exchange.state_dict()

        results = run_ranks(run, ranks)
        return results[0][0], [saved(state) for _, state in results]

    sent, states = release(before, once, steps, None)
    rest, _ = release(after, then, 50, states)
    torch.testing.assert_close(sent + rest, steps * once + 50 * then, rtol=1e-3, atol=2e-4)

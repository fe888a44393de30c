"""More clients than ranks: against a NumPy reference, and whatever an absent client must keep."""

import io
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from comm_hooks import CountSketch, ErrorFeedback, Exchange, Identity, PayloadError, TopK
from comm_hooks.collectives import Simulated
from comm_hooks.compressors import Compressor
from comm_hooks.optim import FedAMS, FedAvg, FedLAMB
from comm_hooks.optim.rounds import LocalRounds, Participation
from tests.optim.rounds.problem import (
    SHAPES,
    Arrays,
    Client,
    gradient,
    largest,
    make_parameters,
    set_gradients,
    start,
    values,
)
from tests.optim.scenarios import RanksOf, rarely

CLIENTS, ROUNDS, K = 7, 10, 3
LR, MOMENTUM = 0.05, 0.5
PARTICIPATION = Participation(clients=CLIENTS, fraction=0.5, seed=1)


def make(
    compressor: Compressor, client_state: str = "keep"
) -> tuple[dict[str, nn.Parameter], LocalRounds]:
    parameters = make_parameters()
    memory = ErrorFeedback() if isinstance(compressor, TopK) else None
    collective: Any = "all_gather" if memory else "auto"
    exchange = Exchange(compressor, memory, collective, min_numel=16)
    inner = torch.optim.SGD(parameters.items(), lr=LR, momentum=MOMENTUM)
    rounds = LocalRounds(inner, exchange, participation=PARTICIPATION, client_state=client_state)
    return parameters, rounds


def play(parameters: dict[str, nn.Parameter], rounds: LocalRounds, count: int) -> list[list[int]]:
    played = []
    for _ in range(count):
        index = rounds.round_index
        turn = []
        for client in rounds.clients():
            turn.append(client)
            for k in range(K):
                set_gradients(parameters, index * K + k, client)
                rounds.step()
        played.append(turn)
    return played


def train(compressor: Compressor, client_state: str) -> tuple[Arrays, list[list[int]]]:
    parameters, rounds = make(compressor, client_state)
    played = play(parameters, rounds, ROUNDS)
    return values(parameters), played


def reference(compress: Callable[[np.ndarray], np.ndarray] | None, keep: bool) -> Arrays:
    shared = start()
    clients = [Client() for _ in range(CLIENTS)]
    for index in range(ROUNDS):
        drawn = PARTICIPATION.draw(index)
        sent: dict[str, list[np.ndarray]] = {n: [] for n in SHAPES}
        for number in drawn:
            client = clients[number]
            if not keep:
                client.state = {n: np.zeros(s) for n, s in SHAPES.items()}
            for name in SHAPES:
                x = shared[name]
                for k in range(K):
                    g = gradient(name, index * K + k, number, x)
                    client.state[name] = MOMENTUM * client.state[name] + g
                    x = x - LR * client.state[name]
                sent[name].append(client.message(name, shared[name] - x, compress))
        shared = {n: shared[n] - np.mean(sent[n], axis=0) for n in SHAPES}
    return shared


@pytest.mark.parametrize("ranks", [3, *rarely(1, 2)])
@pytest.mark.parametrize("client_state", ["keep", "reset"])
@pytest.mark.parametrize(
    ("compressor", "compress"),
    [(TopK(density=0.05, value_bits=32), largest), *rarely((Identity(), None))],
    ids=["topk", "identity"],
)
@pytest.mark.filterwarnings("ignore:world size is 1")
def test_matches_the_reference_on_any_number_of_ranks(
    ranks_of: RanksOf,
    compressor: Compressor,
    compress: Callable[[np.ndarray], np.ndarray] | None,
    client_state: str,
    ranks: int,
) -> None:
    outcomes = ranks_of(ranks).run(train, compressor, client_state)
    expected = reference(compress, client_state == "keep")
    for parameters, _ in outcomes:
        for name in SHAPES:
            assert np.array_equal(parameters[name], outcomes[0][0][name]), "replicas must agree"
            np.testing.assert_allclose(parameters[name], expected[name], atol=2e-5)
    everybody = [
        sorted(client for turn in turns for client in turn)
        for turns in zip(*(played for _, played in outcomes), strict=True)
    ]
    assert everybody == [PARTICIPATION.draw(r) for r in range(ROUNDS)]


def sketch_once() -> tuple[Arrays, int, Arrays]:
    """Return the model after a round of sketches, the exchanges made, and sketches by hand."""
    parameters, rounds = make(CountSketch(ratio=0.25))
    before, exchange = values(parameters), rounds.exchange
    play(parameters, rounds, 1)
    total = np.zeros(SHAPES["weight"])
    for number in PARTICIPATION.draw(0):
        x, m = before["weight"].astype(float), 0.0
        for k in range(K):
            m = MOMENTUM * m + gradient("weight", k, number, x)
            x = x - LR * m
        total += before["weight"] - x
    mean = torch.from_numpy(total / len(PARTICIPATION.draw(0))).float()
    by_hand = {"weight": mean}
    exchange.step = 0
    exchange.average_(by_hand)
    exchange.step -= 1
    return (
        values(parameters),
        exchange.step,
        {"weight": before["weight"] - by_hand["weight"].numpy()},
    )


def test_all_clients_of_a_round_share_one_sketch(ranks_of: RanksOf) -> None:
    for after, exchanges, expected in ranks_of(2).run(sketch_once):
        assert exchanges == 0  # the first of both
        np.testing.assert_allclose(after["weight"], expected["weight"], atol=1e-5)


def fail_one(compressor: Compressor) -> tuple[list[str], Arrays, Arrays]:
    """Return the warnings and the model after a round in which one client fails, and without it."""
    parameters, rounds = make(compressor)
    failing = PARTICIPATION.draw(0)[1]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for client in rounds.clients():
            for k in range(K):
                set_gradients(parameters, k, client)
                if client == failing:
                    parameters["bias"].grad = torch.full((9,), float("inf"))
                rounds.step()
    expected = {}
    for name in SHAPES:
        deltas = []
        for number in PARTICIPATION.draw(0):
            x = start()[name]
            m = np.zeros_like(x)
            for k in range(K):
                m = MOMENTUM * m + gradient(name, k, number, x)
                x = x - LR * m
            if number != failing:
                deltas.append(Client().message(name, start()[name] - x, None))
        expected[name] = start()[name] - np.mean(deltas, axis=0)
    after = values(parameters)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="round .* left out")
        play(parameters, rounds, 5)  # it is drawn again and well
    assert any(failing in PARTICIPATION.draw(r) for r in range(1, 6))
    return [str(w.message) for w in caught], after, expected


def test_a_client_that_fails_is_named_and_the_others_are_averaged(ranks_of: RanksOf) -> None:
    failing = PARTICIPATION.draw(0)[1]
    for reports, parameters, expected in ranks_of(2).run(fail_one, Identity()):
        (report,) = [r for r in reports if "left out" in r]
        assert f"client {failing}; the mean is over the other 3 of 4" in report
        for name in SHAPES:
            np.testing.assert_allclose(parameters[name], expected[name], atol=2e-5)


def stale() -> bool:
    """Residuals of clients that are absent do not change, and come back with them."""
    parameters, rounds = make(TopK(density=0.05))
    for index in range(6):
        before = rounds.state_dict()["rounds"]["private"]["clients"]
        play(parameters, rounds, 1)
        after = rounds.state_dict()["rounds"]["private"]["clients"]
        for client, saved in before.items():
            same = torch.equal(saved["memory"]["weight"], after[client]["memory"]["weight"])
            assert same == (client not in PARTICIPATION.draw(index))
    return set(after) == {
        c for r in range(6) for c in PARTICIPATION.draw(r) if c % 2 == dist.get_rank()
    }


def test_residuals_of_absent_clients_are_kept(ranks_of: RanksOf) -> None:
    assert ranks_of(2).run(stale) == [True, True]


def resume() -> bool:
    parameters, rounds = make(TopK(density=0.05))
    play(parameters, rounds, 4)
    file = io.BytesIO()
    torch.save(rounds.state_dict(), file)
    play(parameters, rounds, 4)
    expected = values(parameters)
    file.seek(0)
    parameters, rounds = make(TopK(density=0.05))
    rounds.load_state_dict(torch.load(file, weights_only=True))
    play(parameters, rounds, 4)
    return all(np.array_equal(expected[n], x) for n, x in values(parameters).items())


def test_a_resumed_run_ends_as_one_that_was_not_interrupted(ranks_of: RanksOf) -> None:
    assert ranks_of(2).run(resume) == [True, True]


def told_after_loading(writes: bool) -> list[str]:
    parameters, rounds = make(TopK(density=0.05))
    play(parameters, rounds, 2)
    state = rounds.state_dict()
    parameters, rounds = make(TopK(density=0.05))
    rounds.load_state_dict(state)
    if writes:
        with torch.no_grad():
            next(iter(parameters.values())).zero_()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        play(parameters, rounds, 2)
    return [str(each.message) for each in caught if "written to" in str(each.message)]


@pytest.mark.parametrize("writes", [False, True])
def test_a_model_that_is_loaded_after_the_rounds_is_told_of(
    ranks_of: RanksOf, writes: bool
) -> None:
    """Each client begins at the rounds' model; to put it there is no write of anybody else."""
    for told in ranks_of(2).run(told_after_loading, writes):
        assert len(told) == writes


KINDS: dict[str, Callable[..., LocalRounds]] = {
    "fed_ams": FedAMS,
    "fed_lamb": FedLAMB,
    "local_rounds": lambda params, exchange, **options: LocalRounds(
        torch.optim.AdamW(params), exchange, **options
    ),
}


def with_gradients_of(kind: str, value: float, has_clients: bool) -> tuple[Arrays, int, list[str]]:
    """Let one client of a round, or one rank, have such gradients, and then nobody any more."""
    parameters = make_parameters()
    options = {"participation": PARTICIPATION} if has_clients else {"local_steps": K}
    rounds = KINDS[kind](parameters.items(), Exchange(Identity()), **options)
    failing = PARTICIPATION.draw(0)[1] if has_clients else 1

    def work(client: int, index: int) -> None:
        for k in range(K):
            set_gradients(parameters, k, client)
            if client == failing and index == 0:
                for parameter in parameters.values():
                    parameter.grad = torch.full_like(parameter, value)
            rounds.step()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for index in range(3):
            if has_clients:
                for client in rounds.clients():
                    work(client, index)
            else:
                work(dist.get_rank(), index)
    said = [str(w.message) for w in caught if "left out" in str(w.message)]
    return values(parameters), rounds.round_index, said


@pytest.mark.parametrize("has_clients", [False, True])
@pytest.mark.parametrize("value", [1e19, float("nan"), *rarely(1e11, float("inf"))], ids=str)
@pytest.mark.parametrize("kind", ["fed_lamb", *rarely("fed_ams", "local_rounds")])
def test_one_clients_gradients_do_not_spoil_the_model(
    kind: str, value: float, has_clients: bool, ranks_of: RanksOf
) -> None:
    """Neither by its delta nor by its second moments, whose squares overflow sooner."""
    results = ranks_of(2).run(with_gradients_of, kind, value, has_clients)
    for model, round_index, said in results:
        assert round_index == 3
        for name, initial in start().items():
            assert np.isfinite(model[name]).all()
            assert not np.array_equal(model[name], initial)
            assert np.array_equal(model[name], results[0][0][name])
        if kind != "local_rounds" or not np.isfinite(value):
            assert len(said) == 1


def accumulated(left: int | None) -> tuple[Arrays, list[str]]:
    """Let clients accumulate over two batches; one has a third, of which no step is taken."""
    parameters, rounds = make(Identity())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for client in rounds.clients():
            for k in range(3 if client == left else 2):
                loss = sum(((k + client + 1) * p).sum() for p in parameters.values())
                assert isinstance(loss, torch.Tensor)
                loss.backward()
                if k % 2:
                    rounds.step()
                    rounds.zero_grad()
    return values(parameters), [str(w.message) for w in caught if "client" in str(w.message)]


def test_what_a_client_has_accumulated_is_not_the_next_ones(ranks_of: RanksOf) -> None:
    [(expected, nothing)] = ranks_of(1).run(accumulated, None)
    [(model, said)] = ranks_of(1).run(accumulated, PARTICIPATION.draw(0)[0])
    assert not nothing
    assert len(said) == 1
    assert f"client {PARTICIPATION.draw(0)[0]} leaves gradients" in said[0]
    assert all(np.array_equal(model[name], expected[name]) for name in expected)


def leave_in_the_second_turn(parameters: dict[str, nn.Parameter], rounds: LocalRounds) -> None:
    for turn, client in enumerate(rounds.clients()):
        with pytest.raises(ValueError, match="in the middle of a round of clients"):
            rounds.state_dict()
        set_gradients(parameters, 3 * K, client)
        rounds.step()
        if turn == 1:
            return


def left_early() -> None:
    parameters, rounds = make(TopK(density=0.05))
    play(parameters, rounds, 3)
    clients = rounds.state_dict()["rounds"]["private"]["clients"]
    before = values(parameters)
    with pytest.warns(UserWarning, match="round 3 of clients was left before its end"):
        leave_in_the_second_turn(parameters, rounds)
    for name, value in values(parameters).items():
        assert np.array_equal(value, before[name])
    again = rounds.state_dict()["rounds"]["private"]["clients"]
    assert again.keys() == clients.keys()
    for client, saved in clients.items():
        for name, row in saved["memory"].items():
            assert torch.equal(again[client]["memory"][name], row)
        for place, state in saved["inner"].items():
            for name, value in state.items():
                assert torch.equal(again[client]["inner"][place][name], value)
    assert not rounds.round_state.model.is_written_to, "they have written themselves"
    play(parameters, rounds, 1)
    assert rounds.round_index == 4


def test_a_round_that_is_left_early_leaves_clients_as_they_were(ranks_of: RanksOf) -> None:
    ranks_of(2).run(left_early)


def rolled_back(client_state: str) -> None:
    """Go back to one snapshot twice: it is of the moment at which it was taken."""
    parameters, rounds = make(TopK(density=0.05), client_state)
    play(parameters, rounds, 2)
    snapshot = rounds.state_dict()
    ends = []
    for _ in range(3):
        play(parameters, rounds, 2)
        ends.append(values(parameters))
        rounds.load_state_dict(snapshot)
    for end in ends[1:]:
        for name, value in end.items():
            assert np.array_equal(value, ends[0][name])


@pytest.mark.parametrize("client_state", ["keep", *rarely("reset")])
def test_a_snapshot_may_be_loaded_again_and_again(ranks_of: RanksOf, client_state: str) -> None:
    ranks_of(2).run(rolled_back, client_state)


def weighted(compressor: Compressor, left_out: int | None) -> list[np.ndarray]:
    """Train clients of three sizes, one of them without data or left out in the middle."""
    sizes = [10.0, 30.0, 0.0, 20.0] if left_out is None else [10.0, 30.0, 5.0, 20.0]
    parameters = make_parameters()
    linear = compressor == Identity()
    memory = None if linear else ErrorFeedback()
    collective: Any = "auto" if linear else "all_gather"
    exchange = Exchange(compressor, memory, collective, min_numel=16)
    inner = torch.optim.SGD(parameters.items(), lr=LR, momentum=MOMENTUM)
    participation = Participation(clients=len(sizes), weights=sizes)
    rounds = LocalRounds(inner, exchange, participation=participation)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for index in range(3):
            for client in rounds.clients():
                for k in range(K):
                    set_gradients(parameters, index * K + k, client)
                    rounds.step()
                    if client == left_out and k == 1:
                        rounds.leave_out(client)
                        break
    return [*values(parameters).values()]


@pytest.mark.parametrize("compressor", [Identity(), TopK(density=1.0, value_bits=32)], ids=str)
@pytest.mark.filterwarnings("ignore:world size is 1")
def test_a_client_that_is_left_out_counts_as_one_without_weight(
    ranks_of: RanksOf, compressor: Compressor
) -> None:
    without = ranks_of(2).run(weighted, compressor, None)
    left_out = ranks_of(2).run(weighted, compressor, 2)
    alone = ranks_of(1).run(weighted, Identity(), None)
    for mine, other in itertools.product([*without, *left_out], alone):
        for value, expected in zip(mine, other, strict=True):
            np.testing.assert_allclose(value, expected, atol=2e-5)


def scheduled(within: bool) -> list[float]:
    """Return the rates of this rank's steps; three of five clients take part in a round."""
    parameters = make_parameters()
    draw = Participation(clients=5, fraction=0.6, seed=1)
    rounds = FedAvg(parameters.items(), Exchange(Identity()), lr=1.0, participation=draw)
    schedule = torch.optim.lr_scheduler.StepLR(rounds, 1, gamma=0.5)
    rates = []
    for index in range(4):
        for client in rounds.clients():
            set_gradients(parameters, index, client)
            rounds.step()
            rates.append(rounds.param_groups[0]["lr"])
            if within:
                schedule.step()
        if not within:
            schedule.step()
    return rates


def test_a_schedule_counts_rounds(ranks_of: RanksOf) -> None:
    first, second = ranks_of(2).run(scheduled, False)
    assert len(first) + len(second) == 12
    assert {*first, *second} == {1.0, 0.5, 0.25, 0.125}
    for outcome in ranks_of(2).outcomes(scheduled, True):
        assert isinstance(outcome.error, PayloadError)
        assert "other hyperparameters" in str(outcome.error)


def test_leaving_out_belongs_in_the_loop() -> None:
    (transport,) = Simulated(1)
    parameters = make_parameters()
    rounds = LocalRounds(
        torch.optim.SGD(parameters.items(), lr=LR),
        Exchange(Identity(), transport=transport),
        participation=Participation(2),
    )
    with pytest.raises(ValueError, match="belongs in the loop over clients"):
        rounds.leave_out(0)

"""LocalRounds, one client per rank: against a NumPy reference, on real ranks, and when it fails."""

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

from comm_hooks import (
    ConfigMismatchError,
    Differences,
    ErrorFeedback,
    Exchange,
    Identity,
    Sign,
    TopK,
)
from comm_hooks.checkpoints.sealing import sealed
from comm_hooks.collectives import TorchDistributed
from comm_hooks.compressors import Compressor
from comm_hooks.optim.rounds import LocalRounds, Participation
from tests.optim.rounds.problem import (
    SHAPES,
    Arrays,
    Client,
    gradient,
    largest,
    make_parameters,
    set_gradients,
    signs,
    start,
    values,
)
from tests.optim.scenarios import RanksOf, rarely

STEPS, K = 24, 4
LR, MOMENTUM = 0.05, 0.5
OUTER_LR, OUTER_MOMENTUM = 0.8, 0.6


def make(
    compressor: Compressor, fragments: int, nesterov: bool = False
) -> tuple[dict[str, nn.Parameter], LocalRounds]:
    parameters = make_parameters()
    memory = None if isinstance(compressor, Identity) else ErrorFeedback()
    exchange = Exchange(compressor, memory, "all_gather", min_numel=16)
    inner = torch.optim.SGD(parameters.items(), lr=LR, momentum=MOMENTUM)
    server = None
    if nesterov:
        server = torch.optim.SGD(
            parameters.values(), lr=OUTER_LR, momentum=OUTER_MOMENTUM, nesterov=True
        )
    return parameters, LocalRounds(inner, exchange, server, local_steps=K, fragments=fragments)


def train(compressor: Compressor, fragments: int, nesterov: bool) -> tuple[Arrays, Arrays, Arrays]:
    """Return the server's model along the way, this rank's own, and what all agree on at last."""
    parameters, rounds = make(compressor, fragments, nesterov)
    for step in range(STEPS - 1):
        set_gradients(parameters, step, dist.get_rank())
        rounds.step()
    with rounds.server_parameters():
        shared = values(parameters)
    own = values(parameters)
    rounds.synchronize()
    return shared, own, values(parameters)


def reference(
    compress: Callable[[np.ndarray], np.ndarray] | None, ranks: int, fragments: int, nesterov: bool
) -> tuple[Arrays, list[Arrays], Arrays]:
    shared = start()
    models = [start() for _ in range(ranks)]
    clients = [Client() for _ in range(ranks)]
    outer = {n: np.zeros(s) for n, s in SHAPES.items()}

    def exchange(name: str) -> None:
        deltas = [shared[name] - model[name] for model in models]
        sent = [c.message(name, d, compress) for c, d in zip(clients, deltas, strict=True)]
        mean = np.mean(sent, axis=0)
        if nesterov:
            outer[name] = OUTER_MOMENTUM * outer[name] + mean
            mean = OUTER_LR * (mean + OUTER_MOMENTUM * outer[name])
        shared[name] = shared[name] - mean
        for model in models:
            model[name] = shared[name]

    # The weight is the larger parameter, so it makes the first fragment.
    due = {"weight": 0, "bias": K // 2 if fragments == 2 else 0}
    for step in range(STEPS - 1):
        for rank, (model, client) in enumerate(zip(models, clients, strict=True)):
            for name in SHAPES:
                g = gradient(name, step, rank, model[name])
                client.state[name] = MOMENTUM * client.state[name] + g
                model[name] = model[name] - LR * client.state[name]
        for name in SHAPES:
            if (step + 1) % K == due[name]:
                exchange(name)
    before = dict(shared)
    own = [dict(model) for model in models]
    for name in SHAPES:
        exchange(name)
    return before, own, shared


@pytest.mark.parametrize("ranks", [2, *rarely(4)])
@pytest.mark.parametrize("fragments", [1, 2])
@pytest.mark.parametrize("nesterov", [True, *rarely(False)])
@pytest.mark.parametrize(
    ("compressor", "compress"),
    [
        (TopK(density=0.05, value_bits=32), largest),
        *rarely((Identity(), None), (Sign(block_size=64), signs)),
    ],
    ids=["topk", "identity", "sign"],
)
def test_matches_the_reference(
    ranks_of: RanksOf,
    compressor: Compressor,
    compress: Callable[[np.ndarray], np.ndarray] | None,
    nesterov: bool,
    fragments: int,
    ranks: int,
) -> None:
    outcomes = ranks_of(ranks).run(train, compressor, fragments, nesterov)
    shared, own, final = reference(compress, ranks, fragments, nesterov)
    for rank, (own_shared, own_model, own_final) in enumerate(outcomes):
        for name in SHAPES:
            assert np.array_equal(own_shared[name], outcomes[0][0][name]), "one server's model"
            assert np.array_equal(own_final[name], outcomes[0][2][name]), "replicas must agree"
            # float32, a few dozen steps of size 0.1
            np.testing.assert_allclose(own_shared[name], shared[name], atol=2e-5)
            np.testing.assert_allclose(own_model[name], own[rank][name], atol=2e-5)
            np.testing.assert_allclose(own_final[name], final[name], atol=2e-5)


def spread() -> tuple[list[int], int]:
    parameters = {str(i): nn.Parameter(torch.ones(40, 10 + i)) for i in range(8)}
    exchange = Exchange(Sign(), ErrorFeedback(), min_numel=16)
    inner = torch.optim.SGD(parameters.items(), lr=0.1)
    rounds = LocalRounds(inner, exchange, local_steps=4, fragments=4)
    sent, collectives = [0], 0
    perform = exchange.transport.perform

    def counting(request: Any) -> Any:
        nonlocal collectives
        collectives += type(request).__name__ != "AllGatherObject"
        return perform(request)

    exchange.transport.perform = counting  # type: ignore[method-assign]
    for _ in range(8):
        for p in parameters.values():
            p.grad = torch.ones_like(p)
        own = [p.grad for p in parameters.values()]
        rounds.step()
        assert all(p.grad is g for p, g in zip(parameters.values(), own, strict=True))
        sent.append(int(exchange.stats()["bytes_sent"]))
    return [b - a for a, b in itertools.pairwise(sent)], collectives


def test_fragments_use_the_link_evenly_with_one_collective_per_step(ranks_of: RanksOf) -> None:
    for per_step, collectives in ranks_of(2).run(spread):
        assert min(per_step) > 0.8 * max(per_step) > 0
        assert collectives == 8


def count(compressor: Compressor, fragments: int) -> tuple[dict[str, float], dict[str, float], int]:
    """Return what is counted after five rounds, by whom, and the bytes of an all-reduce."""
    parameters, rounds = make(compressor, fragments)
    for step in range(5 * K):
        set_gradients(parameters, step, dist.get_rank())
        rounds.step()
    nbytes = sum(p.nbytes for p in parameters.values())
    ranks = dist.get_world_size()
    return rounds.stats(), rounds.exchange.stats(), 2 * (ranks - 1) * nbytes // ranks


@pytest.mark.parametrize("fragments", [2, *rarely(1)])
def test_stats_compare_with_an_all_reduce_at_every_local_step(
    ranks_of: RanksOf, fragments: int
) -> None:
    for stats, of_exchange, all_reduce in ranks_of(3).run(count, TopK(density=0.05), fragments):
        assert stats["steps"] == 5 * K
        assert stats["rounds"] == 5 * fragments
        assert stats["bytes_sent"] == of_exchange["bytes_sent"] > 0
        assert stats["bytes_uncompressed"] == 5 * K * all_reduce
        ratio = stats["bytes_uncompressed"] / stats["bytes_sent"]
        assert stats["compression_ratio"] == ratio
        assert ratio == of_exchange["compression_ratio"]


def lose_a_client(fragments: int) -> tuple[list[str], Arrays, float]:
    parameters, rounds = make(TopK(density=0.05, value_bits=32), fragments)
    reports: list[str] = []
    memory = rounds.exchange.memory
    assert memory
    norms = []
    # A round more than the one that fails: by then the client is well again.
    for step in range(3 * K):
        set_gradients(parameters, step, dist.get_rank())
        if step == K and dist.get_rank() == 1:
            assert parameters["weight"].grad is not None
            parameters["weight"].grad[3, 3] = float("nan")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            rounds.step()
        reports += [str(w.message) for w in caught]
        norms.append(memory.norm())
    if dist.get_rank() == 1:
        assert norms[K - 1] == norms[2 * K - 1], "the residual of the client that failed stays"
    assert norms[2 * K - 1] != norms[3 * K - 1]
    rounds.synchronize()
    return reports, values(parameters), memory.norm()


def test_a_rank_that_returns_nan_is_left_out_and_named(ranks_of: RanksOf) -> None:
    outcomes = ranks_of(3).run(lose_a_client, 1)
    for reports, parameters, norm in outcomes:
        assert len(reports) == 1
        assert "rank 1; the mean is over the other 2 of 3" in reports[0]
        assert np.isfinite(norm)
        for name in SHAPES:
            assert np.isfinite(parameters[name]).all()
            assert np.array_equal(parameters[name], outcomes[0][1][name])


def all_fail() -> tuple[bool, int]:
    parameters, rounds = make(Identity(), 1)
    before = values(parameters)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(K):
            set_gradients(parameters, step, 0)
            for p in parameters.values():
                assert p.grad is not None
                p.grad.fill_(float("nan"))
            rounds.step()
    unchanged = all(np.array_equal(before[n], x) for n, x in values(parameters).items())
    return unchanged, sum("0 of 2" in str(w.message) for w in caught)


def test_a_round_without_clients_changes_nothing(ranks_of: RanksOf) -> None:
    assert ranks_of(2).run(all_fail) == [(True, 1)] * 2


def resume(fragments: int) -> bool:
    def run(parameters: Any, rounds: LocalRounds, steps: range) -> None:
        for step in steps:
            set_gradients(parameters, step, dist.get_rank())
            rounds.step()

    parameters, rounds = make(TopK(density=0.05), fragments, nesterov=True)
    run(parameters, rounds, range(10))  # in the middle of a round
    file = io.BytesIO()
    torch.save(rounds.state_dict(), file)
    run(parameters, rounds, range(10, 20))
    expected = values(parameters)
    file.seek(0)
    parameters, rounds = make(TopK(density=0.05), fragments, nesterov=True)
    rounds.load_state_dict(torch.load(file, weights_only=True))
    run(parameters, rounds, range(10, 20))
    return all(np.array_equal(expected[n], x) for n, x in values(parameters).items())


@pytest.mark.parametrize("fragments", [2, *rarely(1)])
def test_a_resumed_run_ends_as_one_that_was_not_interrupted(
    ranks_of: RanksOf, fragments: int
) -> None:
    assert ranks_of(2).run(resume, fragments) == [True, True]


def overflow() -> tuple[Arrays, float]:
    parameters, rounds = make(Identity(), 1)
    scaler = torch.amp.GradScaler("cpu", init_scale=128.0)
    for step in range(2 * K):
        rounds.zero_grad()
        loss = sum(((p - 1) ** 2).sum() for p in parameters.values())
        assert isinstance(loss, torch.Tensor)
        if step in (2, 5) and dist.get_rank() == 1:
            loss = loss * float("inf")
        scaler.scale(loss).backward()
        if step % 2:
            scaler.unscale_(rounds)  # type: ignore[arg-type]
        scaler.step(rounds)  # type: ignore[arg-type]
        scaler.update()
    return values(parameters), scaler.get_scale()


def test_an_overflow_under_a_scaler_costs_that_rank_a_step_only(ranks_of: RanksOf) -> None:
    (first, scale), (second, backed_off) = ranks_of(2).run(overflow)
    assert (scale, backed_off) == (128.0, 32.0)
    for name in SHAPES:
        assert np.isfinite(first[name]).all()
        assert np.array_equal(first[name], second[name])


def different(kind: str) -> None:
    parameters = make_parameters()
    steps = 2
    if "failure" in kind:
        TorchDistributed().report(LookupError("no such thing"))
    if "model" in kind and dist.get_rank():
        with torch.no_grad():
            parameters["bias"][3] += 1e-7
    if kind == "steps" and dist.get_rank():
        steps = 3
    inner = torch.optim.SGD(parameters.values(), lr=0.1)
    rounds = LocalRounds(inner, Exchange(Identity()), local_steps=steps)
    for step in range(3):
        set_gradients(parameters, step, 0)
        rounds.step()


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        ("model", "checksum of the initial model"),
        ("model after a failure", "checksum of the initial model"),
        ("steps", "local_steps is 2 on rank 0, 3 on rank 1"),
    ],
)
def test_ranks_that_differ_fail_together(ranks_of: RanksOf, kind: str, what: str) -> None:
    for outcome in ranks_of(2).outcomes(different, kind):
        assert isinstance(outcome.error, ConfigMismatchError)
        assert what in str(outcome.error)


def decaying(kind: Any) -> torch.optim.Optimizer:
    return kind([nn.Parameter(torch.ones(2))], lr=0.1, weight_decay=0.1)


CLIENTS = {"participation": Participation(clients=4)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"local_steps": 0}, "local_steps must be an integer of at least 1, got 0"),
        (
            {"inner": torch.optim.LBFGS([torch.nn.Parameter(torch.ones(2))])},
            "LBFGS computes gradients several times in a step",
        ),
        ({"local_steps": None}, "local_steps is needed"),
        ({"fragments": 0}, "fragments must be an integer of at least 1"),
        ({"fragments": 5}, "fragments=5 exceeds local_steps=4"),
        ({"fragments": 3}, "2 parameters cannot be divided into 3 fragments"),
        ({"exchange": Sign()}, "exchange must be an Exchange"),
        ({"exchange": Exchange(Sign(), Differences())}, "sends changes"),
        (
            {
                "exchange": Exchange(Sign(), ErrorFeedback(), "hierarchical", ranks_per_node=2),
                "look_ahead": 0.3,
            },
            "look_ahead cannot be combined with collective='hierarchical'",
        ),
        ({"server": 3}, "server must be an Optimizer"),
        ({"inner": 3}, "inner must be an Optimizer"),
        (
            {"server": torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)},
            "server and inner must hold the same parameters",
        ),
        ({"client_state": "forget"}, "client_state must be one of keep, reset"),
        ({"fragments": 2, **CLIENTS}, "fragments cannot be combined with participation"),
        (
            {"exchange": Exchange(TopK(density=0.05, overlap=1.0), ErrorFeedback()), **CLIENTS},
            "divides by the number of ranks that sent an element",
        ),
        *(({"look_ahead": bad}, "look_ahead must lie in") for bad in (-0.5, float("nan"))),
        ({"look_ahead": 0.5}, "look_ahead is a share of the residual"),
        (
            {"look_ahead": 0.5, "exchange": Exchange(TopK(), ErrorFeedback()), **CLIENTS},
            "look_ahead cannot be combined with participation",
        ),
        *(
            (
                {"shared_decay": True, "inner": decaying(kind)},
                "shared_decay needs an inner optimizer with a decoupled",
            )
            for kind in (torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop)
        ),
        (
            {"shared_decay": True, "inner": decaying(torch.optim.AdamW), **CLIENTS},
            "shared_decay cannot be combined with participation",
        ),
    ],
    ids=str,
)
def test_bad_settings_are_refused(options: dict[str, Any], message: str) -> None:
    parameters = make_parameters()
    arguments: dict[str, Any] = {
        "inner": torch.optim.SGD(parameters.items(), lr=0.1),
        "exchange": Exchange(Identity()),
        "local_steps": K,
    }
    with pytest.raises(ValueError, match=message):
        LocalRounds(**{**arguments, **options})


def test_clients_needs_participation() -> None:
    _, rounds = make(Identity(), 1)
    with pytest.raises(ValueError, match="clients\\(\\) needs participation"):
        next(rounds.clients())


def test_state_of_another_model_is_refused(ranks_of: RanksOf) -> None:
    ranks_of(2).run(_load_another)


def _load_another() -> None:
    _, rounds = make(Identity(), 1)
    state = rounds.state_dict()
    shared = state["rounds"]["released"]["model"]
    shared["weight"] = shared["weight"][:5]
    state["rounds"] = sealed(state["rounds"])
    with pytest.raises(ValueError, match="other parameters than this model"):
        rounds.load_state_dict(state)


def synchronize_twice() -> tuple[list[int], bool]:
    parameters, rounds = make(TopK(density=0.05), 2)
    sent = []
    for step in range(K + 1):
        set_gradients(parameters, step, dist.get_rank())
        rounds.step()
    for _ in range(2):
        rounds.synchronize()
        sent.append(int(rounds.exchange.stats()["bytes_sent"]))
    return sent, rounds.steps == K + 1


def test_synchronizing_again_sends_nothing(ranks_of: RanksOf) -> None:
    for (first, second), _ in ranks_of(2).run(synchronize_twice):
        assert first == second > 0

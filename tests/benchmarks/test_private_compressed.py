"""The study of compressed private training: the same budget, fewer bytes, and real processes."""

import os
from collections.abc import Callable

import pytest
import torch

from benchmarks.lab.runs import Point
from benchmarks.studies.private_compressed.schemes import (
    ALONE,
    SCHEMES,
    Study,
    make_methods,
    train_rank,
)
from benchmarks.studies.private_training import PrivatePlan, end_of
from tests.benchmarks.studying import NUMEL, digits, nothing
from tests.ranks import Ranks

PLAN = PrivatePlan(3, 48, 1 / 30, 1.0, 1.0, 3e-4, 1)


def study() -> Study:
    return Study([digits(1)], PLAN, ratio=0.1)


def curves(ranks: int, optimizer: str = "DP-SGD") -> dict[str, list[Point]]:
    compared = make_methods(study(), list(SCHEMES), [optimizer], [ranks])
    return {m.name: m.run(m.spec({"lr": 0.01}, 0)).curve for m in compared}


@pytest.mark.slow
def test_all_schemes_cost_the_model_the_same_and_ranks_what_the_table_says() -> None:
    ends = {name: end_of(curve) for name, curve in curves(2).items()}
    assert set(ends) == set(SCHEMES)
    epsilons = set()
    for name, end in ends.items():
        assert end is not None
        epsilons.add(end.epsilon)
        placement = name.partition(":")[0]
        if placement in ("central", "aggregate"):
            assert end.peer_epsilon is None
        elif placement == "shares":
            assert end.peer_epsilon is not None
            assert end.peer_epsilon > 1.5 * end.epsilon
        else:
            assert end.peer_epsilon == end.epsilon
    assert len(epsilons) == 1


def test_bytes_are_those_of_the_collectives() -> None:
    sent = {name: curve[-1].bytes_sent / 3 for name, curve in curves(2).items()}
    dense = 4 * NUMEL
    for name in ("central:dense", "shares:dense", "local:dense"):
        assert sent[name] == pytest.approx(dense, rel=0.01)
    # What the owners of shards get is exact: half of the traffic.
    for name in ("central:topk", "central:sign"):
        assert 0.5 * dense < sent[name] < 0.6 * dense
    others = [n for n in SCHEMES if "central" not in n and "dense" not in n and n != ALONE]
    assert len(others) == 6
    assert all(0 < sent[name] < 0.15 * dense for name in others)
    assert sent[ALONE] == 0


def test_ranks_alone_see_their_own_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def record(task, model, optimizer, plan, advance, *, transport):  # type: ignore[no-untyped-def]
        seen.append((task.clients[0].indices, plan.batch, plan.sample_rate, transport.world_size))
        return []

    monkeypatch.setattr("benchmarks.studies.private_compressed.schemes.train_privately", record)
    (method,) = make_methods(study(), [ALONE], ["DP-Adam"], [4])
    method.train({"lr": 0.01}, 0, nothing)
    indices, batches, rates, worlds = zip(*seen, strict=True)
    assert sorted(torch.cat(indices).tolist()) == sorted(digits(1).clients[0].indices.tolist())
    assert batches == (12, 12, 12, 12)
    assert rates == (1 / 30,) * 4
    assert worlds == (1, 1, 1, 1)


SAME = ("central:topk", "shares:random_k", "local:topk", "local:sign", "aggregate:count_sketch")


def over_gloo(scheme: str) -> list[Point]:
    drawn, os.urandom = os.urandom, bytes
    try:
        return train_rank(study(), scheme, "DP-MicroAdam", {"lr": 0.01}, 0, nothing, None)
    finally:
        os.urandom = drawn


@pytest.mark.slow
def test_real_ranks_do_what_simulated_ones_do(
    ranks_of: Callable[[int], Ranks], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = {scheme: ranks_of(2).run(over_gloo, scheme) for scheme in SAME}
    # Only who is drawn and what noise is added differs from run to run: let it be the same.
    monkeypatch.setattr(os, "urandom", bytes)
    for scheme in SAME:
        (method,) = make_methods(study(), [scheme], ["DP-MicroAdam"], [2])
        simulated = method.train({"lr": 0.01}, 0, nothing)
        assert real[scheme] == [simulated, simulated], scheme

"""The study of clients that are private as a whole: who has what, and what each method does."""

import itertools
import json
import os
from pathlib import Path
from unittest import mock

import pytest
import torch

from benchmarks.lab.schedules import constant
from benchmarks.lab.training import Plan, new_model
from benchmarks.studies.private_federated.methods import (
    METHODS,
    Given,
    Words,
    build,
    make_methods,
)
from tests.benchmarks.studying import nothing
from tests.benchmarks.test_studies import invoke


@pytest.fixture(scope="module")
def words() -> Words:
    return build(clients=40, seed=0, validation=0.1)


@pytest.mark.slow
def test_clients_have_neighbouring_verses_of_their_own(words: Words) -> None:
    task = words.task
    assert task.validation
    parts = [*task.clients, words.public, task.validation]
    indices = torch.cat([part.indices for part in parts])
    assert len(indices.unique()) == len(indices) == 27_993
    assert all(len(client.targets[client.indices].unique()) <= 2 for client in task.clients)
    assert 0.009 < len(words.public) / len(indices) < 0.011
    ends = [(int(client.indices.min()), int(client.indices.max())) for client in task.clients]
    assert ends == sorted(ends)
    assert all(last < first for (_, last), (first, _) in itertools.pairwise(ends))


def test_frequent_words_are_divided_by_more(words: Words) -> None:
    scales = words.frequency()["weight"]
    assert float(scales.max()) == 1
    assert float(scales.min()) == pytest.approx(0.1)
    assert 0 < int((scales > 0.1).sum()) < 100


@pytest.mark.slow
@pytest.mark.parametrize("name", ["AdaS", "DP-FedAvg", "DP-FedAdam", "AdaDPS"])
def test_methods_learn_where_there_is_hardly_any_noise(name: str, words: Words) -> None:
    plan = Plan(24, 4, 16, 1, constant)
    (method,) = make_methods([name], [words], plan=plan, sample_rate=0.5, sigma=1e-3, norms=[100.0])
    start = {"AdaDPS": 0.1, "AdaS": 0.1}.get(name, 0.25)
    # Which clients are drawn is secret, and decides about a few hundredths.
    with mock.patch.object(os, "urandom", lambda size: b"7" * size):
        curve = method.train({"lr": start, **method.variants[-1]}, 0, nothing)
    assert curve[-1].error < 0.65, "0.77 is what the largest part alone gives"


def test_every_method_preconditions_where_its_name_says(words: Words) -> None:
    for name, (make, variants) in METHODS.items():
        model = new_model(words.task, 0, "cpu")
        settings = {"lr": 0.5, **variants[0]}
        inner, server = make(Given(list(model.named_parameters()), words, settings))
        weight = next(model.parameters())
        rare = words.frequency()["weight"] == words.frequency()["weight"].min()
        moved = []
        for optimizer in (inner, server):
            before = weight.detach().clone()
            weight.grad = torch.ones_like(weight)
            optimizer.step()
            change = (weight.detach() - before).abs().mean(0)
            moved.append(float(change[rare].mean() / change[~rare].mean()))
        here = [ratio > 1.2 for ratio in moved]
        assert here == [name in ("AdaS", "AdaDPS"), name == "A at the server"], name


def test_what_is_private_is_clipped_and_noised(words: Words) -> None:
    plan = Plan(1, 1, 16, 1, constant)
    noisy = make_methods(
        ["DP-FedAvg"], [words], plan=plan, sample_rate=0.5, sigma=1e3, norms=[1.0]
    )[0]
    still = make_methods(
        ["DP-FedAvg"], [words], plan=plan, sample_rate=0.5, sigma=1e-9, norms=[1e-9]
    )[0]
    untrained = words.task.evaluate(new_model(words.task, 0, "cpu"))["loss"]
    settings = {"lr": 0.5, "C": 1.0}
    assert noisy.train(settings, 0, nothing)[-1].loss > 2 * untrained
    clipped = still.train({**settings, "C": 1e-9}, 0, nothing)[-1].loss
    assert clipped == pytest.approx(untrained, rel=1e-5)


@pytest.mark.slow
def test_from_end_to_end(tmp_path: Path) -> None:
    small = ["--quick", "--clients", "20", "--rounds", "2", "--local-steps", "1", "--tries", "1"]
    small += ["--methods", "FedAvg,A at the server,AdaDPS"]
    result = invoke("private_federated", *small, "--out", str(tmp_path))
    assert result.exit_code == 0, result.output
    assert {path.name for path in tmp_path.iterdir()} == {
        "private_federated.json",
        "curves.png",
    }
    record = json.loads((tmp_path / "private_federated.json").read_text())
    private = [(m["name"], m["labels"]["private"]) for m in record["methods"]]
    assert private == [("FedAvg", "no"), ("A at the server", "yes"), ("AdaDPS", "yes")]
    assert record["settings"]["delta"] == 1 / 20
    assert f"{record['settings']['epsilon']:.2f}" in result.stdout

"""The study of FED-LAMB: a round is what it is on paper."""

import copy
import itertools

import pytest
import torch

from benchmarks.lab.schedules import constant
from benchmarks.lab.training import Plan, batch_generator, new_model
from benchmarks.studies.fed_lamb.methods import METHODS, make_methods
from tests.benchmarks.studying import NUMEL, digits, nothing


@pytest.mark.slow
def test_clients_send_their_second_moment_too_where_it_is_shared() -> None:
    plan = Plan(2, 1, 8, 2, constant)
    methods = make_methods(
        METHODS, {"iid": [digits(6)]}, plan=plan, local_steps=[1, 2], fraction=0.5
    )
    assert [(m.name, m.labels["T"]) for m in methods] == [
        (name, steps) for steps in (1, 2) for name in METHODS
    ]
    sent = {
        m.name: m.train({"lr": 0.01, "lambda": 0.01}, 0, nothing)[-1].bytes_sent for m in methods
    }
    assert sent == {
        "fed_sgd": 2 * 4 * NUMEL,
        "fed_ams": 2 * 8 * NUMEL,
        "fed_ams_client": 2 * 8 * NUMEL,
        "fed_lamb": 2 * 8 * NUMEL,
        "fed_lamb_client": 2 * 8 * NUMEL,
    }


def test_fed_sgd_equals_a_loop_over_the_clients() -> None:
    task = digits(4, partition="classes", classes_per_client=3)
    plan = Plan(2, 3, 8, 1, constant)
    method = make_methods(["fed_sgd"], {"iid": [task]}, plan=plan, local_steps=[3], fraction=1.0)[0]
    (point,) = method.train({"lr": 0.1}, 0, nothing)

    model = new_model(task, 0, "cpu")
    batches = [c.batches(8, batch_generator(0, i)) for i, c in enumerate(task.clients)]
    for _ in range(2):
        trained = []
        for own in batches:
            local = copy.deepcopy(model)
            optimizer = torch.optim.SGD(local.parameters(), lr=0.1)
            for batch in itertools.islice(own, 3):
                optimizer.zero_grad()
                task.loss(local, batch).backward()
                optimizer.step()
            trained.append(list(local.parameters()))
        with torch.no_grad():
            for parameter, *values in zip(model.parameters(), *trained, strict=True):
                parameter.copy_(torch.stack(values).mean(0))
    assert point.loss == pytest.approx(task.evaluate(model)["loss"], rel=1e-5)

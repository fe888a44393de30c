"""A run follows from its settings and its seed, whatever was done before."""

from dataclasses import astuple

import torch

from benchmarks.lab.outcomes import Advance, Diverged, Method
from benchmarks.lab.runs import Point, Tuned
from tests.benchmarks.studying import nothing


def with_dropout(settings: Tuned, seed: int, advance: Advance) -> list[Point]:
    kept = float(torch.nn.functional.dropout(torch.ones(1000)).mean())
    if settings["lr"] > 1:
        raise Diverged(Point(1, kept, 0.5, 8))
    return [Point(1, kept, 0.5, 8)]


def test_dropout_follows_from_the_seed_and_leaves_the_generator_alone() -> None:
    method = Method("m", {}, with_dropout, start=1.0)
    before = torch.get_rng_state()
    runs = []
    for lr, seed in ((0.1, 0), (2.0, 0), (0.1, 1), (0.1, 0)):
        runs.append(astuple(method.run({"lr": lr}, seed, nothing).curve[0]))
        assert torch.equal(torch.get_rng_state(), before)
        torch.rand(1)
        before = torch.get_rng_state()
    assert runs[0] == runs[1] == runs[3] != runs[2]

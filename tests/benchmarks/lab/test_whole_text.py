"""The model of the comparison, the part of the text that each rank sees, and how it is judged."""

import math
from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.lab.corpus import shard_bounds
from benchmarks.lab.model import GPT, Experts, GPTConfig
from benchmarks.lab.runs import Settings
from benchmarks.lab.tasks.whole_text import whole_text
from benchmarks.lab.training import batch_generator

TINY = GPTConfig(layers=2, width=16, heads=2, context=8)


def test_the_default_model_is_the_one_that_figures_are_quoted_for() -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig())
    assert sum(parameter.numel() for parameter in model.parameters()) == 4_831_232


def test_each_token_has_the_weighted_outputs_of_its_best_two_experts() -> None:
    torch.manual_seed(0)
    layer, x = Experts(width=8, experts=4), torch.randn(2, 3, 8)
    mixed = layer(x)
    for place in ((b, t) for b in range(2) for t in range(3)):
        scores, chosen = layer.router(x[place]).topk(2)
        outputs = torch.stack([layer.experts[number](x[place]) for number in chosen.tolist()])
        torch.testing.assert_close(mixed[place], scores.softmax(-1) @ outputs)


def test_a_prediction_depends_on_what_came_before_and_not_on_what_follows() -> None:
    torch.manual_seed(0)
    model = GPT(TINY)
    tokens = torch.randint(0, 256, (1, 8), dtype=torch.long)
    position = 4
    outputs = []
    for changed in (position - 1, position + 1):
        other = tokens.clone()
        other[0, changed] = (other[0, changed] + 1) % 256
        target = torch.full_like(tokens, -100)  # ignored by the loss, all but one
        target[0, position] = 7
        outputs.append((model(tokens, target).item(), model(other, target).item()))
    (before, before_changed), (after, after_changed) = outputs
    assert before != before_changed
    assert after == after_changed


@given(nproc=st.integers(1, 5), length=st.integers(45, 2000), seed=st.integers(0, 2**32 - 1))
def test_a_rank_sees_its_own_part_and_nothing_else(nproc: int, length: int, seed: int) -> None:
    settings = Settings(nproc=nproc, seed=seed, model=TINY)
    tokens = torch.empty(length, dtype=torch.uint8)
    for rank, (start, stop) in enumerate(shard_bounds(length, nproc)):
        tokens[start:stop] = rank
    task = whole_text(tokens, settings)
    for rank, part in enumerate(task.clients):
        generator = batch_generator(seed, rank, task.seeds_apart)
        for inputs, targets in islice(part.batches(6, generator), 3):
            assert inputs.shape == targets.shape == (6, 8)
            assert inputs.eq(rank).all()
            assert targets.eq(rank).all()


def test_batches_follow_the_seed_and_differ_between_ranks() -> None:
    tokens = torch.randint(0, 256, (10_000,), dtype=torch.uint8)
    # Ranks that draw the same places would make two parts of equal text one.
    tokens[5_000:] = tokens[:5_000]
    task = whole_text(tokens, Settings(model=TINY))

    def first(seed: int, rank: int) -> torch.Tensor:
        generator = batch_generator(seed, rank, task.seeds_apart)
        return next(task.clients[rank].batches(6, generator))[0]

    assert torch.equal(first(0, 0), first(0, 0))
    assert not torch.equal(first(0, 0), first(1, 0))
    assert not torch.equal(first(0, 0), first(0, 1))


def test_an_untrained_model_guesses_all_of_the_text() -> None:
    torch.manual_seed(0)
    tokens = torch.randint(0, 256, (5_000,), dtype=torch.uint8)
    task = whole_text(tokens, Settings(model=TINY))
    assert len(task.held_out) == 96
    judged = task.evaluate(task.make_model())
    assert judged["loss"] == pytest.approx(math.log(256), abs=0.1)
    assert judged["error"] > 0.98

"""What one rank trains: the model, and which part of the text it may see."""

import math
from itertools import islice

import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.lab.corpus import shard_bounds
from benchmarks.lab.model import GPT, GPTConfig
from benchmarks.lab.runs import Settings
from benchmarks.lab.training import draw_batches

TINY = GPTConfig(layers=2, width=16, heads=2, context=8)


def test_the_default_model_is_the_one_that_figures_are_quoted_for() -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig())
    assert sum(parameter.numel() for parameter in model.parameters()) == 4_831_232


def test_an_untrained_model_guesses() -> None:
    torch.manual_seed(0)
    windows = torch.randint(0, 256, (64, 129))
    loss = GPT(GPTConfig(layers=2))(windows[:, :-1], windows[:, 1:])
    assert abs(loss.item() - math.log(256)) < 0.1


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


@given(
    nproc=st.integers(1, 5),
    length=st.integers(45, 2000),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_rank_sees_its_own_shard_and_nothing_else(nproc: int, length: int, seed: int) -> None:
    settings = Settings(nproc=nproc, seed=seed, model=TINY)
    tokens = torch.empty(length, dtype=torch.uint8)
    for rank, (start, stop) in enumerate(shard_bounds(length, nproc)):
        tokens[start:stop] = rank
    for rank in range(nproc):
        for batch in islice(draw_batches(tokens, settings, rank), 3):
            assert batch.shape == (settings.batch, settings.window)
            assert batch.eq(rank).all()


def test_batches_follow_the_seed_and_differ_between_ranks() -> None:
    tokens = torch.randint(0, 256, (10_000,), dtype=torch.uint8)
    # Ranks that draw alike would make two shards of equal text one.
    tokens[5_000:] = tokens[:5_000]

    def first(seed: int, rank: int) -> torch.Tensor:
        return next(draw_batches(tokens, Settings(seed=seed, model=TINY), rank))

    assert torch.equal(first(0, 0), first(0, 0))
    assert not torch.equal(first(0, 0), first(1, 0))
    assert not torch.equal(first(0, 0), first(0, 1))

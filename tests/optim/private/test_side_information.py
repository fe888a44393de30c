"""Scales from public statistics, and gradients of public data."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from comm_hooks.optim.private.optimizers.ada_dps import AdaDPS
from comm_hooks.optim.private.optimizers.public_knowledge import (
    PublicGradients,
    mean_tf_idf,
    tf_idf,
    token_frequency,
)

numbers = st.lists(st.floats(0, 1e6), min_size=1, max_size=30).filter(lambda n: max(n) > 1e-3)


@given(counts=numbers, floor=st.floats(1e-3, 1.0), factor=st.sampled_from([0.5, 4.0]))
def test_frequent_tokens_get_the_larger_divisor(
    counts: list[float], floor: float, factor: float
) -> None:
    scales = token_frequency(torch.tensor(counts), floor=floor)
    assert float(scales.max()) == 1
    assert float(scales.min()) >= torch.tensor(floor)
    order = torch.tensor(counts).argsort()
    assert bool((scales[order].diff() >= 0).all())
    assert torch.equal(scales, token_frequency(torch.tensor(counts) * factor, floor=floor))
    above = scales > torch.tensor(floor)
    expected = torch.tensor(counts, dtype=torch.float64) / max(counts)
    torch.testing.assert_close(scales[above].double(), expected[above], rtol=1e-6, atol=0)


@given(scores=numbers, floor=st.floats(1e-3, 1.0))
def test_tokens_of_high_scores_get_the_smaller_divisor(scores: list[float], floor: float) -> None:
    scales = tf_idf(torch.tensor(scores), floor=floor)
    shares = torch.tensor(scores, dtype=torch.float64) / max(scores)
    torch.testing.assert_close(
        1 / scales.double(), (shares / floor).clamp_min(1), rtol=1e-5, atol=0
    )
    assert float(scales[shares.argmax()]) == pytest.approx(floor)


def test_tf_idf_against_a_plain_computation() -> None:
    counts = torch.tensor([[3, 1, 0, 0], [1, 0, 1, 0], [0, 0, 0, 0], [5, 0, 0, 5]])
    shares = [[0.75, 0.25, 0, 0], [0.5, 0, 0.5, 0], [0, 0, 0, 0], [0.5, 0, 0, 0.5]]
    rarities = torch.tensor([4 / 3, 4.0, 4.0, 4.0]).log()
    expected = torch.tensor(shares).mean(0) * rarities
    torch.testing.assert_close(mean_tf_idf(counts), expected)


@pytest.mark.parametrize(
    ("function", "values", "options", "message"),
    [
        (
            token_frequency,
            [[1, 2]],
            {},
            r"token_frequency: counts must be a vector, got .*\(1, 2\)",
        ),
        (token_frequency, [1, -2], {}, "counts must be finite and not negative"),
        (token_frequency, [0, 0], {}, "counts must not all be zero"),
        (token_frequency, [1, 2], {"floor": 0.0}, r"token_frequency: floor must lie in \(0, 1\]"),
        (tf_idf, [1.0, float("nan")], {}, "tf_idf: scores must be finite and not negative"),
        (tf_idf, [1.0], {"floor": 1.5}, r"tf_idf: floor must lie in \(0, 1\], got 1.5"),
        (mean_tf_idf, [1, 2], {}, "mean_tf_idf: documents must be a matrix"),
        (mean_tf_idf, [[1, float("inf")]], {}, "mean_tf_idf: documents must be finite"),
    ],
)
def test_bad_statistics_are_refused(
    function: Any, values: Any, options: dict[str, float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        function(torch.tensor(values), **options)


def loss_of(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return mse_loss(model(batch[0]), batch[1])


def batches(count: int, seed: int = 0) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(4, 3, generator=generator), torch.randn(4, 2, generator=generator))
        for _ in range(count)
    ]


def test_public_gradients_are_those_of_backward_and_start_again() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    model[0].bias.requires_grad_(False)
    public = PublicGradients(model, loss_of, batches(2))
    found = [public() for _ in range(3)]
    assert all(p.grad is None for p in model.parameters())
    for gradients, batch in zip(found, [*batches(2), batches(2)[0]], strict=True):
        model.zero_grad()
        loss_of(model, batch).backward()
        expected = {n: p.grad for n, p in model.named_parameters() if p.requires_grad}
        assert gradients.keys() == expected.keys()
        assert all(torch.equal(gradients[n], expected[n]) for n in expected)


def test_unused_parameters_have_a_gradient_of_zero() -> None:
    model = nn.ModuleDict({"used": nn.Linear(3, 2), "unused": nn.Linear(3, 2)})
    public = PublicGradients(model, lambda model, batch: loss_of(model["used"], batch), batches(1))
    assert not public()["unused.weight"].any()


def test_no_batches_are_refused() -> None:
    public = PublicGradients(nn.Linear(3, 2), loss_of, [])
    with pytest.raises(ValueError, match="PublicGradients: no public batches"):
        public()


def loss_of_unwrapped(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    assert not isinstance(model, DistributedDataParallel), "it would broadcast buffers"
    return loss_of(model, batch)


def under_ddp() -> tuple[list[Any], bool]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(3, 2))
    public = PublicGradients(model, loss_of_unwrapped, batches(3))
    optimizer = AdaDPS(model.named_parameters(), 0.1, public_gradients=public)
    for step in range(3):
        transform = optimizer.transform()
        # DDP's own reduction must still work, and average.
        loss_of(model, batches(3, seed=1 + dist.get_rank())[step]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert transform is not None
    return [t.tolist() for t in (*transform.scale, *model.parameters())], True


def test_under_ddp_nothing_is_averaged_twice_and_ranks_agree(ranks_of: Any) -> None:
    (first, _), (second, _) = ranks_of(2).run(under_ddp)
    assert first == second

"""Discrete Gaussian noise is exactly that, and covers what rounding adds."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from comm_hooks import CountSketch, ErrorFeedback, Exchange, Identity, TopK
from comm_hooks.collectives import Simulated
from comm_hooks.compressors.base import Compressor
from comm_hooks.optim.private import GaussianMechanism, PrivacyEngine, PrivacyError, Secret
from comm_hooks.optim.private.noise import discrete as module
from comm_hooks.optim.private.noise.discrete import (
    Grid,
    add_discrete_noise_,
    discrete_gaussian,
)
from tests.optim.private.test_engine import private, small_model, take_steps

SIGMA, C, B = 2.0, 0.5, 10.0


def generator() -> np.random.Generator:
    return Secret(b"known").stream("noise", rank=0, step=0).generator()


def probabilities(scale: int, most: int) -> np.ndarray:
    numbers = np.arange(-40 * scale, 40 * scale + 1)
    weights = np.exp(-(numbers**2) / (2 * scale**2))
    return (weights / weights.sum())[40 * scale - most : 40 * scale + most + 1]


@pytest.mark.parametrize("scale", [1, 2, 7])
def test_each_integer_has_its_probability(scale: int) -> None:
    count, most = 1 << 20, 4 * scale
    drawn = discrete_gaussian(count, scale, generator())
    found = np.bincount(drawn[abs(drawn) <= most] + most, minlength=2 * most + 1)
    expected = count * probabilities(scale, most)
    chi_square = float(((found - expected) ** 2 / expected).sum())
    freedom = 2 * most + 1
    assert abs(chi_square - freedom) < 5 * math.sqrt(2 * freedom)


@pytest.mark.parametrize("scale", [4096, 3 << 26, 1 << 30])
def test_large_scales_are_normal_and_do_not_overflow(scale: int) -> None:
    drawn = np.sort(discrete_gaussian(1 << 18, scale, generator()) / scale)
    normal = torch.special.ndtr(torch.from_numpy(drawn)).numpy()
    distance = abs(normal - (np.arange(drawn.size) + 0.5) / drawn.size).max()
    assert distance < 2.2 / math.sqrt(drawn.size)  # Kolmogorov: once in 8,000


@pytest.mark.parametrize("passes", range(7))
def test_an_event_of_an_exponential_is_one_of_whole_numbers(passes: int) -> None:
    """The first of events x, x / 2, x / 3, ... that fails is an odd one: exp(-x), von Neumann."""
    bounds: list[int] = []

    class Scripted:
        def integers(self, low: int, high: int, count: int) -> Any:
            bounds.append(high)
            goes_on = len(bounds) <= 2 * passes - 1
            return np.full(count, low if goes_on else high - 1)

    (happens,) = module._happens(np.array([3]), 5, Scripted())  # type: ignore[arg-type]
    # x / k happens where a number below 5 is below 3, and one below k is 0.
    expected = [5, *(bound for k in range(2, passes + 2) for bound in (5, k))]
    assert bounds == expected
    assert happens == (passes % 2 == 0)


def test_the_tail_has_no_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """As long as events happen a number grows; floating-point numbers are not asked."""
    lasting = iter(range(300))
    monkeypatch.setattr(
        module, "_happens", lambda n, *_: np.full(n.size, next(lasting, None) is not None)
    )
    assert abs(module._discrete_laplace(9, 1 << 30, generator())).min() >= 299 << 30


@pytest.mark.parametrize("sigma", [0.3, 1.0, 50.0])
@pytest.mark.parametrize("norm", [1e-3, 1.0, 300.0])
@pytest.mark.parametrize("elements", [1, 1000, 10**8])
def test_noise_covers_the_sensitivity_with_what_rounding_adds(
    sigma: float, norm: float, elements: int
) -> None:
    grid = Grid.of(sigma, norm, elements)
    assert math.frexp(grid.spacing)[0] == 0.5, "a power of two"
    rounded = norm + math.sqrt(elements) * grid.spacing
    assert sigma * rounded <= grid.std <= 1.001 * sigma * norm
    assert 2 * grid.scale**2 < 1 << 63


def test_rounding_stays_within_its_bound() -> None:
    """Two sums that differ by C differ by at most C + sqrt(d) g on the grid; some nearly do."""
    grid, elements = Grid(0.25, 1), 400
    one = torch.full((elements,), 0.12499)
    other = one + C / math.sqrt(elements) * torch.ones(elements)
    distance = float((torch.round(other / 0.25) - torch.round(one / 0.25)).norm() * 0.25)
    bound = C + math.sqrt(elements) * grid.spacing
    assert C < 0.9 * distance < distance <= bound


def test_what_leaves_is_on_the_grid() -> None:
    grid = Grid(2.0**-7, 300)
    tensor = torch.randn(1000)
    add_discrete_noise_([tensor], grid, Secret().stream("noise", rank=0, step=0))
    assert torch.equal(tensor * 128, (tensor * 128).round())
    assert float(tensor.std()) == pytest.approx(math.hypot(300 / 128, 1), rel=0.2)


def mechanism(place: str, compressor: Compressor, transport: Any, **kw: Any) -> GaussianMechanism:
    memory = ErrorFeedback() if isinstance(compressor, TopK) else None
    return GaussianMechanism(
        Exchange(compressor, memory, transport=transport),
        place=place,  # type: ignore[arg-type]
        noise="discrete",
        **{"noise_multiplier": SIGMA, "max_grad_norm": C, "expected_batch_size": B, **kw},
    )


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("place", ["central", "local", "aggregate"])
def test_the_variance_is_the_one_that_was_told(place: str, ranks: int) -> None:
    world = Simulated(ranks)
    mechanisms = [mechanism(place, Identity(), transport) for transport in world]
    rounds = [m.round({"w": torch.zeros(300, 1000), "b": torch.zeros(7)}) for m in mechanisms]
    released = world.run(rounds)
    assert all(torch.equal(r.tensors["w"], released[0].tensors["w"]) for r in released)
    told = released[0].noise_variance
    plain = (ranks if place == "local" else 1) * (SIGMA * C / B) ** 2
    assert plain <= told <= 1.002 * plain
    assert float(released[0].tensors["w"].double().var()) == pytest.approx(told, rel=0.02)


@pytest.mark.parametrize(
    ("place", "compressor", "bound"),
    [("aggregate", CountSketch(ratio=0.25), 2.0), ("central", TopK(density=1 / 8), None)],
)
def test_it_goes_with_compression(place: str, compressor: Compressor, bound: float | None) -> None:
    (transport,) = Simulated(1)
    released = mechanism(place, compressor, transport).release({"w": torch.zeros(200, 400)})
    drawn = released.tensors["w"]
    assert released.noise_variance is None
    if bound:
        assert float(drawn.std()) == pytest.approx(bound * SIGMA * C / B, rel=0.03)
    assert drawn.any()


def test_shares_and_other_kinds_are_refused_and_training_takes_it() -> None:
    with pytest.raises(PrivacyError, match="the sum of discrete Gaussians is no"):
        mechanism("shares", Identity(), Simulated(2)[0])
    model = small_model()
    with pytest.raises(ValueError, match="noise must be one of gaussian, discrete"):
        private(PrivacyEngine(), model, noise="laplace")
    _, optimizer, loader = private(PrivacyEngine(), model, noise="discrete")
    assert optimizer.mechanism.noise == "discrete"
    take_steps(optimizer, loader, 3)
    assert all(p.isfinite().all() for p in model.parameters())

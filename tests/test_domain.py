"""Results scale with gradients, whatever their magnitude, dtype, compressor and route."""

import functools
import warnings

import pytest
import torch

from comm_hooks import Compressor, Identity, TopK
from tests.optim.scenarios import rarely
from tests.test_exchange import ROUTES, World

STEPS = 3
# Norms of 2^64 overflow, and those of 2^-80 vanish, if their squares are added up in float32.
EXPONENTS = (-80, 64, *rarely(-120, 120))


def results(compressor: Compressor, collective: str, exponent: int) -> list[torch.Tensor]:
    """Return all means and residuals of steps whose gradients are multiplied by a power of two."""
    options = {"ranks_per_node": 2} if collective == "hierarchical" else {}
    world = World(4, compressor, collective=collective, min_numel=16, **options)
    found = []
    for _ in range(STEPS):
        gradients = world.gradients("abcdef")
        for own in gradients:
            for gradient in own.values():
                torch.ldexp(gradient, torch.tensor(exponent), out=gradient)
        world.run(gradients)
        found += gradients[1].values()
    for exchange in world.exchanges:
        if exchange.memory:
            found += exchange.memory.state_dict().values()
    return found


cached_results = functools.cache(results)


@pytest.mark.parametrize(("compressor", "collective"), ROUTES, ids=repr)
@pytest.mark.parametrize("exponent", EXPONENTS)
def test_means_and_residuals_scale_with_gradients(
    compressor: Compressor, collective: str, exponent: int
) -> None:
    expected = cached_results(compressor, collective, 0)
    found = results(compressor, collective, exponent)
    for scaled, plain in zip(found, expected, strict=True):
        back = torch.ldexp(scaled.double(), torch.tensor(-exponent))
        torch.testing.assert_close(back, plain.double(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("way", ["identity", "warm-up", "exempt"])
def test_exact_rounds_of_16_bit_tensors_send_16_bits(
    dtype: torch.dtype, ranks: int, way: str
) -> None:
    compressor: Compressor = Identity() if way == "identity" else TopK(density=0.1)
    world = World(ranks, compressor, memory=lambda: None, min_numel=10**9 if way == "exempt" else 1)
    gradients = world.gradients("acf", dtype)
    expected = [sum(own[name].double() for own in gradients) / ranks for name in "acf"]
    world.run(gradients, compress=way != "warm-up")
    for own in gradients:
        for name, mean in zip("acf", expected, strict=True):
            assert torch.equal(own[name], mean.to(dtype))
    stats = world.exchanges[0].stats()
    assert stats["bytes_sent"] < 1.01 * stats["bytes_uncompressed"]


def test_float64_is_averaged_in_float32_and_says_so() -> None:
    world = World(2, Identity(), min_numel=1)
    gradients = world.gradients("a", torch.float64)
    expected = sum(own["a"] for own in gradients) / 2
    with pytest.warns(UserWarning, match="float64 tensors are averaged in float32"):
        world.run(gradients)
    torch.testing.assert_close(gradients[0]["a"], expected, rtol=1e-6, atol=1e-6)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        world.run(world.gradients("a", torch.float64))

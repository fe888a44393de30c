"""Noise made element by element is normal, to the end of its tails, and a matter of its key."""

from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch

from comm_hooks.kernels import gaussian
from comm_hooks.kernels.gaussian import add_gaussian_
from comm_hooks.kernels.triton import PAIRS

KEY, COUNTER = 1 << 127 | 5, 1 << 255 | 1 << 130


def drawn(count: int, std: float = 1.0, key: int = KEY, counter: int = COUNTER) -> torch.Tensor:
    values = torch.zeros(count)
    add_gaussian_(values, std, key, counter)
    return values


def test_the_distribution_is_normal() -> None:
    values = drawn(1 << 21, std=3.0).double() / 3
    for bound in (0.0, 0.1, 0.5, 1.0, 2.0, 3.0, 4.0):
        expected = torch.special.ndtr(torch.tensor(-bound, dtype=torch.float64)).item()
        for part in (values < -bound, values > bound):
            spread = (expected * (1 - expected) / len(values)) ** 0.5
            assert part.double().mean().item() == pytest.approx(expected, abs=5 * spread)
    cosines, sines = values.view(-1, 2, PAIRS).transpose(0, 1).flatten(1)
    for product in (cosines * sines, cosines**2 * sines**2 - 1):
        assert abs(product.mean()) < 5 * product.std() / len(product) ** 0.5


@pytest.mark.parametrize(("high", "low"), [(1 << 12, 0), (1, 0), (0, 1 << 40), (0, 0)])
def test_the_tail_goes_on(high: int, low: int) -> None:
    words = np.array([[high, low, 0, 0]] * PAIRS, np.uint64)

    class Chosen:
        def __init__(self, **_: Any) -> None: ...

        def random_raw(self, count: int) -> Any:
            return words.reshape(-1)

    with mock.patch.object(np.random, "Philox", Chosen):
        value = float(drawn(1, std=2.0)[0])
    u = ((high << 64) + low + 1) / 2**128
    assert value == pytest.approx(2 * (-2 * np.log(u)) ** 0.5, rel=1e-6)
    assert value > 2 * 8.4


@pytest.mark.parametrize("bit", [0, 63, 64, 127])
def test_every_half_of_key_and_counter_counts(bit: int) -> None:
    one = drawn(4096)
    others = drawn(4096, key=KEY ^ 1 << bit), drawn(4096, counter=COUNTER ^ 1 << 128 + bit)
    for other in others:
        assert abs(torch.corrcoef(torch.stack([one, other]))[0, 1]) < 0.1


def test_a_gpu_that_draws_something_else_is_refused() -> None:
    """Noise that is wrong shows nowhere: neither in the loss nor in the bytes."""
    triton_gaussian = mock.Mock()
    with (
        mock.patch.object(gaussian, "available", return_value=True),
        mock.patch.dict("sys.modules", {"comm_hooks.kernels.triton.gaussian": triton_gaussian}),
        mock.patch("comm_hooks.kernels.triton.gaussian", triton_gaussian, create=True),
        pytest.raises(RuntimeError, match="does not protect the data"),
    ):
        drawn(8)
    triton_gaussian.add_gaussian_.assert_called_once()

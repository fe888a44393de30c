"""Noise is normal far out in its tails, whatever carries it."""

from typing import Any

import numpy as np
import pytest
import torch

from comm_hooks.optim.private.noise.gaussian import add_noise_
from comm_hooks.optim.private.noise.secret import Secret, Stream

_MASK = (1 << 64) - 1
_KEY = (0x0123456789ABCDEF, 0xFEDCBA9876543210)
_MULTIPLIERS = (0xD2E7470EE14C6C93, 0xCA5A826395121157)
_WEYL = (0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
_ROUNDS = 10


def philox_that_begins_with(words: list[int]) -> np.random.Philox:
    """Return a generator whose first four outputs are these: Philox backwards."""
    inverses = [pow(m, -1, 1 << 64) for m in _MULTIPLIERS]
    for i in reversed(range(_ROUNDS)):
        key = [(k + i * w) & _MASK for k, w in zip(_KEY, _WEYL, strict=True)]
        x0, x2 = words[3] * inverses[0] & _MASK, words[1] * inverses[1] & _MASK
        high0, high2 = x0 * _MULTIPLIERS[0] >> 64, x2 * _MULTIPLIERS[1] >> 64
        words = [x0, words[0] ^ high2 ^ key[0], x2, words[2] ^ high0 ^ key[1]]
    # The counter moves on before the first output.
    counter = (sum(word << 64 * place for place, word in enumerate(words)) - 1) % (1 << 256)
    return np.random.Philox(key=np.array(_KEY, np.uint64), counter=counter)


def noise_from(bits: np.random.Philox, std: float = 1.0) -> torch.Tensor:
    stream = Secret().stream("noise", rank=0, step=0)
    stream.generator = lambda: np.random.Generator(bits)  # type: ignore[method-assign]
    tensor = torch.zeros(4)
    add_noise_([tensor], std, stream)
    return tensor


def test_philox_runs_backwards() -> None:
    words = [1, 2, _MASK, 1 << 40]
    assert philox_that_begins_with(words).random_raw(4).tolist() == words


@pytest.mark.parametrize("sigmas", [5.8, 8.5, 11.0])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_tail_goes_on(sigmas: float, sign: int) -> None:
    """A sum beyond the last possible noise shows for sure that a sample was there."""
    start, whole = 3.6541528853610088, (1 << 52) - 1
    # The outermost strip and its outermost part, in Marsaglia's tail: x - start is exponential.
    layer = whole << 9 if sign > 0 else (whole ^ 1 << 8) << 9
    beyond = -np.expm1(-start * (sigmas - start))
    words = [layer, int(beyond * 2.0**53) << 11, _MASK, 0]
    drawn = float(noise_from(philox_that_begins_with(words), std=2.0)[0])
    assert abs(drawn) == pytest.approx(2 * sigmas, rel=1e-6)


def test_the_distribution_is_normal() -> None:
    tensor = torch.zeros(1 << 22)
    add_noise_([tensor], 3.0, Secret(b"known").stream("noise", rank=0, step=0))
    drawn = tensor.double() / 3
    for bound in (0.1, 0.5, 1.0, 2.0, 3.0, 4.0):
        expected = torch.special.ndtr(torch.tensor(-bound, dtype=torch.float64)).item()
        for part in (drawn < -bound, drawn > bound):
            spread = (expected * (1 - expected) / tensor.numel()) ** 0.5
            assert part.double().mean().item() == pytest.approx(expected, abs=5 * spread)


def test_noise_does_not_depend_on_threads_pieces_or_strides() -> None:
    def drawn(*tensors: torch.Tensor) -> list[torch.Tensor]:
        add_noise_(tensors, 1.0, Secret(b"known").stream("noise", rank=0, step=0))
        return list(tensors)

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        (alone,) = drawn(torch.ones(300_000))
        torch.set_num_threads(3)
        (together,) = drawn(torch.ones(300_000))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(alone, together)
    transposed, second = drawn(torch.ones(100, 3000).t(), torch.ones(5))
    assert torch.equal(transposed, alone.view(3000, 100))
    assert not torch.equal(second, alone[:5])
    pieces = (alone - 1).split(1 << 16)[:4]
    assert torch.corrcoef(torch.stack(pieces)).triu(1).abs().max() < 0.03


def test_noise_is_rounded_once_with_what_it_is_added_to() -> None:
    """Rounded before, its least bits would be missing where large and small cancel."""
    stream: Any = Secret().stream("noise", rank=0, step=0)

    class Third:
        def standard_normal(self, count: int) -> Any:
            return np.full(count, 1 / 3)

    stream.generator = Third
    tensor = torch.full((3,), -0.333251953125)
    add_noise_([tensor], 1.0, stream)
    assert torch.equal(tensor, torch.tensor(1 / 3 - 0.333251953125).expand(3))


def test_a_stream_goes_on_from_call_to_call() -> None:
    stream: Stream = Secret().stream("noise", rank=0, step=0)
    one, other = torch.zeros(2, 1000)
    for tensor in (one, other):
        add_noise_([tensor], 1.0, stream)
    assert abs(float(torch.corrcoef(torch.stack([one, other]))[0, 1])) < 0.2

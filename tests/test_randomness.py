"""Keyed randomness: reproducible, independent, exactly balanced where it must be."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from comm_hooks.kernels.random_signs import SIGN_TABLE_SIZE, multiply_signs_, sign_table
from comm_hooks.randomness import (
    derive_key,
    derive_keys,
    fork,
    fork_all,
    mix64,
    random_below,
    random_bits,
    stratified_indices,
)


def test_the_generator_is_splitmix64() -> None:
    """The published test vector for seed 1234567: ranks of any version must agree on it."""
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert random_bits([1234567], 3)[0].tolist() == expected


def test_keys_differ_in_every_argument() -> None:
    keys = {
        derive_key(seed, step, name)
        for seed in (-1, 0, 1, 2**70)
        for step in range(50)
        for name in ("a", "b", "")
    }
    # 2**70 is 0 modulo 2**64.
    assert len(keys) == 3 * 50 * 3
    assert not set(fork(list(keys), 0)) & set(fork(list(keys), 1))


@given(
    seed=st.integers(),
    step=st.integers(0),
    names=st.lists(st.text(), min_size=1, max_size=5),
    streams=st.integers(0, 2**40),
)
def test_keys_made_together_are_those_made_one_by_one(
    seed: int, step: int, names: list[str], streams: int
) -> None:
    keys = derive_keys(seed, step, tuple(names))
    assert keys.tolist() == [derive_key(seed, step, name) for name in names]
    for stream, forked in enumerate(fork_all(keys, range(streams, streams + 3)), streams):
        expected = [mix64(key ^ mix64(stream + 1)) for key in keys.tolist()]
        assert forked.tolist() == fork(keys.tolist(), stream).tolist() == expected


def test_draws_are_uniform() -> None:
    draws = random_below([1, 2], 50_000, 10)
    counts = np.bincount(draws.ravel(), minlength=10)
    assert draws.min() == 0
    assert draws.max() == 9
    # Chi-square with 9 degrees of freedom exceeds 33.7 once in 10,000.
    assert ((counts - 10_000) ** 2 / 10_000).sum() < 33.7


@given(numel=st.integers(1, 3000), data=st.data())
def test_strata_cover_everything_once(numel: int, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, numel))
    indices, sizes = stratified_indices([3, 4], numel, count)
    assert sizes.sum() == numel
    assert sizes.max() - sizes.min() <= 1
    stops = np.cumsum(sizes)
    assert ((indices >= stops - sizes) & (indices < stops)).all()


def test_the_sign_table_is_balanced_and_looks_random() -> None:
    table = sign_table(torch.device("cpu"))[:SIGN_TABLE_SIZE]
    assert table.sum() == 0
    spectrum = torch.fft.rfft(table.double()).abs().square()
    correlation = torch.fft.irfft(spectrum) / SIGN_TABLE_SIZE
    # Two million lags of standard deviation 2^-10.5: beyond 5.5 once in 12 tables.
    assert correlation[1:].abs().max() < 5.5 / SIGN_TABLE_SIZE**0.5


def test_signs_applied_twice_cancel() -> None:
    rows = torch.randn(2, 40_000)
    signed = multiply_signs_(rows.clone(), [1, 2])
    assert not torch.equal(signed[0] / rows[0], signed[1] / rows[1])
    assert torch.equal(multiply_signs_(signed, [1, 2]), rows)

"""A compressed reduce-scatter inside the shard group, on 4 ranks."""

import pytest
import torch

from comm_hooks.wire.gathered_header import HEADER_NBYTES
from tests.frameworks import hsdp
from tests.frameworks.selection import by_default
from tests.ranks import RanksOf

RANKS = 4


def test_bytes_are_those_of_the_payloads(ranks_of: RanksOf) -> None:
    outcomes = ranks_of(RANKS).run(
        hsdp.gradients_of_steps, hsdp.flat, "identity", 2, {"exempt_bits": 32}
    )
    stats = outcomes[0]["stats"]
    assert stats["steps"] == 2
    assert all(outcome["stats"] == stats for outcome in outcomes)
    # Beside the elements: a header per module, step and other rank.
    assert stats["bytes_sent"] == stats["bytes_uncompressed"] + 2 * 3 * 3 * HEADER_NBYTES
    quantized = ranks_of(RANKS).run(
        hsdp.gradients_of_steps, hsdp.flat, "quantize", 2, {"bits": 4, "exempt_bits": 16}
    )[0]["stats"]
    assert quantized["bytes_uncompressed"] == stats["bytes_uncompressed"]
    assert quantized["compression_ratio"] > 4


@pytest.mark.parametrize("mean", [True, False])
def test_what_float16_cannot_hold_arrives_later(ranks_of: RanksOf, mean: bool) -> None:
    outcomes = ranks_of(RANKS).run(hsdp.beyond_float16, mean, 12)
    assert all(outcome["finite"] for outcome in outcomes)
    assert max(outcome["largest"] for outcome in outcomes) > 60000
    for outcome in outcomes:
        for name, arrived in outcome["arrived"].items():
            expected = sum(other["sent"][name] for other in outcomes) / RANKS
            residual = sum(other["memory"][name].double() for other in outcomes) / RANKS
            # float16 rounds each of 12 steps.
            torch.testing.assert_close(arrived + residual, expected, rtol=2e-3, atol=50)


@pytest.mark.parametrize(
    ("setup", "verify_every", "expected"),
    by_default(
        [(hsdp.inside_native, 2, 2), (hsdp.hybrid, 0, 4)],
        [(hsdp.inside_native, 1, 1), (hsdp.hybrid, 1, 1), (hsdp.hybrid, 2, 2)],
    ),
)
def test_replicas_that_drift_apart_are_told_on_all_ranks(
    ranks_of: RanksOf, setup: hsdp.Setup, verify_every: int, expected: int
) -> None:
    for steps, message in ranks_of(RANKS).run(hsdp.drift, setup, verify_every, 4):
        assert steps == expected
        assert ("have come to different weights, in 'head.weight':" in message) == (steps < 4)


def test_residuals_that_are_not_finite_are_refused(ranks_of: RanksOf) -> None:
    assert ranks_of(RANKS).run(hsdp.residual_that_is_not_finite, 0) == [False] * RANKS
    for outcome in ranks_of(RANKS).outcomes(hsdp.residual_that_is_not_finite, 1):
        assert "is not finite, and would make all gradients NaN" in str(outcome.error)


def test_the_padding_of_a_shard_is_zero(ranks_of: RanksOf) -> None:
    assert ranks_of(RANKS).run(hsdp.padding) == [True] * RANKS

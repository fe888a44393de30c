"""A compressed reduce-scatter inside the shard group, on 4 ranks."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from comm_hooks.wire.gathered_header import HEADER_NBYTES
from tests.frameworks import hsdp
from tests.frameworks.selection import by_default
from tests.ranks import Ranks

RanksOf = Callable[[int], Ranks]
RANKS = 4


def cut(gradient: torch.Tensor, shard: int) -> torch.Tensor:
    chunks = gradient.chunk(RANKS)
    return chunks[shard] if shard < len(chunks) else gradient[:0]


@pytest.mark.parametrize(
    ("setup", "options", "tolerance"),
    by_default(
        [
            (hsdp.both, {}, 1e-6),
            # FSDP asks for a sum of float16 and divides before and after.
            (hsdp.flat, {"reduce_dtype": torch.float16}, 1e-2),
        ],
        [(hsdp.flat, {}, 1e-6), (hsdp.inside_native, {}, 1e-6)],
    ),
)
def test_identity_gives_the_global_mean(
    ranks_of: RanksOf, setup: hsdp.Setup, options: dict[str, Any], tolerance: float
) -> None:
    outcomes = ranks_of(RANKS).run(hsdp.gradients_of_steps, setup, "identity", 2, options)
    for step in range(2):
        each = [hsdp.true_gradients(rank, step) for rank in range(RANKS)]
        for name in each[0]:
            expected = torch.stack([g[name] for g in each]).mean(0)
            for outcome in outcomes:
                error = (outcome["wholes"][step][name] - expected).norm() / expected.norm()
                assert error < tolerance, (name, error)


@pytest.mark.parametrize(
    ("compressor", "options"),
    by_default(
        [("topk", {"density": 0.05, "granularity": "bucket"}), ("sign", {})],
        [
            ("topk", {"density": 0.05}),
            ("quantize", {"bits": 4, "memory": "error_feedback"}),
            ("random_k", {"density": 0.2, "unbiased": False}),
        ],
    ),
)
def test_nothing_is_lost(ranks_of: RanksOf, compressor: str, options: dict[str, Any]) -> None:
    """Per shard: the mean of all ranks' true gradients = what arrived + the mean residual."""
    steps = 3
    outcomes = ranks_of(RANKS).run(hsdp.gradients_of_steps, hsdp.flat, compressor, steps, options)
    true = [[hsdp.true_gradients(rank, step) for step in range(steps)] for rank in range(RANKS)]
    compressed = set()
    for shard in range(RANKS):
        for name in true[0][0]:
            expected = sum(cut(g[name], shard) for own in true for g in own) / RANKS
            found = sum(outcomes[shard]["shards"][s][name].double() for s in range(steps))
            for outcome in outcomes:
                residual = outcome["state"]["memory"].get(f"{name}[{shard}/{RANKS}]")
                if residual is not None:
                    compressed.add(name)
                    found = found + residual.view(expected.shape) / RANKS
            torch.testing.assert_close(found, expected, rtol=0, atol=3e-6)
    assert compressed == {"row", "head.weight"} | {
        f"blocks.{block}.{layer}.weight" for block in (0, 1) for layer in (0, 2)
    }


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


def test_what_is_not_finite_on_one_rank_spoils_the_step_on_all(ranks_of: RanksOf) -> None:
    for outcome in ranks_of(RANKS).run(hsdp.not_finite_in_reduce_scatter):
        assert outcome == {"nan": True, "kept": True}


def test_a_state_of_other_shards_is_refused(ranks_of: RanksOf) -> None:
    saved = ranks_of(RANKS).run(hsdp.gradients_of_steps, hsdp.flat, "topk", 1, {"density": 0.1})
    for outcome in ranks_of(RANKS).outcomes(hsdp.load_misnamed, [o["state"] for o in saved]):
        assert isinstance(outcome.error, ValueError)
        assert "shards that this rank does not have" in str(outcome.error)

"""HSDP with a compressed all-reduce between nodes, on 4 ranks as 2 x 2."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from comm_hooks import ConfigMismatchError
from tests.frameworks import hsdp
from tests.frameworks.selection import by_default
from tests.ranks import RanksOf

WEIGHTS = [f"blocks.{b}.{i}.weight" for b in (0, 1) for i in (0, 2)]


def mean_gradients(ranks: range, step: int) -> dict[str, torch.Tensor]:
    each = [hsdp.true_gradients(rank, step) for rank in ranks]
    return {name: torch.stack([g[name] for g in each]).mean(0) for name in each[0]}


def cut(gradient: torch.Tensor, shard: int, shards: int) -> torch.Tensor:
    """Return what FSDP gives a rank of a whole tensor, by torch's own rule."""
    chunks = gradient.chunk(shards)
    return chunks[shard] if shard < len(chunks) else gradient[:0]


@pytest.mark.parametrize(
    ("setup", "options", "tolerance"),
    by_default(
        [
            (hsdp.hybrid, {"collective": "sharded"}, 1e-6),
            # FSDP asks for a sum of float16 and divides before and after.
            (hsdp.flat, {"reduce_dtype": torch.float16}, 1e-2),
        ],
        [
            (hsdp.hybrid, {"collective": "all_gather"}, 1e-6),
            (hsdp.both, {}, 1e-6),
            (hsdp.inside_native, {}, 1e-6),
        ],
    ),
)
def test_identity_gives_the_global_mean(
    ranks_of: RanksOf, setup: hsdp.Setup, options: dict[str, Any], tolerance: float
) -> None:
    outcomes = ranks_of(4).run(hsdp.gradients_of_steps, setup, "identity", 2, options)
    for step in range(2):
        for name, expected in mean_gradients(range(4), step).items():
            for outcome in outcomes:
                error = (outcome["wholes"][step][name] - expected).norm() / expected.norm()
                assert error < tolerance, (name, error)


@pytest.mark.parametrize(
    ("compressor", "setup"),
    by_default(
        [("topk", hsdp.both), ("sign", hsdp.hybrid)],
        [("topk", hsdp.hybrid), ("sign", hsdp.both), ("quantize", hsdp.hybrid)],
    ),
)
def test_replicas_get_the_same_bits(ranks_of: RanksOf, compressor: str, setup: hsdp.Setup) -> None:
    outcomes = ranks_of(4).run(hsdp.gradients_of_steps, setup, compressor, 2, {})
    for node in (0, 1):
        for step in range(2):
            ours, theirs = (outcomes[2 * n + node]["shards"][step] for n in (0, 1))
            assert list(ours) == list(theirs)
            assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize(
    ("setup", "compressor", "options"),
    by_default(
        [
            (hsdp.hybrid, "topk", {"density": 0.05, "granularity": "bucket"}),
            (hsdp.flat, "sign", {}),
        ],
        [
            (hsdp.hybrid, "sign", {"collective": "all_gather"}),
            (hsdp.hybrid, "random_k", {"density": 0.2, "unbiased": False}),
            (hsdp.flat, "topk", {"density": 0.05, "granularity": "bucket"}),
            (hsdp.flat, "quantize", {"bits": 4}),
        ],
    ),
)
def test_nothing_is_lost(
    ranks_of: RanksOf, setup: hsdp.Setup, compressor: str, options: dict[str, Any]
) -> None:
    """Per shard: the sum of the mean true gradients = what arrived + the mean residual."""
    steps, shards = 3, 2 if setup is hsdp.hybrid else 4
    options = {"memory": "error_feedback", **options}
    outcomes = ranks_of(4).run(hsdp.gradients_of_steps, setup, compressor, steps, options)
    means = [mean_gradients(range(4), step) for step in range(steps)]
    compressed = set()
    for shard in range(shards):
        for name in means[0]:
            true = sum(cut(mean[name], shard, shards) for mean in means)
            found = sum(outcomes[shard]["shards"][s][name].double() for s in range(steps))
            memories = [outcome["state"]["memory"] for outcome in outcomes]
            residuals = [m[key] for m in memories if (key := f"{name}[{shard}/{shards}]") in m]
            if residuals:
                compressed.add(name)
                found = found + torch.stack(residuals).double().mean(0).view(found.shape)
            torch.testing.assert_close(found, true, rtol=0, atol=3e-6)
    assert compressed == {*WEIGHTS, "row", "head.weight"}


def test_residuals_are_of_this_rank_s_shard_and_exemption_goes_by_the_whole_shape(
    ranks_of: RanksOf,
) -> None:
    # The shards of the head's weight, 4 x 12 and 3 x 12, and those of the block's are below 372.
    outcomes = ranks_of(4).run(
        hsdp.gradients_of_steps, hsdp.hybrid, "topk", 1, {"density": 0.05, "min_numel": 372}
    )
    for rank, outcome in enumerate(outcomes):
        sizes = {n: r.numel() for n, r in outcome["state"]["memory"].items()}
        rows = (16, 15)[rank % 2]
        assert sizes == {
            f"{name}[{rank % 2}/2]": rows * 12 if name.endswith(".0.weight") else 6 * 31
            for name in WEIGHTS
        }


def test_a_backward_pass_is_one_step(ranks_of: RanksOf) -> None:
    outcomes = ranks_of(4).run(hsdp.gradients_of_steps, hsdp.hybrid, "random_k", 3, {})
    assert [o["stats"]["steps"] for o in outcomes] == [3] * 4
    assert ranks_of(4).run(hsdp.module_used_twice) == [3] * 4


def test_gradients_are_reduced_in_bfloat16_if_fsdp_does(ranks_of: RanksOf) -> None:
    options = {"reduce_dtype": torch.bfloat16}
    outcomes = ranks_of(4).run(hsdp.gradients_of_steps, hsdp.hybrid, "identity", 1, options)
    # What crosses the wire is float32.
    assert outcomes[0]["stats"]["compression_ratio"] == pytest.approx(1.0, rel=0.1)
    for name, expected in mean_gradients(range(4), 0).items():
        error = (outcomes[0]["wholes"][0][name] - expected).norm() / expected.norm()
        assert 1e-5 < error < 1e-2


@pytest.mark.parametrize(
    "switch", by_default(["set_requires_all_reduce"], ["set_requires_gradient_sync"])
)
def test_micro_steps_exchange_once(ranks_of: RanksOf, switch: str) -> None:
    for outcome in ranks_of(4).run(hsdp.micro_steps, switch):
        assert outcome["bytes"][:2] == [0, 0] < outcome["bytes"][1:]
        assert outcome["state"]["step"] == 1
        assert outcome["state"]["memory"]
        # Exempt parameters arrive whole: the sum of the micro-steps' means.
        for name in ("head.bias", "blocks.0.0.bias"):
            expected = torch.stack([mean_gradients(range(4), step)[name] for step in range(3)]).sum(
                0
            )
            torch.testing.assert_close(
                outcome["gradients"][name].double(), expected, rtol=1e-5, atol=1e-6
            )


@pytest.mark.skipif(
    not hasattr(FSDPModule, "set_reduce_scatter_unused_params"),
    reason="this PyTorch has no set_reduce_scatter_unused_params",
)
def test_parameters_that_one_node_did_not_use(ranks_of: RanksOf) -> None:
    each = [hsdp.true_gradients(rank, 0) for rank in (0, 1)]
    for gradients in ranks_of(4).run(hsdp.unused_on_one_node):
        for name, gradient in gradients.items():
            expected = (each[0][name] + each[1][name]) / 4
            torch.testing.assert_close(gradient.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("setup", by_default([hsdp.flat], [hsdp.hybrid]))
def test_residuals_are_unscaled(ranks_of: RanksOf, setup: hsdp.Setup) -> None:
    plain = ranks_of(4).run(hsdp.scaled, setup, 1.0)
    for ours, theirs in zip(plain, ranks_of(4).run(hsdp.scaled, setup, 1024.0), strict=True):
        assert ours
        for name, residual in ours.items():
            assert torch.equal(residual, theirs[name])  # a power of 2 rounds nothing


@pytest.mark.parametrize("setup", by_default([hsdp.flat], [hsdp.hybrid]))
def test_ranks_may_send_a_part_each(ranks_of: RanksOf, setup: hsdp.Setup) -> None:
    expected = hsdp.true_gradients(0, 0)
    for gradients in ranks_of(4).run(hsdp.same_batch_everywhere, setup):
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient.double(), expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_resumed_run_ends_like_an_uninterrupted_one(ranks_of: RanksOf) -> None:
    options = {"density": 0.1}
    for setup in (hsdp.hybrid, hsdp.flat):
        whole = ranks_of(4).run(hsdp.train, setup, "topk", options, range(6))
        half = ranks_of(4).run(hsdp.train, setup, "topk", options, range(3))
        rest = ranks_of(4).run(hsdp.train, setup, "topk", options, range(3, 6), half)
        for a, b in zip(whole, rest, strict=True):
            assert all(map(torch.equal, a["weights"], b["weights"]))
            assert a["state"]["step"] == b["state"]["step"] == 6


def test_another_number_of_nodes_goes_on_with_the_mean_residual(ranks_of: RanksOf) -> None:
    saved = ranks_of(4).run(
        hsdp.gradients_of_steps,
        hsdp.hybrid,
        "topk",
        3,
        {"density": 0.1, "collective": "all_gather"},
    )
    states = [outcome["state"] for outcome in saved]
    for shard, resumed in enumerate(ranks_of(2).run(hsdp.resume_on_one_node, states)):
        assert resumed["step"] == 3
        assert set(resumed["memory"]) == set(states[shard]["memory"])
        for name, residual in resumed["memory"].items():
            mean = (states[shard]["memory"][name] + states[2 + shard]["memory"][name]) / 2
            torch.testing.assert_close(residual, mean)


def test_the_state_of_another_shard_is_refused(ranks_of: RanksOf) -> None:
    saved = ranks_of(4).run(hsdp.gradients_of_steps, hsdp.hybrid, "topk", 1, {"density": 0.1})
    for outcome in ranks_of(4).outcomes(hsdp.load_foreign_state, [o["state"] for o in saved]):
        assert isinstance(outcome.error, ValueError)
        assert "shards that this rank does not have: blocks.0.0.weight[" in str(outcome.error)


@pytest.mark.parametrize("setup", [hsdp.hybrid, hsdp.flat])
def test_what_is_not_finite_on_one_rank_spoils_the_step_of_its_shards(
    ranks_of: RanksOf, setup: hsdp.Setup
) -> None:
    outcomes = ranks_of(4).run(hsdp.not_finite_on_one_rank, setup)
    assert all(outcome["nan"] and outcome["kept"] for outcome in outcomes)


REFUSED: dict[Callable[[], Any], tuple[type[Exception], str]] = {
    hsdp.native_hsdp: (ValueError, 'fully_shard(module, mesh=mesh["shard"])'),
    hsdp.two_registrations: (ValueError, "has an all-reduce hook already"),
    hsdp.two_reduce_scatters: (ValueError, "has a custom reduce-scatter already"),
    hsdp.not_sharded: (ValueError, "Linear has no module that fully_shard was applied to"),
    hsdp.mesh_of_two_dimensions: (ValueError, "mesh must be the one dimension between nodes"),
    hsdp.mesh_inside_the_node: (ValueError, "share one copy of the model"),
    hsdp.mesh_across: (ValueError, "not all of them hold the shard of rank"),
    hsdp.other_settings_on_one_rank: (
        ConfigMismatchError,
        "seed is 0 on ranks 0, 1, 2, 5 on rank 3",
    ),
    hsdp.other_model_on_one_node: (ConfigMismatchError, "model is"),
    hsdp.changes: (ValueError, "sends changes"),
    hsdp.other_weights_in_one_shard: (
        ValueError,
        "different weights, in 'head.weight': initialize",
    ),
    hsdp.unused_parameter: (ValueError, "some of them got no gradient"),
    hsdp.divide_factor: (ValueError, "set_gradient_divide_factor"),
}


@pytest.mark.parametrize("function", REFUSED, ids=lambda function: function.__name__)
def test_all_ranks_refuse(ranks_of: RanksOf, function: Callable[[], Any]) -> None:
    kind, message = REFUSED[function]
    for outcome in ranks_of(4).outcomes(function):
        assert type(outcome.error) is kind, outcome.trace
        assert re.search(re.escape(message), str(outcome.error))
        assert "\n" not in str(outcome.error)


def test_parameters_that_nobody_averages_are_warned_of(ranks_of: RanksOf) -> None:
    for messages in ranks_of(4).run(hsdp.unsharded_parameters):
        # The row, the other block and the head; what is frozen needs no average.
        assert len(messages) == 1
        assert messages[0].endswith(
            "has 'row' and 6 more: their gradients are not averaged over ranks"
        )


def test_names_do_not_tell_of_wrappers(ranks_of: RanksOf) -> None:
    names = ranks_of(4).run(hsdp.names_of_wrapped_modules)[0]
    assert names == ["0.weight[0/2]", "1.weight[0/2]"]

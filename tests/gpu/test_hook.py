"""DDP's hook on a GPU, over NCCL: ranks agree, it does what a CPU does, and nobody waits."""

from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from comm_hooks import register
from comm_hooks.config import COMPRESSORS
from tests.gpu.training import (
    half_precision,
    one_rank_starts_again,
    resumed,
    time_behind_a_busy_gpu,
    train_on_both,
)
from tests.ranks import RanksOf

TOP_K_TWICE = {"compressor": "topk", "collective": "sharded", "value_bits": 4}
CASES: list[dict[str, Any]] = [{"compressor": name} for name in COMPRESSORS] + [
    TOP_K_TWICE,
    {"compressor": "topk", "value_bits": 1, "index_code": "rice"},
    {"compressor": "sign", "collective": "sharded"},
    {"compressor": "count_sketch", "collective": "all_gather"},
]
# What rounding changes is far apart in such a code.
COARSE: list[dict[str, Any]] = [
    {"compressor": "topk", "memory": {"type": "error_feedback", "bits": 4}},
    {"compressor": "quantize", "bits": 2, "collective": "sharded"},
]
NODES: list[dict[str, Any]] = [
    {"compressor": name, "collective": "hierarchical", "ranks_per_node": 2}
    for name in ("topk", "sign")
]


def hooked(options: dict[str, Any], model: DistributedDataParallel) -> Optimizer:
    register(model, **options)
    return torch.optim.SGD(model.parameters(), lr=0.05)


@pytest.mark.parametrize(
    ("world_size", "options"),
    [*product([2, 4], [*CASES, *COARSE]), *product([4], NODES)],
    ids=str,
)
def test_a_gpu_trains_like_a_cpu(
    nccl_ranks: RanksOf, world_size: int, options: dict[str, Any]
) -> None:
    outcomes = nccl_ranks(world_size).run(train_on_both, partial(hooked, options))
    first = outcomes[0]
    assert not torch.equal(first["cuda"], first["start"])
    assert all(torch.equal(first["cuda"], other["cuda"]) for other in outcomes[1:])
    if options["compressor"] == "gaussian_sketch":
        return  # its matrix comes from the device's own generator
    # Of numbers that differ by rounding, now and then another is among the largest.
    moved = first["cpu"] - first["start"]
    apart = (first["cuda"] - first["cpu"]).norm() / moved.norm()
    assert apart < (0.25 if options in COARSE else 0.02)


# With top-k's codes twice, two buckets are more kernels than a GPU's queue holds.
QUEUED = [case for case in [*CASES, *COARSE] if case != TOP_K_TWICE]


@pytest.mark.parametrize("options", QUEUED, ids=str)
def test_backward_does_not_wait_for_the_gpu(nccl_ranks: RanksOf, options: dict[str, Any]) -> None:
    measured = nccl_ranks(2).run(time_behind_a_busy_gpu, partial(hooked, options), 0.5)
    for seconds, is_busy in measured:
        assert is_busy, f"backward took {seconds:.2f} s"


def sgd(model: DistributedDataParallel) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


@pytest.mark.parametrize("options", [CASES[0], CASES[3], *COARSE], ids=str)
def test_a_resumed_run_ends_as_if_it_had_not_stopped(
    nccl_ranks: RanksOf, options: dict[str, Any]
) -> None:
    for whole, interrupted in nccl_ranks(2).run(resumed, sgd, options):
        assert torch.equal(whole, interrupted)


@pytest.mark.parametrize("options", [CASES[0], CASES[3]], ids=str)
def test_half_precision_with_a_loss_scale(nccl_ranks: RanksOf, options: dict[str, Any]) -> None:
    (first, scale), (other, _) = nccl_ranks(2).run(half_precision, options)
    assert torch.equal(first, other)
    assert first.isfinite().all()
    assert 1 < scale < 2.0**24, "some steps overflowed, and not all"


@pytest.mark.parametrize("options", [CASES[0], CASES[3]], ids=str)
def test_what_does_not_fit_is_refused_one_step_later(
    nccl_ranks: RanksOf, options: dict[str, Any]
) -> None:
    first, other = nccl_ranks(2).run(one_rank_starts_again, options)
    assert first == other
    assert first.startswith("step 4: ")
    assert "rank 1" in first

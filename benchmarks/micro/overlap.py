"""Steps that exchange buckets during the backward pass, against steps that stop for each of them.

Trains the GPT of ``python -m benchmarks.compare`` with small buckets in a network of capped links:
10 minutes. Steps of all ways take turns, so that other load slows all of them.
"""

import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.lab.model import GPT, VOCABULARY
from benchmarks.lab.processes import lines_from_testbed
from benchmarks.lab.runs import Settings
from benchmarks.lab.worker import largest
from benchmarks.micro.timing import print_head
from comm_hooks import register, skip_hook
from comm_hooks.collectives.base import completed
from comm_hooks.collectives.requests import Result, Round
from comm_hooks.collectives.torch_distributed import TorchDistributed

# Name -> arguments of register().
METHODS: dict[str, dict[str, Any]] = {
    "topk, all_gather": {"compressor": "topk", "density": 1 / 64, "collective": "all_gather"},
    "sign, all_gather": {"compressor": "sign", "collective": "all_gather"},
    "sign, sharded": {"compressor": "sign", "collective": "sharded"},
    "count_sketch, all_reduce": {
        "compressor": "count_sketch",
        "ratio": 0.05,
        "collective": "all_reduce",
    },
}
_WARM_UP_STEPS = 3

RANKS = (2, 4)
RATE = "100mbit"
STEPS = 12
BUCKET_MB = 1.0


class _Blocking(TorchDistributed):
    """Every bucket's round is over before backward goes on."""

    def run_async(
        self, round_: Round[Result], device: torch.device | None = None
    ) -> torch.futures.Future[Result]:
        return completed(self.run(round_))


WAYS: dict[str, type[TorchDistributed]] = {
    "blocking": _Blocking,
    "overlapped": TorchDistributed,
}


def main() -> None:
    """Print milliseconds per step."""
    print_head("ranks", "method", "buckets", "no exchange", *WAYS)
    for count in RANKS:
        for line in lines_from_testbed(count, RATE, "benchmarks.micro.overlap"):
            print(f"| {count} | {line} |", flush=True)


def worker() -> None:
    """Run one rank; rank 0 prints a row per method."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    settings = Settings()
    windows = torch.randint(VOCABULARY, (settings.batch, settings.window))
    for method, options in METHODS.items():
        models = []
        for way in (None, *WAYS.values()):
            torch.manual_seed(0)
            model = DistributedDataParallel(GPT(settings.model), bucket_cap_mb=BUCKET_MB)
            if way is None:
                model.register_comm_hook(None, skip_hook)
            else:
                state = register(model, **options)
                state.exchange._transport = way()
            models.append(model)
        for model in models:
            for _ in range(_WARM_UP_STEPS):
                _time_step(model, windows)
        times = [[_time_step(model, windows) for model in models] for _ in range(STEPS)]
        if dist.get_rank() == 0:
            per_way = zip(*times, strict=True)
            medians = [f"{1e3 * statistics.median(of_one):.0f}" for of_one in per_way]
            buckets = len(state.exchange.buckets)
            print(" | ".join([method, str(buckets), *medians]), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _time_step(model: DistributedDataParallel, windows: torch.Tensor) -> float:
    """Return the seconds of one step on the slowest rank."""
    model.zero_grad()
    dist.barrier()
    started = time.perf_counter()
    model(windows[:, :-1], windows[:, 1:]).backward()
    return largest(time.perf_counter() - started)


if __name__ == "__main__" and sys.argv[1:] == ["worker"]:
    worker()

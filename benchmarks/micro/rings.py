"""Collectives over messages between two ranks, against those of gloo itself: 3 minutes.

Over capped links of a network on this machine; both kinds take turns.
"""

import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks.lab.processes import lines_from_testbed
from benchmarks.micro.timing import print_head
from benchmarks.netns import parse_rate
from comm_hooks.collectives import TorchDistributed
from comm_hooks.collectives.requests import AllGather, AllReduce

RANKS = (2, 3, 4)
RATE = "100mbit"
SIZES = (4_000, 80_000, 2_000_000)  # bytes
TIMES = 12


def main() -> None:
    """Print milliseconds, medians; "at best": the time of the link alone."""
    print_head("ranks", "collective", "bytes", "at best", "gloo", "rings", "rings / gloo")
    for count in RANKS:
        for line in lines_from_testbed(count, RATE, "benchmarks.micro.rings"):
            print(line, flush=True)


def worker() -> None:
    """Run one rank; rank 0 prints the rows."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    transport, ranks = TorchDistributed(), dist.get_world_size()
    for nbytes in SIZES:
        payload = torch.ones(nbytes // 4)
        gathered = torch.empty(ranks * payload.numel())

        def gather(payload: torch.Tensor = payload, gathered: torch.Tensor = gathered) -> object:
            return dist.all_gather_into_tensor(gathered, payload)

        def reduce(payload: torch.Tensor = payload) -> object:
            return dist.all_reduce(payload)

        for request, of_gloo in ((AllReduce(payload), reduce), (AllGather(payload), gather)):
            calls = (of_gloo, lambda request=request: transport.perform(request))
            rows = [[_milliseconds(call) for call in calls] for _ in range(TIMES + 1)][1:]
            gloo, rings = (statistics.median(column) for column in zip(*rows, strict=True))
            ratio = statistics.median(ours / theirs for theirs, ours in rows)
            best = 8e3 * request.traffic(ranks) / parse_rate(RATE)
            if dist.get_rank() == 0:
                name = type(request).__name__
                cells = f"{best:.1f} | {gloo:.1f} | {rings:.1f} | {ratio:.2f}"
                print(f"| {ranks} | {name} | {nbytes} | {cells} |", flush=True)
    dist.barrier()


def _milliseconds(call: Callable[[], object]) -> float:
    dist.barrier()
    started = time.perf_counter()
    call()
    dist.barrier()
    return 1e3 * (time.perf_counter() - started)


if __name__ == "__main__" and sys.argv[1:] == ["worker"]:
    worker()

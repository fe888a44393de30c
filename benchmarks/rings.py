"""Collectives over messages between two ranks, against those of gloo itself.

    python -m benchmarks.rings                       # about 3 minutes, needs root and iproute2
    python -m benchmarks.rings --ranks 2 --rate 1gbit

Over capped links of a network on this machine; both kinds take turns.
"""

import statistics
import sys
import time
from collections.abc import Callable
from typing import Annotated

import torch
import torch.distributed as dist
import typer

from benchmarks.lab.output import SKIPPED
from benchmarks.lab.processes import lines_from_bed
from benchmarks.netns import NetnsError, parse_rate
from comm_hooks.collectives import TorchDistributed
from comm_hooks.collectives.requests import AllGather, AllReduce

app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def compare(
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, separated by commas.")] = "2,3,4",
    rate: Annotated[str, typer.Option(help="Of each link and direction.")] = "100mbit",
    sizes: Annotated[str, typer.Option(help="Bytes of a payload.")] = "4000,80000,2000000",
    times: Annotated[int, typer.Option(help="That each collective is timed.")] = 12,
) -> None:
    """Print a table of milliseconds, medians; "at best": what the link would need alone."""
    print("| ranks | collective | bytes | at best | gloo | rings | rings / gloo |")
    print("|---|---|---|---|---|---|---|", flush=True)
    try:
        for count in map(int, ranks.split(",")):
            for line in lines_from_bed(count, rate, "benchmarks.rings", sizes, rate, times):
                print(line, flush=True)
    except NetnsError as error:
        typer.echo(f"rings: {error}", err=True)
        raise typer.Exit(SKIPPED) from None


@app.command(hidden=True)
def worker(sizes: str, rate: str, times: int) -> None:
    """Run one rank; rank 0 prints the rows."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    transport, ranks = TorchDistributed(), dist.get_world_size()
    for nbytes in map(int, sizes.split(",")):
        payload = torch.ones(nbytes // 4)
        gathered = torch.empty(ranks * payload.numel())

        def gather(payload: torch.Tensor = payload, gathered: torch.Tensor = gathered) -> object:
            return dist.all_gather_into_tensor(gathered, payload)

        def reduce(payload: torch.Tensor = payload) -> object:
            return dist.all_reduce(payload)

        for request, of_gloo in ((AllReduce(payload), reduce), (AllGather(payload), gather)):
            calls = (of_gloo, lambda request=request: transport.perform(request))
            rows = [[_milliseconds(call) for call in calls] for _ in range(times + 1)][1:]
            gloo, rings = (statistics.median(column) for column in zip(*rows, strict=True))
            ratio = statistics.median(ours / theirs for theirs, ours in rows)
            best = 8e3 * request.traffic(ranks) / parse_rate(rate)
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


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] != "worker":
        sys.argv.insert(1, "compare")
    app()

"""How well each collective uses a capped link: what the cost model's constants come from.

    python -m benchmarks.studies.scale.collectives      # two minutes, needs root

Runs the library's requests over gloo between network namespaces, and compares with the cost model.
``efficiency`` is the bandwidth that was used over that of one transfer, less the time for latency.
"""

import statistics
import sys
import time
from datetime import timedelta
from typing import Annotated

import torch
import torch.distributed as dist
import typer

from benchmarks.lab.clock import slowest
from benchmarks.lab.processes import lines_from_testbed
from benchmarks.netns.links import NetnsError
from benchmarks.netns.measured import measure_network
from benchmarks.studies.cli import Option
from comm_hooks.collectives.requests import AllGather, AllReduce, AllToAll
from comm_hooks.collectives.torch_distributed import TorchDistributed
from comm_hooks.launchers.advise.cost_model import Collective

MODULE = "benchmarks.studies.scale.collectives"
_REPEAT = 7
_TIMEOUT = timedelta(minutes=10)
_SECONDS = (0.02, 0.3)
"""How long the transfers that are timed would take at best."""

app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def measure(
    ranks: Annotated[str, typer.Option(help="How many, separated by commas.")] = "2,4",
    rates: Annotated[str, typer.Option(help="Of the links.")] = "10mbit,100mbit,1gbit",
) -> None:
    """Print a table. Exit codes: 0, 2 for bad input, 77 where there can be no bed."""
    try:
        counts = Option("", ranks, each=int, least=2).read("ranks", ranks, False)
        print("| ranks | link | collective | sent, kB | ms | efficiency | predicted |")
        print("|---|---|---|---|---|---|---|", flush=True)
        for count in counts:
            for rate in rates.split(","):
                for line in lines_from_testbed(count, rate, MODULE, rate):
                    print(line, flush=True)
    except ValueError as error:
        typer.echo(f"collectives: {error}", err=True)
        raise typer.Exit(2) from None
    except NetnsError as error:
        typer.echo(f"collectives: {error}", err=True)
        raise typer.Exit(77) from None


@app.command(hidden=True)
def worker(rate: str) -> None:
    """Run one rank; rank 0 prints the rows."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    network = measure_network()
    transport = TorchDistributed()
    for seconds in _SECONDS:
        for request in _requests(int(seconds * network.link.bandwidth), network.ranks):
            median = statistics.median(_times(transport, request)[1:])
            collective = Collective.of(request, network.ranks)
            predicted = collective.seconds(network)
            # Without any bytes: the time for latency alone.
            idle = Collective(collective.kind, 0).seconds(network)
            efficiency = collective.traffic / (median - idle) / network.link.bandwidth
            if dist.get_rank() == 0:
                print(
                    f"| {network.ranks} | {rate} | {collective.kind} "
                    f"| {collective.traffic / 1e3:.0f} | {1e3 * median:.1f} "
                    f"| {efficiency:.2f} | {100 * (predicted / median - 1):+.0f} % |",
                    flush=True,
                )
    dist.destroy_process_group()


def _requests(nbytes: int, ranks: int) -> list[AllReduce | AllGather | AllToAll]:
    """Return one of each kind in which every rank sends about so many bytes."""
    return [
        AllReduce(torch.zeros(nbytes * ranks // (ranks - 1) // 8)),
        AllGather(torch.zeros(nbytes // (ranks - 1), dtype=torch.uint8)),
        AllToAll(torch.zeros(ranks, nbytes // (ranks - 1), dtype=torch.uint8)),
    ]


def _times(transport: TorchDistributed, request: AllReduce | AllGather | AllToAll) -> list[float]:
    times = []
    for _ in range(_REPEAT):
        dist.barrier()
        started = time.perf_counter()
        transport.perform(request)
        times.append(slowest(time.perf_counter() - started))
    return times


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] != "worker":
        sys.argv.insert(1, "measure")
    app()

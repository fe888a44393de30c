"""Steps with buckets that are exchanged during the backward pass, against steps that stop for each.

    python -m benchmarks.overlap                        # about 10 minutes, needs root
    python -m benchmarks.overlap --ranks 2 --rate 10mbit

Trains the GPT of ``python -m benchmarks.compare`` with small buckets in a network of capped links.  Steps of
all ways take turns, so that a machine that is busy with other things slows them down alike.
"""

import statistics
import sys
import time
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer
from torch.nn.parallel import DistributedDataParallel

from benchmarks.lab.clock import slowest
from benchmarks.lab.model import GPT, VOCABULARY
from benchmarks.lab.output import SKIPPED
from benchmarks.lab.processes import lines_from_bed
from benchmarks.lab.runs import Settings
from benchmarks.netns import NetnsError
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

app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)


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


@app.command()
def compare(
    ranks: Annotated[str, typer.Option(help="Numbers of ranks, separated by commas.")] = "2,4",
    rate: Annotated[str, typer.Option(help="Of each link and direction.")] = "100mbit",
    steps: Annotated[int, typer.Option(help="That are timed, of each kind.")] = 12,
    bucket_mb: Annotated[float, typer.Option(help="DDP's bucket_cap_mb.")] = 1.0,
) -> None:
    """Print a table of milliseconds per step."""
    print("| ranks | method | buckets | no exchange | " + " | ".join(WAYS) + " |")
    print("|---|---|---|---|" + "---|" * len(WAYS), flush=True)
    try:
        for count in map(int, ranks.split(",")):
            for line in lines_from_bed(count, rate, "benchmarks.overlap", steps, bucket_mb):
                print(f"| {count} | {line} |", flush=True)
    except NetnsError as error:
        typer.echo(f"overlap: {error}", err=True)
        raise typer.Exit(SKIPPED) from None


@app.command(hidden=True)
def worker(steps: int, bucket_mb: float) -> None:
    """Run one rank; rank 0 prints a row per method."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    settings = Settings()
    windows = torch.randint(VOCABULARY, (settings.batch, settings.window))
    for method, options in METHODS.items():
        models = []
        for way in (None, *WAYS.values()):
            torch.manual_seed(0)
            model = DistributedDataParallel(GPT(settings.model), bucket_cap_mb=bucket_mb)
            if way is None:
                model.register_comm_hook(None, skip_hook)
            else:
                state = register(model, **options)
                state.exchange._transport = way()
            models.append(model)
        for model in models:
            for _ in range(_WARM_UP_STEPS):
                _time_step(model, windows)
        times = [[_time_step(model, windows) for model in models] for _ in range(steps)]
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
    return slowest(time.perf_counter() - started)


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] != "worker":
        sys.argv.insert(1, "compare")
    app()

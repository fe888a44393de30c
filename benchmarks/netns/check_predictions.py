"""The predictions of ``comm-hooks advise`` against training in a network of capped links.

    python -m benchmarks.netns.check_predictions                  # about 20 minutes, needs root
    python -m benchmarks.netns.check_predictions --ranks 2 --rates 100mbit --methods all_reduce,sign

Trains the GPT of ``python -m benchmarks.compare``. Steps with and without exchange take turns, so
that other load slows both. A step ends when the slowest rank has ended it.
"""

import itertools
import json
import socket
import statistics
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Annotated, Any

import torch
import torch.distributed as dist
import typer

from benchmarks.lab.methods import Pair, parse_method, parse_methods, period_of
from benchmarks.lab.model import GPT, VOCABULARY
from benchmarks.lab.output import SKIPPED
from benchmarks.lab.processes import lines_from_testbed
from benchmarks.lab.runs import Settings
from benchmarks.lab.tasks.whole_text import text_loss
from benchmarks.lab.training import Client, closure_of
from benchmarks.lab.worker import connect, largest
from benchmarks.netns.links import NetnsError
from comm_hooks.launchers.advise import methods as advised
from comm_hooks.launchers.advise.cost_model import Link, Network, Plan
from comm_hooks.launchers.advise.recommend import make_row
from comm_hooks.launchers.output import complain, refusing
from comm_hooks.launchers.preflight import links
from comm_hooks.launchers.rates import parse_rate

METHODS = (
    "all_reduce,identity:bits=16,topk,topk:collective=sharded,sign,count_sketch,low_communication"
)
RATES = "100mbit,1gbit,10mbit"
RANKS = "2,4"
_UNCOMPRESSED = (
    "all_reduce",
    "identity:bits=16",
)  # 10 to 20 s per step at 10 Mbit: nothing new is learnt
_SLOW = ("10mbit",)
_TIMEOUT = timedelta(minutes=30)

_WARM_UP_STEPS = 3
_LEAST_STEPS = 8
_LEAST_PERIODS = 3

app = typer.Typer(pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def check(
    rates: Annotated[str, typer.Option(help="Of the links, separated by commas.")] = RATES,
    methods: Annotated[str, typer.Option(help="As in python -m benchmarks.compare.")] = METHODS,
    ranks: Annotated[str, typer.Option(help="How many, separated by commas.")] = RANKS,
    limit: Annotated[float, typer.Option(help="Percent by which a prediction may be off.")] = 15.0,
) -> None:
    """Print a table; exit with 1 if a prediction is off by more than --limit."""
    with refusing("check_predictions"):
        parse_methods(methods)
        counts = [int(count) if count.isdecimal() else 0 for count in ranks.split(",")]
        if min(counts) < 2:
            raise ValueError(f"--ranks {ranks!r}: write numbers of at least 2, as in 2,4")
        for rate in rates.split(","):
            parse_rate(rate)
    print("| ranks | link | method | without exchange, ms | predicted, ms | measured, ms | error |")
    print("|---|---|---|---|---|---|---|")
    worst = 0.0
    try:
        for count, rate in itertools.product(counts, rates.split(",")):
            for row in _measure_in_bed(count, rate, methods):
                off = 100 * (row["predicted"] / row["measured"] - 1)
                worst = max(worst, abs(off))
                print(
                    f"| {count} | {rate} | `{row['method']}` | {row['control']:.0f} "
                    f"| {row['predicted']:.0f} | {row['measured']:.0f} | {off:+.0f} % |",
                    flush=True,
                )
    except NetnsError as error:
        complain("check_predictions", error)
        raise typer.Exit(SKIPPED) from None
    raise typer.Exit(worst > limit)


@app.command(hidden=True)
def worker(methods: str) -> None:
    """Run one rank; rank 0 prints a JSON object per method."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=_TIMEOUT)
    for row in _compare([parse_method(spec) for spec in methods.split(",")]):
        if dist.get_rank() == 0:
            print(json.dumps(row), flush=True)
    dist.destroy_process_group()


def _measure_in_bed(ranks: int, rate: str, methods: str) -> Iterator[dict[str, Any]]:
    specs = [m.spec for m in parse_methods(methods)]
    if rate in _SLOW:
        specs = [spec for spec in specs if spec not in _UNCOMPRESSED]
    module = "benchmarks.netns.check_predictions"
    return map(json.loads, lines_from_testbed(ranks, rate, module, ",".join(specs)))


def _compare(methods: list[Pair]) -> Iterator[dict[str, Any]]:
    """Predict and measure each method. Collective."""
    device = torch.device("cpu")
    settings = Settings()
    network = _measure_network()
    shapes = [tuple(p.shape) for p in GPT(settings.model).parameters()]
    planner = advised.Planner(shapes, network.ranks, device)
    control = connect(parse_method("none"), settings)
    _time_steps(control, settings, _WARM_UP_STEPS)
    for method in methods:
        trainer = connect(method, settings)
        period = period_of(trainer)
        _time_steps(trainer, settings, max(_WARM_UP_STEPS, period))
        candidate = advised.parse_method(method.spec)
        plans = [Plan()] * network.ranks
        dist.all_gather_object(plans, planner.plan(candidate))
        plan = max(plans, key=lambda each: each.arithmetic)
        optimizer = largest(planner.adamw_seconds())
        without, measured = _time_in_turns([control, trainer], settings, period)
        row = make_row(candidate, plan, network, without, optimizer)
        yield {
            "method": method.spec,
            "control": 1e3 * without,
            "predicted": 1e3 * row.seconds,
            "measured": 1e3 * measured,
        }


def _measure_network() -> Network:
    """Return the network by its link from rank 0 to rank 1: all links are the same. Collective."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    listener = links.Listener(socket.gethostbyname(f"rank{rank}"))
    ports: list[int] = [0] * ranks
    dist.all_gather_object(ports, listener.port)
    measured = links.Link(0, 1)
    if rank == 0:
        links.send(measured, "rank1", ports[1])
    elif rank == 1:
        listener.receive(measured)
    listener.close()
    found = [measured]
    dist.broadcast_object_list(found)
    (link,) = found
    if not link.bits_per_second or not link.round_trip:
        raise RuntimeError(f"the link between the first ranks cannot be measured: {link.error}")
    return Network(ranks, Link(link.bits_per_second / 8, link.round_trip / 2))


def _time_in_turns(trainers: list[Client], settings: Settings, period: int) -> list[float]:
    """Return the seconds of a step of each trainer: the median over periods of their means."""
    means: list[list[float]] = [[] for _ in trainers]
    for _ in range(max(_LEAST_PERIODS, _LEAST_STEPS // period)):
        durations = [
            [_time_steps(trainer, settings, 1)[0] for trainer in trainers] for _ in range(period)
        ]
        for of_trainer, steps in zip(means, zip(*durations, strict=True), strict=True):
            of_trainer.append(statistics.mean(steps))
    return [statistics.median(of_trainer) for of_trainer in means]


def _time_steps(client: Client, settings: Settings, count: int) -> list[float]:
    """Return the seconds of each of ``count`` steps on the slower rank."""
    windows = torch.randint(VOCABULARY, (settings.batch, settings.window))
    batch = windows[:, :-1], windows[:, 1:]
    durations = []
    for _ in range(count):
        dist.barrier()
        started = time.perf_counter()
        client.steps.step(closure_of(text_loss, client.model, batch))
        durations.append(largest(time.perf_counter() - started))
    return durations


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] != "worker":
        sys.argv.insert(1, "check")
    app()

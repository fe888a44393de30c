"""The ``advise`` command: measure, predict, recommend."""

import math
import re
import signal
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.text import Text

from comm_hooks.launchers.advise.advice import METHODS, Case, advise_on, choose
from comm_hooks.launchers.advise.cost_model import TCP_SHARE, Link, Network
from comm_hooks.launchers.advise.links import measure_links, network_of
from comm_hooks.launchers.advise.plot import write_plot
from comm_hooks.launchers.advise.ranks import Place, find_place, joined
from comm_hooks.launchers.advise.rehearsal import Rehearsals, of_slowest_rank, slowest
from comm_hooks.launchers.advise.report import (
    print_choice,
    print_links,
    print_rows,
    print_zero_notes,
)
from comm_hooks.launchers.advise.step import Step
from comm_hooks.launchers.lab.methods import Method, parse_methods
from comm_hooks.launchers.output import make_console

_BAD_INPUT = 2
_DEFAULT_LATENCY_MS = 0.1
_BANDWIDTH = re.compile(r"(\d+(?:\.\d+)?)(k|m|g)?bit")


def advise(
    params: Annotated[
        float | None, typer.Option(help="Parameters of the model, such as 4.8e6.")
    ] = None,
    step_ms: Annotated[
        float | None, typer.Option(help="Milliseconds of a step without exchange.")
    ] = None,
    step: Annotated[
        Path | None,
        typer.Option(help="What measure_step(model, step).save(FILE) wrote, in place of both."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Of gradients, with --params.")] = "float32",
    methods: Annotated[
        str, typer.Option(metavar="LIST", help="As in compare, separated by commas.")
    ] = METHODS,
    ranks: Annotated[
        int | None, typer.Option(help="Predict for this many ranks. [default: those that run]")
    ] = None,
    bandwidth: Annotated[
        str | None, typer.Option(help="Of the link, such as 100mbit, instead of measuring it.")
    ] = None,
    latency_ms: Annotated[
        float | None, typer.Option(help="Of the link, one way, with --bandwidth. [default: 0.1]")
    ] = None,
    zero_stage: Annotated[int, typer.Option(help="Of DeepSpeed: 0, 1 or 2.")] = 0,
    max_loss: Annotated[
        float, typer.Option(help="Recommend no method known to cost more than this in loss.")
    ] = 0.03,
    plot: Annotated[Path, typer.Option(help="Plot of step time against bandwidth.")] = Path(
        "advise.png"
    ),
    timeout: Annotated[
        float, typer.Option(help="Seconds to wait for other ranks before giving up.")
    ] = 120.0,
) -> None:
    """Predict the step time of every method on your link, and recommend one.

    Run it as you run training, one process per rank: torchrun --no-python ... comm-hooks advise,
    mpirun ... comm-hooks advise, or srun. It measures the links and what each method's arithmetic
    takes here. In a single process give --ranks and --bandwidth. Exit codes: 0, or 2 for bad input
    and for ranks that cannot be reached.
    """
    place = Place()
    try:
        place = find_place()
        chosen = parse_methods(methods)
        model = _step(params, step_ms, step, dtype)
        given = _given_network(bandwidth, latency_ms, ranks or place.world_size)
        _check(ranks, zero_stage, timeout, place, given, plot)
        if given:
            if place.rank == 0:
                _advise(model, chosen, given, zero_stage, max_loss, plot)
            return
        # A launcher that ends its ranks should not have to insist.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        backend = "nccl" if torch.cuda.is_available() else "gloo"
        with joined(place, backend, timeout):
            _measure_and_advise(place, model, chosen, backend, ranks, zero_stage, max_loss, plot)
    except ValueError as error:
        # What all ranks find alike, one says; that others are out of reach, each says for itself.
        if place.rank == 0 or "did not reach" in str(error):
            typer.echo(f"comm-hooks advise: {error}", err=True)
        raise typer.Exit(_BAD_INPUT) from None


def _step(params: float | None, step_ms: float | None, path: Path | None, dtype: str) -> Step:
    if path is not None:
        if params is not None or step_ms is not None:
            raise ValueError("--step has the model and its time: leave out --params and --step-ms")
        return Step.load(path)
    if params is None or step_ms is None:
        raise ValueError("give --params and --step-ms, or --step from measure_step()")
    if not (1 <= params < math.inf and params == int(params)):
        raise ValueError(f"--params must be a positive whole number, got {params:g}")
    if not 0 < step_ms < math.inf:
        raise ValueError(f"--step-ms must be positive, got {step_ms:g}")
    return Step.of_numel(int(params), step_ms, dtype)


def _given_network(bandwidth: str | None, latency_ms: float | None, ranks: int) -> Network | None:
    """Return the network that the options describe, or None if it is to be measured."""
    if bandwidth is None:
        if latency_ms is not None:
            raise ValueError("--latency-ms goes with --bandwidth: without, both are measured")
        return None
    found = _BANDWIDTH.fullmatch(bandwidth)
    if not found or float(found[1]) == 0:
        raise ValueError(f"--bandwidth {bandwidth!r}: write it as 100mbit or 2.5gbit")
    if latency_ms is None:
        latency_ms = _DEFAULT_LATENCY_MS
    if not 0 <= latency_ms < math.inf:
        raise ValueError(f"--latency-ms must not be negative, got {latency_ms:g}")
    bits = float(found[1]) * {None: 1.0, "k": 1e3, "m": 1e6, "g": 1e9}[found[2]]
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    return Network(ranks, Link(bits / 8 * TCP_SHARE, latency_ms / 1e3), backend=backend)


def _check(
    ranks: int | None,
    zero_stage: int,
    timeout: float,
    place: Place,
    given: Network | None,
    plot: Path,
) -> None:
    if ranks is not None and ranks < 2:
        raise ValueError(f"--ranks must be at least 2 to have anything to exchange, got {ranks}")
    if zero_stage not in (0, 1, 2):
        raise ValueError(
            f"--zero-stage must be 0, 1 or 2, got {zero_stage}: stage 3 gathers parameters all "
            "through the step, which is not predicted here"
        )
    if timeout <= 0:
        raise ValueError(f"--timeout must be positive, got {timeout:g}")
    if not plot.absolute().parent.is_dir():
        raise ValueError(f"--plot {plot}: there is no such folder")
    if (given.ranks if given else place.world_size) == 1:
        raise ValueError(
            "there is one rank only, so there is nothing to compress between: start one process "
            "per rank (torchrun --no-python ... comm-hooks advise), or give --ranks and --bandwidth"
        )


def _measure_and_advise(
    place: Place,
    model: Step,
    methods: list[Method],
    backend: str,
    ranks: int | None,
    zero_stage: int,
    max_loss: float,
    plot: Path,
) -> None:
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", place.local_rank)
        torch.cuda.set_device(device)
    console = make_console(quiet=place.rank > 0)
    links, nodes = measure_links(place, device)
    print_links(links, console)
    network = network_of(links, nodes, backend)
    if ranks:
        network = replace(network, ranks=ranks)
    _advise(model, methods, network, zero_stage, max_loss, plot, device=device, console=console)


def _advise(
    model: Step,
    methods: list[Method],
    network: Network,
    zero_stage: int,
    max_loss: float,
    plot: Path,
    *,
    device: torch.device | None = None,
    console: Console | None = None,
) -> None:
    """Play every method, on all ranks at once as in training, and print what comes out."""
    if device is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    console = console or make_console()
    rehearsals = Rehearsals(model, network.ranks, device, network.ranks_per_node)
    case = Case(model, network, slowest(rehearsals.optimizer_seconds()), zero_stage)
    plans = []
    left_out = {}
    for method in methods:
        try:
            case.check(method)
            plan = rehearsals.plan(method)
        except ValueError as error:
            left_out[method.spec] = str(error)
        else:
            plans.append((method, of_slowest_rank(plan)))
    rows = advise_on(case, plans)
    print_rows(case, rows, left_out, console)
    if zero_stage:
        print_zero_notes(case, console)
    print_choice(case, rows, choose(rows, max_loss), max_loss, console)
    if not console.quiet:
        write_plot(case, rows, plot)
        console.print(Text(f"Plot: {plot}"), soft_wrap=True)

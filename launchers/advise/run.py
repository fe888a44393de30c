"""What ``comm-hooks advise`` does: measure, predict, recommend."""

import math
import signal
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import torch
import typer
from rich.console import Console

from benchmarks.lab.methods import Method, parse_methods
from comm_hooks.launchers.advise.advice import Advice, Case, advise_on, choose
from comm_hooks.launchers.advise.cost_model import TCP_SHARE, Link, Network
from comm_hooks.launchers.advise.links import measure_links, network_of
from comm_hooks.launchers.advise.plot import check_plot, write_plot
from comm_hooks.launchers.advise.ranks import joined
from comm_hooks.launchers.advise.rehearsal import Rehearsals, of_slowest_rank, slowest
from comm_hooks.launchers.advise.report import (
    print_choice,
    print_links,
    print_rows,
    print_zero_notes,
)
from comm_hooks.launchers.advise.step import Step
from comm_hooks.launchers.output import BAD_INPUT, complain, make_console, require_positive, say
from comm_hooks.launchers.place import Place, find_place
from comm_hooks.launchers.rates import parse_rate

_DEFAULT_LATENCY_MS = 0.1


def advise(
    *,
    params: float | None,
    step_ms: float | None,
    step: Path | None,
    dtype: str,
    methods: str,
    ranks: int | None,
    bandwidth: str | None,
    latency_ms: float | None,
    zero_stage: int,
    tokens_per_parameter: float | None,
    batch: int | None,
    min_share: float,
    plot: Path,
    timeout: float,
) -> None:
    """Do what ``comm-hooks advise --help`` says."""
    place = Place()
    try:
        place = find_place()
        chosen = parse_methods(methods)
        model = _step(params, step_ms, step, dtype)
        given = _given_network(bandwidth, latency_ms, ranks or place.world_size)
        require_positive(
            {
                "--tokens-per-parameter": tokens_per_parameter,
                "--batch": batch,
                "--min-share": min_share,
                "--timeout": timeout,
            }
        )
        if tokens_per_parameter == math.inf:
            raise ValueError("--tokens-per-parameter must be finite, got inf")
        _check(ranks, zero_stage, place, given, plot)
        if given and place.rank:
            return
        console = make_console(quiet=place.rank > 0)
        device = torch.device("cpu")
        if torch.cuda.is_available():
            device = torch.device("cuda", place.local_rank)
            torch.cuda.set_device(device)
        if not given:
            # A launcher that ends its ranks should not have to insist.
            signal.signal(signal.SIGTERM, signal.default_int_handler)
        with nullcontext() if given else joined(place, _backend(), timeout):
            network = given or _measure(device, ranks, console)
            rehearsals = Rehearsals(model, network.ranks, device, network.ranks_per_node)
            case = Case(
                model,
                network,
                slowest(rehearsals.optimizer_seconds()),
                zero_stage,
                tokens_per_parameter,
                batch,
            )
            rows = _advise(case, chosen, rehearsals, console)
        if zero_stage:
            print_zero_notes(case, console)
        print_choice(case, rows, choose(rows, min_share), min_share, console)
        if place.rank == 0:
            write_plot(case, rows, plot)
            say(f"Plot: {plot}", console)
    except ValueError as error:
        # What all ranks find alike, one says; that others are out of reach, each says for itself.
        if place.rank == 0 or "did not reach" in str(error):
            complain("comm-hooks advise", error)
        raise typer.Exit(BAD_INPUT) from None


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
    try:
        bits = parse_rate(bandwidth)
    except ValueError:
        raise ValueError(f"--bandwidth {bandwidth!r}: write it as 100mbit or 2.5gbit") from None
    if latency_ms is None:
        latency_ms = _DEFAULT_LATENCY_MS
    if not 0 <= latency_ms < math.inf:
        raise ValueError(f"--latency-ms must not be negative or infinite, got {latency_ms:g}")
    return Network(ranks, Link(bits / 8 * TCP_SHARE, latency_ms / 1e3), backend=_backend())


def _backend() -> str:
    return "nccl" if torch.cuda.is_available() else "gloo"


def _check(
    ranks: int | None,
    zero_stage: int,
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
    check_plot(plot)
    if (given.ranks if given else place.world_size) == 1:
        raise ValueError(
            "there is one rank only, so there is nothing to compress between: start one process "
            "per rank (torchrun --no-python ... comm-hooks advise), or give --ranks and --bandwidth"
        )


def _measure(device: torch.device, ranks: int | None, console: Console) -> Network:
    links, nodes = measure_links(device)
    print_links(links, console)
    network = network_of(links, nodes, _backend())
    return replace(network, ranks=ranks) if ranks else network


def _advise(
    case: Case, methods: list[Method], rehearsals: Rehearsals, console: Console
) -> list[Advice]:
    """Play every method, on all ranks at once as in training, and print what comes out."""
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
    return rows

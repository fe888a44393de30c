"""The options of ``comm-hooks advise``, and the function that runs it."""

from __future__ import annotations

import math
import signal
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

# torch takes seconds to import, and --help needs none of it.
if TYPE_CHECKING:
    from comm_hooks.launchers.advise.cost_model import Network
    from comm_hooks.launchers.advise.step import Step
    from comm_hooks.launchers.environment import LauncherEnvironment

METHODS = (
    "all_reduce,none,bf16,identity:bits=16,powersgd,quantize:bits=2,sign+local_variance_adam,"
    "low_communication,low_communication:bits=0.12"
)
_DEFAULT_LATENCY_MS = 0.1
_MOST_BUSY = 0.2


def advise(
    params: Annotated[
        float | None, typer.Option(help="Parameters of the model, such as 4.8e6.")
    ] = None,
    step_ms: Annotated[
        float | None, typer.Option(help="Milliseconds of a step without exchange.")
    ] = None,
    step: Annotated[
        Path | None,
        typer.Option(help="The file of measure_step(model, step).save(FILE), instead of both."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="Dtype of gradients, with --params.")] = "float32",
    methods: Annotated[
        str, typer.Option(metavar="LIST", help="Methods to compare, separated by commas.")
    ] = METHODS,
    ranks: Annotated[
        int | None, typer.Option(help="Predict for this many ranks. [default: those that run]")
    ] = None,
    bandwidth: Annotated[
        str | None, typer.Option(help="Rate of the link, as 100mbit, instead of measuring it.")
    ] = None,
    latency_ms: Annotated[
        float | None, typer.Option(help="One-way latency, with --bandwidth. [default: 0.1]")
    ] = None,
    zero_stage: Annotated[int, typer.Option(help="ZeRO stage of DeepSpeed: 0, 1 or 2.")] = 0,
    tokens_per_parameter: Annotated[
        float | None,
        typer.Option(help="Length of the training. [default: the worst that was measured]"),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(help="Samples per step and rank. [default: the worst that was measured]"),
    ] = None,
    min_share: Annotated[
        float, typer.Option(help="Recommend only methods known to keep this part of the gain.")
    ] = 0.85,
    timeout: Annotated[
        float, typer.Option(help="Seconds to wait for other ranks before giving up.")
    ] = 120.0,
) -> None:
    """Predict the step time of every method on your link, and recommend one.

    Run it as you run training, one process per rank: torchrun --no-python ... comm-hooks advise,
    mpirun ... comm-hooks advise, or srun. It measures the links and the arithmetic of each method.
    In a single process give --ranks and --bandwidth. Exit codes: 0, or 2 for bad input and for
    ranks that cannot be reached.
    """
    import torch

    from comm_hooks.launchers.advise import links
    from comm_hooks.launchers.advise.methods import Planner, parse_methods
    from comm_hooks.launchers.advise.recommend import Case, choose, make_row
    from comm_hooks.launchers.advise.report import print_choice, print_links, print_rows
    from comm_hooks.launchers.environment import LauncherEnvironment, detect_environment
    from comm_hooks.launchers.output import BAD_INPUT, complain, make_console, require_positive, say

    process = LauncherEnvironment()
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    try:
        process = detect_environment()
        chosen = parse_methods(methods)
        model = _read_step(params, step_ms, step, dtype)
        network = _given_network(bandwidth, latency_ms, ranks or process.world_size, backend)
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
        _check(ranks, zero_stage, process, network)
        if network and process.rank:
            return
        console = make_console(quiet=process.rank > 0)
        device = torch.device("cpu")
        if backend == "nccl":
            device = torch.device("cuda", process.local_rank)
            torch.cuda.set_device(device)
        if not network:
            # So that a launcher can end its ranks at once.
            signal.signal(signal.SIGTERM, signal.default_int_handler)
        with nullcontext() if network else links.joined(process, backend, timeout):
            if not network:
                network, measured = links.measure_links(device, backend)
                print_links(measured, console)
                network = replace(network, ranks=ranks) if ranks else network
            planner = Planner(model, network.ranks, device)
            adamw = max(links.gather(planner.adamw_seconds()))
            case = Case(model, network, adamw, zero_stage, tokens_per_parameter, batch)
            rows, left_out = [], {}
            for method in chosen:
                try:
                    case.check(method)
                    plan = planner.plan(method)
                except ValueError as error:
                    left_out[method.spec] = str(error)
                    continue
                # A step waits for the slowest rank.
                slowest = max(links.gather(plan), key=lambda each: each.arithmetic)
                rows.append(make_row(case, method, slowest))
            busy = max(links.gather(planner.busy_share))
        print_rows(case, rows, left_out, console)
        if busy > _MOST_BUSY:
            say(
                f"* Other programs had the processor for {busy:.0%} of the measurement, so codecs "
                "seem slower than they are: measure again on an idle device.",
                console,
            )
        print_choice(rows, choose(rows, min_share), min_share, console)
    except ValueError as error:
        # All ranks find the same bad input; that others cannot be reached each rank reports.
        if process.rank == 0 or "did not reach" in str(error):
            complain("comm-hooks advise", error)
        raise typer.Exit(BAD_INPUT) from None


def _read_step(params: float | None, step_ms: float | None, path: Path | None, dtype: str) -> Step:
    from comm_hooks.launchers.advise.step import Step

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


def _given_network(
    bandwidth: str | None, latency_ms: float | None, ranks: int, backend: str
) -> Network | None:
    """Return the network of the options, or None if it is to be measured."""
    from comm_hooks.launchers.advise.cost_model import TCP_SHARE, Link, Network
    from comm_hooks.launchers.links import parse_rate

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
    return Network(ranks, Link(bits / 8 * TCP_SHARE, latency_ms / 1e3), backend=backend)


def _check(
    ranks: int | None, zero_stage: int, process: LauncherEnvironment, given: Network | None
) -> None:
    if ranks is not None and ranks < 2:
        raise ValueError(f"--ranks must be at least 2 to have anything to exchange, got {ranks}")
    if zero_stage not in (0, 1, 2):
        raise ValueError(
            f"--zero-stage must be 0, 1 or 2, got {zero_stage}: stage 3 gathers parameters "
            "throughout the step, which is not predicted here"
        )
    if (given.ranks if given else process.world_size) == 1:
        raise ValueError(
            "there is one rank only, so there is nothing to compress between: start one process "
            "per rank (torchrun --no-python ... comm-hooks advise), or give --ranks and --bandwidth"
        )

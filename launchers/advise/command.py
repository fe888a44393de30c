"""The options of ``comm-hooks advise``, and the function that runs it."""

from __future__ import annotations

import math
from typing import Annotated

import typer

METHODS = (
    "all_reduce,none,identity:bits=16,quantize:bits=2,sign+local_variance_adam,"
    "low_communication,low_communication:bits=0.12"
)


def advise(
    params: Annotated[float, typer.Option(help="Parameters of the model, such as 4.8e6.")],
    step_ms: Annotated[float, typer.Option(help="Milliseconds of a step without exchange.")],
    ranks: Annotated[int, typer.Option(help="Number of ranks.")],
    bandwidth: Annotated[
        str, typer.Option(help="Of the slowest link between nodes, such as 100mbit.")
    ],
    latency_ms: Annotated[float, typer.Option(help="Of that link, one way.")] = 0.1,
    ranks_per_node: Annotated[int, typer.Option(help="Ranks that share a node's link.")] = 1,
    half: Annotated[bool, typer.Option("--half", help="Gradients have 16 bits, not 32.")] = False,
    methods: Annotated[
        str, typer.Option(metavar="LIST", help="Methods to compare, separated by commas.")
    ] = METHODS,
    min_share: Annotated[
        float, typer.Option(help="Recommend only methods known to keep this part of the gain.")
    ] = 0.8,
) -> None:
    """Predict the step time of every method on your link, and recommend one.

    Run it on one idle machine of the training: it measures the arithmetic of each method there.
    comm-hooks preflight measures the links. Exit codes: 0, or 2 for bad input.
    """
    import torch

    from comm_hooks.launchers.advise.cost_model import TCP_SHARE, Link, Network, matrix_shapes
    from comm_hooks.launchers.advise.methods import Planner, parse_methods
    from comm_hooks.launchers.advise.recommend import choose, make_row, print_choice, print_rows
    from comm_hooks.launchers.output import make_console, refusing, require_positive, say
    from comm_hooks.launchers.rates import parse_rate

    with refusing("comm-hooks advise"):
        chosen = parse_methods(methods)
        require_positive({"--step-ms": step_ms, "--ranks-per-node": ranks_per_node})
        if not 0 < min_share <= 1:
            raise ValueError(f"--min-share must lie in (0, 1], got {min_share:g}")
        if not (1 <= params < math.inf and params == int(params)):
            raise ValueError(f"--params must be a positive whole number, got {params:g}")
        if step_ms == math.inf:
            raise ValueError("--step-ms must be finite, got inf")
        if ranks < 2:
            raise ValueError(f"--ranks must be at least 2 to exchange anything, got {ranks}")
        if not 0 <= latency_ms < math.inf:
            raise ValueError(f"--latency-ms must not be negative or infinite, got {latency_ms:g}")
        try:
            link = Link(parse_rate(bandwidth) / 8 * TCP_SHARE, latency_ms / 1e3)
        except ValueError:
            raise ValueError(f"--bandwidth {bandwidth!r}: write it as 100mbit or 2.5gbit") from None
        on_gpu = torch.cuda.is_available()
        network = Network(ranks, link, ranks_per_node, "nccl" if on_gpu else "gloo")
        device = torch.device("cuda" if on_gpu else "cpu")
        planner = Planner(matrix_shapes(int(params)), ranks, device, 2 if half else 4)
        adamw = planner.adamw_seconds()
        rows = [
            make_row(method, planner.plan(method), network, step_ms / 1e3, adamw)
            for method in chosen
        ]
    console = make_console()
    say(
        f"{params / 1e6:.3g} M parameters, {step_ms:.4g} ms per step without exchange, {ranks} "
        f"ranks, {network.backend}, {bandwidth} with {latency_ms:g} ms",
        console,
    )
    print_rows(rows, network, console)
    print_choice(rows, choose(rows, min_share), min_share, console)

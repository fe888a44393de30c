"""``comm-hooks advise``."""

from pathlib import Path
from typing import Annotated

import typer

METHODS = (
    "all_reduce,none,bf16,identity:bits=16,powersgd,count_sketch,topk,sign,"
    "sign+local_variance_adam,local_variance_adam,low_communication:bits=0.12"
)


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
    tokens_per_parameter: Annotated[
        float | None,
        typer.Option(help="Of the whole training. [default: the worst that was measured]"),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(help="Samples per step and rank. [default: the worst that was measured]"),
    ] = None,
    min_share: Annotated[
        float,
        typer.Option(help="Of what exchanging is worth; recommend nothing known to keep less."),
    ] = 0.85,
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
    from comm_hooks.launchers.advise import run

    run.advise(
        params=params,
        step_ms=step_ms,
        step=step,
        dtype=dtype,
        methods=methods,
        ranks=ranks,
        bandwidth=bandwidth,
        latency_ms=latency_ms,
        zero_stage=zero_stage,
        tokens_per_parameter=tokens_per_parameter,
        batch=batch,
        min_share=min_share,
        plot=plot,
        timeout=timeout,
    )

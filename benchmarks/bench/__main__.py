"""``python -m benchmarks.bench``."""

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.lab.command_options import Data, Hooks, Seed

DEFAULT_METHODS = (
    "none,all_reduce,bf16,powersgd:rank=1,powersgd:rank=2,powersgd:rank=4,identity+local_adamw,"
    "low_communication,sign+local_variance_adam,local_variance_adam,"
    "topk:density=1/256:min_ndim=1:min_numel=1+local_variance_adam,"
    "local_adamw:fragments=8,topk:density=1/64+local_adamw:fragments=8"
)
DEFAULT_RATES = "10mbit,100mbit,1gbit"


def bench(
    rate: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help="Rates of each direction of each link, as tc writes them, separated by commas. "
            "Links without a cap are measured in any case.",
        ),
    ] = DEFAULT_RATES,
    hooks: Hooks = DEFAULT_METHODS,
    nproc: Annotated[int, typer.Option(help="Ranks, each in a network namespace of its own.")] = 2,
    steps: Annotated[
        int | None,
        typer.Option(help="Training steps per method, for the loss. [default: 150, quick: 60]"),
    ] = None,
    timing_steps: Annotated[
        int, typer.Option(help="Timed steps per method and rate; fewer where they take long.")
    ] = 16,
    seed: Seed = 0,
    data: Data = None,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("comm-hooks-bench"),
    quick: Annotated[
        bool, typer.Option("--quick", help="A smaller model and fewer steps.")
    ] = False,
    redraw: Annotated[
        bool,
        typer.Option(
            "--redraw",
            help="Run nothing: make results.md and the plots again from results.json in --out.",
        ),
    ] = False,
    timeout: Annotated[
        float,
        typer.Option(
            help="Seconds without progress after which a method is given up, beyond what an "
            "uncompressed step takes at the slowest rate."
        ),
    ] = 120,
) -> None:
    """Train a small GPT over links of given rates with each method, and compare the times.

    Every rank is in a network namespace, joined to the others by a virtual switch with capped
    links. Needs Linux, root and iproute2. Loss comes from one training per method over links
    without a cap; then steps are timed at each rate, in turns with steps that exchange nothing.
    Writes results.json, results.md, the plots and the logs to --out. A method that fails costs its
    own row only. Exit codes: 0, 1 if a method failed, 2 for bad input (nothing is run), 77 where
    there can be no namespaces, 130 if interrupted (what is finished is reported).
    """
    from benchmarks.bench import run

    run.bench(
        rate=rate,
        hooks=hooks,
        nproc=nproc,
        steps=steps,
        timing_steps=timing_steps,
        seed=seed,
        data=data,
        out=out,
        quick=quick,
        redraw=redraw,
        timeout=timeout,
    )


if __name__ == "__main__":
    typer.run(bench)

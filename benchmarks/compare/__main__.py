"""``python -m benchmarks.compare``."""

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.lab.command_options import Data, Hooks, Seed, Steps

# Both controls, what is recommended, and what it is not.
DEFAULT_METHODS = "all_reduce,none,low_communication,sign+local_variance_adam,topk"


def compare(
    data: Data = None,
    hooks: Hooks = DEFAULT_METHODS,
    nproc: Annotated[int, typer.Option(help="Ranks, each a process on this machine.")] = 2,
    steps: Steps = None,
    seed: Seed = 0,
    out: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("comm-hooks-report"),
    quick: Annotated[
        bool,
        typer.Option("--quick", help="A smaller model, fewer steps: a minute or so."),
    ] = False,
    eval_every: Annotated[
        int | None, typer.Option(help="Steps between two points of a curve. [default: steps / 5]")
    ] = None,
    timeout: Annotated[
        float, typer.Option(help="Seconds without progress after which a method is given up.")
    ] = 120,
) -> None:
    """Train a small GPT with each method of exchanging gradients, and compare what they cost.

    Every rank trains on its own part of the text and is judged on all of it, so that what crosses
    the wire matters. Writes report.html, the plots, runs.jsonl and the logs to --out. A method that
    fails costs its own row only. Exit codes: 0, 1 if a method failed, 2 for bad input (nothing is
    run), 130 if interrupted (what is finished is reported).
    """
    from benchmarks.compare import run

    run.compare(
        data=data,
        hooks=hooks,
        nproc=nproc,
        steps=steps,
        seed=seed,
        out=out,
        quick=quick,
        eval_every=eval_every,
        timeout=timeout,
    )


if __name__ == "__main__":
    typer.run(compare)

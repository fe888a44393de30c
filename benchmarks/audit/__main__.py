"""``python -m benchmarks.audit``."""

from pathlib import Path
from typing import Annotated

import typer


def audit(
    arguments: Annotated[
        list[str] | None, typer.Argument(help="With --script: what it is given, after --.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="The private training, as JSON: see docs/audit.md.")
    ] = None,
    ledger: Annotated[
        Path | None,
        typer.Option(help="A ledger: the claim is for what was released, also by a running run."),
    ] = None,
    delta: Annotated[
        float | None, typer.Option(help="Of the guarantee. [default: the configuration's]")
    ] = None,
    attack: Annotated[
        bool, typer.Option(help="Play the configuration and attack it; else only look it up.")
    ] = True,
    script: Annotated[
        Path | None, typer.Option(help="Run your own training as it is, and watch it.")
    ] = None,
    nproc_per_node: Annotated[
        int | None, typer.Option(help="With --script: ranks, as torchrun has them. [default: one]")
    ] = None,
    steps: Annotated[
        int, typer.Option(help="With --script: stop it after so many private steps.")
    ] = 20,
    timeout: Annotated[float, typer.Option(help="With --script: seconds for one run.")] = 120.0,
    confidence: Annotated[float, typer.Option(help="Of the bounds that attacks prove.")] = 0.95,
    json_: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Check a private training: is it valid, what does it claim, and do attacks disprove that?

    Attacks put canaries into a training of the same clipping, sampling, noise, compressor and
    number of ranks, simulated in this process, and prove a lower bound of epsilon. A script is run
    in processes of its own, with and without one sample, and what differs is compared. Exit codes:
    0, 1 for what is not private, 2 for bad input, 3 for what is suspicious: run it again.
    """
    from benchmarks.audit import run

    run.audit(
        arguments=arguments,
        config=config,
        ledger=ledger,
        delta=delta,
        attack=attack,
        script=script,
        nproc_per_node=nproc_per_node,
        steps=steps,
        timeout=timeout,
        confidence=confidence,
        json_=json_,
    )


if __name__ == "__main__":
    typer.run(audit)

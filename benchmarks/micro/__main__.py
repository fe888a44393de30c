"""The command, see ``--help``."""

import importlib
from typing import Annotated

import typer

from benchmarks.lab.output import SKIPPED
from benchmarks.netns import NetnsError
from comm_hooks.launchers.output import BAD_INPUT, complain

TABLES = {
    "speed": "time of compressors, on one thread",
    "wire": "bits per kept element, with index codes",
    "per_sample_gradients": "clipped sums of per-sample gradients, and Opacus's (needs opacus)",
    "private_checks": "cost of differentiating samples alone (needs opacus)",
    "distinguishing": "epsilon that a game proves, and the claim (needs opacus)",
    "noise": "cost of noise from a cryptographic generator",
    "queued": "operations that an exchange queues on an accelerator",
    "checks": "cost of the checks between ranks (10 minutes on 2 cores)",
    "overlap": "exchange during the backward pass (10 minutes, needs root)",
}


def main(
    names: Annotated[
        list[str],
        typer.Argument(help=f"Tables: {'; '.join(f'{n}: {text}' for n, text in TABLES.items())}."),
    ],
) -> None:
    """Print tables.

    Exit codes: 0, 1 if a table has a figure beyond its bar, 2 for bad input, 77 where there can be
    no network namespaces.
    """
    if unknown := [name for name in names if name not in TABLES]:
        complain("micro", f"there is no table {unknown[0]!r}: give {', '.join(TABLES)}")
        raise typer.Exit(BAD_INPUT)
    missed = False
    for name in names:
        try:
            missed |= bool(importlib.import_module(f"benchmarks.micro.{name}").main())
        except NetnsError as error:
            complain("micro", error)
            raise typer.Exit(SKIPPED) from None
    raise typer.Exit(int(missed))


if __name__ == "__main__":
    typer.run(main)

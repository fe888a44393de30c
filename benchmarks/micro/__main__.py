"""The command, see ``--help``."""

import importlib
from typing import Annotated

import typer

from benchmarks.lab.output import SKIPPED
from benchmarks.netns import NetnsError
from comm_hooks.launchers.output import BAD_INPUT, complain

TABLES = {
    "quality": "mean squared errors of compressors against theory",
    "speed": "time of compressors, on one thread",
    "wire": "bits per kept element, with index codes",
    "per_sample_gradients": "clipped sums of per-sample gradients, and Opacus's (needs opacus)",
    "noise": "cost of noise from a cryptographic generator",
    "streams": "search for equal random streams of private training",
    "checks": "cost of the checks between ranks (10 minutes on 2 cores)",
    "queued": "operations that an exchange queues on an accelerator",
    "rings": "collectives over messages against gloo's (needs root)",
    "overlap": "exchange during the backward pass (10 minutes, needs root)",
}
_BY_DEFAULT = ("quality", "speed", "wire", "per_sample_gradients", "noise", "streams")


def main(
    names: Annotated[
        list[str] | None,
        typer.Argument(help=f"Tables: {'; '.join(f'{n}: {text}' for n, text in TABLES.items())}."),
    ] = None,
) -> None:
    """Print tables; by default those that take minutes and need neither root nor two ranks.

    Exit codes: 0, 1 if a table has a figure beyond its bar, 2 for bad input, 77 where there can be
    no network namespaces.
    """
    chosen = names or list(_BY_DEFAULT)
    if unknown := [name for name in chosen if name not in TABLES]:
        complain("micro", f"there is no table {unknown[0]!r}: give {', '.join(TABLES)}")
        raise typer.Exit(BAD_INPUT)
    missed = False
    for name in chosen:
        try:
            missed |= bool(importlib.import_module(f"benchmarks.micro.{name}").main())
        except NetnsError as error:
            complain("micro", error)
            raise typer.Exit(SKIPPED) from None
    raise typer.Exit(int(missed))


if __name__ == "__main__":
    typer.run(main)

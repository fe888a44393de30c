"""Run a command once per rank in a network of capped links; see ``--help``."""

import subprocess
import tempfile
from typing import Annotated

import typer

from benchmarks.lab.output import SKIPPED
from benchmarks.netns.links import NetnsError
from benchmarks.netns.testbed import Testbed
from comm_hooks.launchers.output import complain, refusing


def run(
    command: Annotated[list[str], typer.Argument(help="What every rank runs.")],
    ranks: Annotated[int, typer.Option("--ranks", "-n", help="Namespaces.")] = 2,
    rate: Annotated[
        str | None, typer.Option(help="Of each direction of each link. [default: no cap]")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds after which all are ended.")] = 600.0,
) -> None:
    """Run a command in every namespace and print what crossed each link.

    The command is torchrun or a script that reads env://. Shows the output of rank 0, and of ranks
    that fail. The exit code is that of the first of them, 2 for bad input, and 77 where there can
    be no network namespaces.
    """
    with refusing("netns"):
        bed = Testbed(ranks, rate=rate)
    outputs = [tempfile.TemporaryFile() for _ in range(1, ranks)]  # noqa: SIM115
    try:
        with bed:
            processes = [bed.start(0, command)]
            for rank, output in enumerate(outputs, start=1):
                processes.append(bed.start(rank, command, stdout=output, stderr=subprocess.STDOUT))
            codes = bed.wait(processes, timeout=timeout)
            crossed = bed.counters()
    except NetnsError as error:
        complain("netns", error)
        raise typer.Exit(SKIPPED) from None
    for rank, output in enumerate(outputs, start=1):
        if codes[rank]:
            output.seek(0)
            typer.echo(f"rank {rank}:\n{output.read().decode(errors='replace')}", err=True)
    for rank, (sent, received) in enumerate(crossed):
        typer.echo(f"rank {rank}: exit code {codes[rank]}, sent {sent} B, received {received} B")
    raise typer.Exit(next((abs(code) for code in codes if code), 0))


if __name__ == "__main__":
    typer.run(run)

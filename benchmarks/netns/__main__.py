"""Run a command once per rank in a network of capped links.

python -m benchmarks.netns check
python -m benchmarks.netns run -n 2 --rate 100mbit -- torchrun train.py
python -m benchmarks.netns run -n 2 --rate 100mbit -- python train.py   # env:// works, too
"""

import subprocess
import tempfile
from typing import Annotated

import typer

from benchmarks.netns.links import NetnsError
from benchmarks.netns.testbed import Testbed, why_not

# What automake and others take for "skipped".
_SKIPPED = 77
_BAD_INPUT = 2

app = typer.Typer(help=__doc__, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def check() -> None:
    """Say whether this machine can do it; exit code 77 and one line if not."""
    reason = why_not()
    typer.echo(reason or "network namespaces: ok")
    raise typer.Exit(_SKIPPED if reason else 0)


@app.command(context_settings={"ignore_unknown_options": True})
def run(
    command: Annotated[list[str], typer.Argument(help="What every rank runs.")],
    ranks: Annotated[int, typer.Option("--ranks", "-n", help="Namespaces.")] = 2,
    rate: Annotated[
        str | None, typer.Option(help="Of each direction of each link. [default: no cap]")
    ] = None,
    timeout: Annotated[float, typer.Option(help="Seconds after which all are ended.")] = 600.0,
) -> None:
    """Run a command in every namespace and print what crossed each link.

    Shows the output of rank 0, and of ranks that fail. The exit code is that of the first of them.
    """
    try:
        bed = Testbed(ranks, rate=rate)
    except ValueError as error:
        typer.echo(f"netns: {error}", err=True)
        raise typer.Exit(_BAD_INPUT) from None
    outputs = [tempfile.TemporaryFile() for _ in range(1, ranks)]  # noqa: SIM115
    try:
        with bed:
            processes = [bed.start(0, command)]
            for rank, output in enumerate(outputs, start=1):
                processes.append(bed.start(rank, command, stdout=output, stderr=subprocess.STDOUT))
            codes = bed.wait(processes, timeout=timeout)
            crossed = bed.counters()
    except NetnsError as error:
        typer.echo(f"netns: {error}", err=True)
        raise typer.Exit(_SKIPPED) from None
    for rank, output in enumerate(outputs, start=1):
        if codes[rank]:
            output.seek(0)
            typer.echo(f"rank {rank}:\n{output.read().decode(errors='replace')}", err=True)
    for rank, (sent, received) in enumerate(crossed):
        typer.echo(f"rank {rank}: exit code {codes[rank]}, sent {sent} B, received {received} B")
    raise typer.Exit(next((abs(code) for code in codes if code), 0))


if __name__ == "__main__":
    app()

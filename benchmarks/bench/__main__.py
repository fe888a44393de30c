"""The command, see ``--help``."""

import datetime
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from benchmarks.bench.launch import run_method
from benchmarks.bench.plots import write_plots
from benchmarks.bench.rates import bits_per_second, parse_rates
from benchmarks.bench.results import Bench, read_results, write_results
from benchmarks.bench.table import print_table, write_markdown
from benchmarks.lab.output import SKIPPED, Interruption
from benchmarks.lab.processes import available_cores
from benchmarks.lab.runner import (
    Comparison,
    Data,
    Hooks,
    Quick,
    Seed,
    Steps,
    Timeout,
    count_parameters,
    make_settings,
    print_facts,
)
from benchmarks.lab.runs import Settings
from benchmarks.netns import why_not
from comm_hooks.launchers.output import make_console, refusing

_MAX_RANKS = 200
_BUSY = 0.5  # of the cores in use before anything is started

DEFAULT_METHODS = (
    "none,all_reduce,bf16,powersgd:rank=1,powersgd:rank=2,powersgd:rank=4,identity+local_adamw,"
    "low_communication,sign+local_variance_adam,local_variance_adam,"
    "topk:density=1/256:min_ndim=1:min_numel=1+local_variance_adam,"
    "local_adamw:fragments=8,topk:density=1/64+local_adamw:fragments=8"
)
DEFAULT_RATES = "10mbit,100mbit,1gbit"

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
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
    steps: Steps = None,
    timing_steps: Annotated[
        int, typer.Option(help="Timed steps per method and rate; fewer where they take long.")
    ] = 16,
    seed: Seed = 0,
    data: Data = None,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("comm-hooks-bench"),
    quick: Quick = False,
    redraw: Annotated[
        bool,
        typer.Option(
            "--redraw",
            help="Run nothing: make results.md and the plots again from results.json in --out.",
        ),
    ] = False,
    timeout: Timeout = 120,
) -> None:
    """Train a small GPT over links of given rates with each method, and compare the times.

    Every rank is in a network namespace, joined to the others by a virtual switch with capped
    links. Needs Linux, root and iproute2. Loss comes from one training per method over links
    without a cap; then steps are timed at each rate, in turns with steps that exchange nothing.
    Writes results.json, results.md, the plots and the logs to --out. A method that fails costs its
    own row only. Exit codes: 0, 1 if a method failed, 2 for bad input (nothing is run), 77 where
    there can be no namespaces, 130 if interrupted (finished methods are reported).
    """
    console = make_console()
    with refusing("python -m benchmarks.bench"):
        if redraw:
            _report(read_results(out / "results.json"), out, console)
            return
        try:
            rates = parse_rates(rate)
        except ValueError as error:
            raise ValueError(f"--rate: {error}") from None
        if not 2 <= nproc <= _MAX_RANKS:
            raise ValueError(f"--nproc must lie between 2 and {_MAX_RANKS}, got {nproc}")
        settings = make_settings(nproc, steps, seed, None, quick)
        if timing_steps < 1:
            raise ValueError(f"--timing-steps must be at least 1, got {timing_steps}")
        comparison = Comparison.check("bench", hooks, settings, data, timeout, out)
    if reason := why_not():
        typer.echo(f"python -m benchmarks.bench: skipped, {reason}", err=True)
        raise typer.Exit(SKIPPED)

    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    facts = {"Date": today, **comparison.facts("network namespaces")}
    print_facts(facts, console)
    if os.getloadavg()[0] > _BUSY * available_cores():
        warning = "Warning: this machine is busy. Ratios on slow links will come out too small."
        console.print(Text(warning), style="yellow", soft_wrap=True)
    results = Bench([], rates, settings, facts)
    # An uncompressed step at the slowest rate is no reason to give up.
    patience = timeout + _uncompressed_seconds(settings, rates[-1])
    with Interruption() as interruption:
        for result in comparison.run_each(
            lambda pair, *places: run_method(
                pair, settings, rates, timing_steps, *places, timeout=patience
            ),
            lambda result: result.run,
            out,
            console,
        ):
            results.results.append(result)
            # After each: whatever happens to the others, this is kept.
            write_results(results, out / "results.json")
    if results.results:
        _report(results, out, console)
    comparison.end([r.run for r in results.results], interrupted=interruption.happened)


def _report(bench: Bench, out: Path, console: Console) -> None:
    print_table(bench.results, bench.rates, console)
    plots = write_plots(bench.results, bench.rates, out)
    write_markdown(bench, plots, out / "results.md")
    console.print(Text(f"Results: {out / 'results.json'}, results.md"), soft_wrap=True)


def _uncompressed_seconds(settings: Settings, rate: str) -> float:
    """Return the seconds of an uncompressed exchange of all gradients, times three to be safe."""
    bits = bits_per_second(rate)
    if bits is None:
        return 0.0
    share = 2 * (settings.nproc - 1) / settings.nproc
    return 3 * share * 32 * count_parameters(settings.model) / bits


if __name__ == "__main__":
    app()

"""What ``python -m benchmarks.bench`` does: check all, run each method at each rate, tell what came out."""

import datetime
import os
import platform
import shlex
from pathlib import Path

import typer
from rich.console import Console
from rich.text import Text

from benchmarks.bench.launch import run_method
from benchmarks.bench.plots import write_plots
from benchmarks.bench.rates import bits_per_second, parse_rates
from benchmarks.bench.results import Bench, read_results, write_results
from benchmarks.bench.table import print_table, write_markdown
from benchmarks.lab.conducting import Comparison, print_facts
from benchmarks.lab.machine import processor
from benchmarks.lab.methods import parse_methods
from benchmarks.lab.options import (
    count_parameters,
    describe_training,
    make_settings,
    versions,
)
from benchmarks.lab.output import SKIPPED, Interruption, prepare_folder
from benchmarks.lab.processes import available_cores, threads_per_rank
from benchmarks.lab.runs import Settings
from benchmarks.netns import why_not
from benchmarks.netns.links import call
from comm_hooks.launchers.output import make_console, refusing

_MAX_RANKS = 200
_BUSY = 0.5  # of the cores in use before anything is started


def bench(
    *,
    rate: str,
    hooks: str,
    nproc: int,
    steps: int | None,
    timing_steps: int,
    seed: int,
    data: Path | None,
    out: Path,
    quick: bool,
    redraw: bool,
    timeout: float,
) -> None:
    """Do what ``python -m benchmarks.bench --help`` says."""
    console = make_console()
    with refusing("python -m benchmarks.bench"):
        if redraw:
            _report(read_results(out / "results.json"), out, console)
            return
        try:
            rates = parse_rates(rate)
        except ValueError as error:
            raise ValueError(f"--rate: {error}") from None
        methods = parse_methods(hooks)
        if not 2 <= nproc <= _MAX_RANKS:
            raise ValueError(f"--nproc must lie between 2 and {_MAX_RANKS}, got {nproc}")
        settings = make_settings(nproc, steps, seed, None, quick)
        if timing_steps < 1:
            raise ValueError(f"--timing-steps must be at least 1, got {timing_steps}")
        comparison = Comparison.check("bench", methods, settings, data, timeout)
        prepare_folder(out, "logs")
    if reason := why_not():
        typer.echo(f"python -m benchmarks.bench: skipped, {reason}", err=True)
        raise typer.Exit(SKIPPED)

    facts = _make_facts(comparison, rates, timing_steps, data, quick)
    print_facts(facts, console)
    if os.getloadavg()[0] > _BUSY * available_cores():
        warning = "Warning: this machine is busy. Ratios on slow links will come out too small."
        console.print(Text(warning), style="yellow", soft_wrap=True)
    results = Bench([], rates, settings, facts)
    patience = timeout + _uncompressed_seconds(settings, rates[-1])
    with Interruption() as interruption:
        for result in comparison.run_each(
            lambda method, *places: run_method(
                method, settings, rates, timing_steps, *places, timeout=patience
            ),
            lambda result: result.run,
            out,
            console,
        ):
            results.results.append(result)
            # After each: whatever happens to the rest, this is kept.
            write_results(results, out / "results.json")
    if results.results:
        _report(results, out, console)
    comparison.end([r.run for r in results.results], interrupted=interruption.happened)


def _report(bench: Bench, out: Path, console: Console) -> None:
    print_table(bench.results, bench.rates, console)
    plots = write_plots(bench.results, bench.rates, out)
    write_markdown(bench, plots, out / "results.md")
    console.print(Text(f"Results: {out / 'results.json'}, results.md"), soft_wrap=True)


def _make_facts(
    comparison: Comparison, rates: list[str], timing_steps: int, data: Path | None, quick: bool
) -> dict[str, str]:
    """Return what a reader of the results must know to judge the figures, or to repeat them."""
    settings, nproc = comparison.settings, comparison.settings.nproc
    options = {name: getattr(settings, name) for name in ("nproc", "steps", "seed")}
    command = comparison.command_line(
        data,
        quick,
        rate=",".join(rates),
        hooks=comparison.hooks,
        **options,
        timing_steps=timing_steps,
    )
    kernel = platform.release().split("-")[0]
    load = ", ".join(f"{minutes:.1f}" for minutes in os.getloadavg())
    return {
        "Date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "Command": shlex.join(command),
        "Text": comparison.corpus.description,
        **describe_training(settings),
        "Machine": f"{nproc} ranks, {threads_per_rank(nproc)} threads each, on "
        f"{available_cores()} cores ({processor()}, {platform.system()} {kernel}), load average "
        f"{load} before; gloo, network namespaces",
        "Versions": f"{versions()}, {call('ip', '-V').strip()}",
    }


def _uncompressed_seconds(settings: Settings, rate: str) -> float:
    """Return what exchanging all gradients uncompressed takes, three times over to be safe."""
    bits = bits_per_second(rate)
    if bits is None:
        return 0.0
    share = 2 * (settings.nproc - 1) / settings.nproc
    return 3 * share * 32 * count_parameters(settings.model) / bits

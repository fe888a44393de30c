"""The ``bench`` command: check everything, run every method at every rate, tell what came out."""

import datetime
import os
import platform
import re
import shlex
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from comm_hooks.launchers.bench.launch import run_method
from comm_hooks.launchers.bench.plots import write_plots
from comm_hooks.launchers.bench.rates import bits_per_second, parse_rates
from comm_hooks.launchers.bench.results import Result, read_results, write_results
from comm_hooks.launchers.bench.table import print_table, write_markdown
from comm_hooks.launchers.compare.corpus import Corpus, check_length, load_corpus
from comm_hooks.launchers.compare.launch import available_cores, threads_per_rank
from comm_hooks.launchers.compare.methods import Method, parse_methods
from comm_hooks.launchers.compare.options import (
    count_parameters,
    describe_training,
    make_settings,
    versions,
)
from comm_hooks.launchers.compare.progress import open_display
from comm_hooks.launchers.compare.runs import Settings
from comm_hooks.launchers.machine import processor
from comm_hooks.launchers.netns import why_not
from comm_hooks.launchers.netns.links import call
from comm_hooks.launchers.output import make_console, prepare_folder

DEFAULT_METHODS = (
    "none,all_reduce,bf16,powersgd:rank=1,powersgd:rank=2,powersgd:rank=4,identity+local_adamw,"
    "local_variance_adam,sign+local_variance_adam,"
    "topk:density=1/256:min_ndim=1:min_numel=1+local_variance_adam,"
    "local_adamw,local_adamw:fragments=8,topk:density=1/64+local_adamw:fragments=8"
)
DEFAULT_RATES = "10mbit,100mbit,1gbit"
_MAX_RANKS = 200
_BUSY = 0.5  # of the cores in use before anything is started

# Exit codes.
_FAILED = 1
_BAD_INPUT = 2
_SKIPPED = 77  # as automake and others have it
_INTERRUPTED = 130  # 128 + SIGINT, as shells have it


@dataclass(frozen=True)
class _Bench:
    """What is to be run, all of it checked."""

    methods: list[Method]
    settings: Settings
    rates: list[str]
    timing_steps: int
    timeout: float
    corpus: Corpus


def bench(
    rate: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help="Rates of each direction of each link, as tc writes them, separated by commas. "
            "Links without a cap are measured in any case.",
        ),
    ] = DEFAULT_RATES,
    hooks: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help="Methods, separated by commas, as in comm-hooks compare: "
            "CROSSING[:option=value...][+OPTIMIZER].",
        ),
    ] = DEFAULT_METHODS,
    nproc: Annotated[int, typer.Option(help="Ranks, each in a network namespace of its own.")] = 2,
    steps: Annotated[
        int | None,
        typer.Option(help="Training steps per method, for the loss. [default: 150, quick: 60]"),
    ] = None,
    timing_steps: Annotated[
        int, typer.Option(help="Timed steps per method and rate; fewer where they take long.")
    ] = 16,
    seed: Annotated[int, typer.Option(help="For weights, batches and compressors.")] = 0,
    data: Annotated[
        Path | None,
        typer.Option(
            help="Text to train on: a file, or a directory of UTF-8 files. "
            "[default: the source of Python's standard library]",
        ),
    ] = None,
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
    console = make_console()
    try:
        if redraw:
            bench = read_results(out / "results.json")
            _report(bench.results, bench.rates, bench.facts, out, console)
            return
        checked = _check(rate, hooks, nproc, steps, timing_steps, seed, data, quick, timeout)
        prepare_folder(out, "logs")
    except ValueError as error:
        typer.echo(f"comm-hooks bench: {error}", err=True)
        raise typer.Exit(_BAD_INPUT) from None
    if reason := why_not():
        typer.echo(f"comm-hooks bench: skipped, {reason}", err=True)
        raise typer.Exit(_SKIPPED)

    facts = _make_facts(checked, data, quick)
    for name in ("Model", "Text", "Machine"):
        console.print(Text(f"{name}: {facts[name]}"), soft_wrap=True)
    if os.getloadavg()[0] > _BUSY * available_cores():
        warning = "Warning: this machine is busy. Ratios on slow links will come out too small."
        console.print(Text(warning), style="yellow", soft_wrap=True)
    rates = checked.rates
    results: list[Result] = []
    interrupted = False
    # Being asked to end (by timeout, CI or a scheduler) is treated as Ctrl-C is.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for result in _run_methods(checked, out, console):
            results.append(result)
            # After each: whatever happens to the rest, this is kept.
            write_results(results, rates, checked.settings, facts, out / "results.json")
    except KeyboardInterrupt:
        interrupted = True
    if results:
        _report(results, rates, facts, out, console)
    if interrupted:
        typer.echo(
            f"comm-hooks bench: interrupted, {len(results)} of {len(checked.methods)} methods "
            "finished",
            err=True,
        )
        raise typer.Exit(_INTERRUPTED)
    if any(result.run.failure for result in results):
        raise typer.Exit(_FAILED)


def _report(
    results: list[Result], rates: list[str], facts: dict[str, str], out: Path, console: Console
) -> None:
    print_table(results, rates, console)
    plots = write_plots(results, rates, out)
    write_markdown(results, rates, facts, plots, out / "results.md")
    console.print(Text(f"Results: {out / 'results.json'}, results.md"), soft_wrap=True)


def _check(
    rate: str,
    hooks: str,
    nproc: int,
    steps: int | None,
    timing_steps: int,
    seed: int,
    data: Path | None,
    quick: bool,
    timeout: float,
) -> _Bench:
    try:
        rates = parse_rates(rate)
    except ValueError as error:
        raise ValueError(f"--rate: {error}") from None
    methods = parse_methods(hooks)
    if not 2 <= nproc <= _MAX_RANKS:
        raise ValueError(f"--nproc must lie between 2 and {_MAX_RANKS}, got {nproc}")
    settings = make_settings(nproc, steps, seed, None, quick)
    for method in methods:
        method.check(settings)
    if timing_steps < 1:
        raise ValueError(f"--timing-steps must be at least 1, got {timing_steps}")
    if timeout <= 0:
        raise ValueError(f"--timeout must be positive, got {timeout:g}")
    corpus = load_corpus(data)
    check_length(corpus, nproc, settings.window)
    return _Bench(methods, settings, rates, timing_steps, timeout, corpus)


def _make_facts(checked: _Bench, data: Path | None, quick: bool) -> dict[str, str]:
    """Return what a reader of the results must know to judge the figures, or to repeat them."""
    settings = checked.settings
    command = ["comm-hooks", "bench", "--rate", ",".join(checked.rates)]
    command += ["--hooks", ",".join(method.spec for method in checked.methods)]
    for option in ("nproc", "steps", "seed"):
        command += [f"--{option}", str(getattr(settings, option))]
    command += ["--timing-steps", str(checked.timing_steps), *(["--quick"] if quick else [])]
    command += ["--data", str(data)] if data else []
    return {
        "Date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "Command": shlex.join(command),
        "Text": checked.corpus.description,
        **describe_training(settings),
        "Machine": _describe_machine(settings.nproc),
        "Versions": f"{versions()}, {call('ip', '-V').strip()}",
    }


def _run_methods(checked: _Bench, out: Path, console: Console) -> Iterator[Result]:
    stall_timeout = checked.timeout + _uncompressed_seconds(checked.settings, checked.rates[-1])
    with (
        tempfile.TemporaryDirectory(prefix="comm-hooks-") as scratch,
        open_display(checked.methods, checked.settings.steps, console) as display,
    ):
        # A copy, so that every method reads what was checked, whatever happens to the original.
        corpus = Path(scratch, "corpus")
        corpus.write_bytes(checked.corpus.content)
        for index, method in enumerate(checked.methods):
            display.start(index)
            slug = re.sub(r"[^\w.=+-]", "_", method.spec)
            result = run_method(
                method,
                checked.settings,
                checked.rates,
                checked.timing_steps,
                corpus,
                out / "logs" / f"{index + 1}-{slug}.log",
                stall_timeout,
                display.watch,
            )
            display.finish(result.run)
            yield result


def _uncompressed_seconds(settings: Settings, rate: str) -> float:
    """Return what exchanging all gradients uncompressed takes, three times over to be safe."""
    bits = bits_per_second(rate)
    if bits is None:
        return 0.0
    share = 2 * (settings.nproc - 1) / settings.nproc
    return 3 * share * 32 * count_parameters(settings.model) / bits


def _describe_machine(nproc: int) -> str:
    kernel = platform.release().split("-")[0]
    load = ", ".join(f"{minutes:.1f}" for minutes in os.getloadavg())
    return (
        f"{nproc} ranks, {threads_per_rank(nproc)} threads each, on {available_cores()} cores "
        f"({processor()}, {platform.system()} {kernel}), load average {load} before; "
        "gloo, network namespaces"
    )

"""The ``compare`` command: check everything, run every method, tell what came out."""

import platform
import re
import shlex
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from comm_hooks.launchers.compare.conclusions import warn_of_few_steps
from comm_hooks.launchers.compare.corpus import check_length, load_corpus
from comm_hooks.launchers.compare.launch import available_cores, run_method, threads_per_rank
from comm_hooks.launchers.compare.methods import (
    DEFAULT_METHODS,
    QUICK_METHODS,
    Method,
    parse_methods,
)
from comm_hooks.launchers.compare.options import (
    describe_training,
    make_settings,
    versions,
)
from comm_hooks.launchers.compare.plots import write_plots
from comm_hooks.launchers.compare.progress import open_display
from comm_hooks.launchers.compare.runs import Run, Settings
from comm_hooks.launchers.compare.table import print_table
from comm_hooks.launchers.machine import processor
from comm_hooks.launchers.output import make_console, prepare_folder
from comm_hooks.launchers.report.page import write_page

# Exit codes.
_FAILED = 1
_BAD_INPUT = 2
_INTERRUPTED = 130  # 128 + SIGINT, as shells have it


def compare(
    data: Annotated[
        Path | None,
        typer.Option(
            help="Text to train on: a file, or a directory of UTF-8 files. "
            "[default: the source of Python's standard library]",
        ),
    ] = None,
    hooks: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Methods, separated by commas: CROSSING[:option=value...][+OPTIMIZER], for "
            f"example topk:density=1/64+local_variance_adam. [default: {DEFAULT_METHODS}]",
        ),
    ] = None,
    nproc: Annotated[int, typer.Option(help="Ranks, each a process on this machine.")] = 2,
    steps: Annotated[
        int | None, typer.Option(help="Training steps per method. [default: 150, quick: 60]")
    ] = None,
    seed: Annotated[int, typer.Option(help="For weights, batches and compressors.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("comm-hooks-report"),
    quick: Annotated[
        bool,
        typer.Option("--quick", help="A smaller model, fewer steps and methods: a minute or so."),
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
    try:
        methods = parse_methods(hooks or (QUICK_METHODS if quick else DEFAULT_METHODS))
        settings = make_settings(nproc, steps, seed, eval_every, quick)
        for method in methods:
            method.check(settings)
        if timeout <= 0:
            raise ValueError(f"--timeout must be positive, got {timeout:g}")
        corpus = load_corpus(data)
        check_length(corpus, nproc, settings.window)
        prepare_folder(out, "logs")
    except ValueError as error:
        typer.echo(f"comm-hooks compare: {error}", err=True)
        raise typer.Exit(_BAD_INPUT) from None

    console = make_console()
    for paragraph in warn_of_few_steps([settings]):
        console.print(Text(paragraph), style="yellow")
    facts = _make_facts(settings, corpus.description, methods, data, quick)
    for name in ("Model", "Text", "Machine"):
        console.print(Text(f"{name}: {facts[name]}"), soft_wrap=True)

    runs: list[Run] = []
    interrupted = False
    # Being asked to end (by timeout, CI or a scheduler) is treated as Ctrl-C is.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        for run in _run_methods(methods, settings, facts, corpus.content, out, timeout, console):
            runs.append(run)
    except KeyboardInterrupt:
        interrupted = True
    if runs:
        print_table(runs, console)
        write_plots(runs, out)
        write_page(runs, out / "report.html")
        console.print(Text(f"Report: {out / 'report.html'}"), soft_wrap=True)
    if interrupted:
        typer.echo(
            f"comm-hooks compare: interrupted, {len(runs)} of {len(methods)} methods finished",
            err=True,
        )
        raise typer.Exit(_INTERRUPTED)
    if any(run.failure for run in runs):
        raise typer.Exit(_FAILED)


def _run_methods(
    methods: list[Method],
    settings: Settings,
    facts: dict[str, str],
    text: bytes,
    out: Path,
    timeout: float,
    console: Console,
) -> Iterator[Run]:
    """Run the methods in turn and yield the record of each, once it is in ``runs.jsonl``."""
    with (
        (out / "runs.jsonl").open("w") as records,
        tempfile.TemporaryDirectory(prefix="comm-hooks-") as scratch,
        open_display(methods, settings.steps, console) as display,
    ):
        # A copy, so that every method reads what was checked, whatever happens to the original.
        corpus = Path(scratch, "corpus")
        corpus.write_bytes(text)
        for index, method in enumerate(methods):
            display.start(index)
            slug = re.sub(r"[^\w.=+-]", "_", method.spec)
            log = out / "logs" / f"{index + 1}-{slug}.log"
            run = run_method(method, settings, corpus, log, timeout, display.watch)
            run.facts = facts
            records.write(run.to_json() + "\n")
            records.flush()
            display.finish(run)
            yield run


def _make_facts(
    settings: Settings, text: str, methods: list[Method], data: Path | None, quick: bool
) -> dict[str, str]:
    """Return what a reader of the report must know to judge the figures, or to repeat them."""
    command = ["comm-hooks", "compare", "--hooks", ",".join(method.spec for method in methods)]
    for option in ("nproc", "steps", "seed", "eval_every"):
        command += [f"--{option.replace('_', '-')}", str(getattr(settings, option))]
    command += ["--quick"] if quick else []
    command += ["--data", str(data)] if data else []
    return {
        "Command": shlex.join(command),
        "Text": text,
        **describe_training(settings),
        "Machine": f"{settings.nproc} ranks, {threads_per_rank(settings.nproc)} threads each, on "
        f"{available_cores()} cores ({processor()}, {platform.system()}); gloo, loopback",
        "Versions": versions(),
    }

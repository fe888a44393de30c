"""The ``compare`` command: check everything, run every method, tell what came out."""

import platform
import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from comm_hooks.launchers.compare.plots import write_plots
from comm_hooks.launchers.lab.conducting import Comparison, Data, Seed, Steps, print_facts
from comm_hooks.launchers.lab.methods import DEFAULT_METHODS, parse_methods
from comm_hooks.launchers.lab.options import describe_training, make_settings, versions
from comm_hooks.launchers.lab.processes import available_cores, run_method, threads_per_rank
from comm_hooks.launchers.lab.runs import Run
from comm_hooks.launchers.machine import processor
from comm_hooks.launchers.output import Interruption, make_console, prepare_folder, refusing
from comm_hooks.launchers.report.conclusions import warn_of_few_steps
from comm_hooks.launchers.report.page import write_page
from comm_hooks.launchers.report.table import print_table


def compare(
    data: Data = None,
    hooks: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Methods, separated by commas: CROSSING[:option=value...][+OPTIMIZER], for "
            f"example topk:density=1/64+local_variance_adam. [default: {DEFAULT_METHODS}]",
        ),
    ] = None,
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
    with refusing("comm-hooks compare"):
        methods = parse_methods(hooks or DEFAULT_METHODS)
        settings = make_settings(nproc, steps, seed, eval_every, quick)
        comparison = Comparison.check("compare", methods, settings, data, timeout)
        prepare_folder(out, "logs")

    console = make_console()
    for paragraph in warn_of_few_steps([settings]):
        console.print(Text(paragraph), style="yellow")
    facts = _make_facts(comparison, data, quick)
    print_facts(facts, console)
    runs: list[Run] = []
    with Interruption() as interruption, (out / "runs.jsonl").open("w") as records:
        for run in comparison.run_each(
            lambda method, *places: run_method(method, settings, *places, timeout=timeout),
            lambda run: run,
            out,
            console,
        ):
            run.facts = facts
            records.write(run.to_json() + "\n")
            records.flush()
            runs.append(run)
    if runs:
        print_table(runs, console)
        write_plots(runs, out)
        write_page(runs, out / "report.html")
        console.print(Text(f"Report: {out / 'report.html'}"), soft_wrap=True)
    comparison.end(runs, interrupted=interruption.happened)


def _make_facts(comparison: Comparison, data: Path | None, quick: bool) -> dict[str, str]:
    """Return what a reader of the report must know to judge the figures, or to repeat them."""
    settings = comparison.settings
    options = {name: getattr(settings, name) for name in ("nproc", "steps", "seed", "eval_every")}
    return {
        "Command": shlex.join(
            comparison.command_line(data, quick, hooks=comparison.hooks, **options)
        ),
        "Text": comparison.corpus.description,
        **describe_training(settings),
        "Machine": f"{settings.nproc} ranks, {threads_per_rank(settings.nproc)} threads each, on "
        f"{available_cores()} cores ({processor()}, {platform.system()}); gloo, loopback",
        "Versions": versions(),
    }

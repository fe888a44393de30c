"""What ``python -m benchmarks.compare`` does: check everything, run every method, tell what came out."""

import platform
import shlex
from pathlib import Path

from rich.text import Text

from benchmarks.compare.plots import write_plots
from benchmarks.lab.conducting import Comparison, print_facts
from benchmarks.lab.machine import processor
from benchmarks.lab.methods import parse_methods
from benchmarks.lab.options import describe_training, make_settings, versions
from benchmarks.lab.output import Interruption, prepare_folder
from benchmarks.lab.processes import available_cores, run_method, threads_per_rank
from benchmarks.lab.runs import Run
from benchmarks.report.conclusions import warn_of_few_steps
from benchmarks.report.page import write_page
from benchmarks.report.table import print_table
from comm_hooks.launchers.output import make_console, refusing


def compare(
    *,
    data: Path | None,
    hooks: str,
    nproc: int,
    steps: int | None,
    seed: int,
    out: Path,
    quick: bool,
    eval_every: int | None,
    timeout: float,
) -> None:
    """Do what ``python -m benchmarks.compare --help`` says."""
    with refusing("python -m benchmarks.compare"):
        methods = parse_methods(hooks)
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

"""The command, see ``--help``."""

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from benchmarks.lab.output import Interruption
from benchmarks.lab.processes import run_method
from benchmarks.lab.runner import (
    QUICK_STEPS,
    Comparison,
    Data,
    Hooks,
    Quick,
    Seed,
    Steps,
    Timeout,
    make_settings,
    print_facts,
)
from benchmarks.lab.runs import Run, Settings
from benchmarks.report import print_table, write_page
from comm_hooks.launchers.output import make_console, refusing, say

# Both controls and the recommended method first: they make the first comparison.
DEFAULT_METHODS = "all_reduce,none,low_communication,sign+local_variance_adam,topk"
_FIRST = 3

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def compare(
    data: Data = None,
    hooks: Hooks = DEFAULT_METHODS,
    nproc: Annotated[int, typer.Option(help="Ranks, each a process on this machine.")] = 2,
    steps: Steps = None,
    seed: Seed = 0,
    out: Annotated[Path, typer.Option(help="Folder for the report.")] = Path("comm-hooks-report"),
    quick: Quick = False,
    eval_every: Annotated[
        int | None, typer.Option(help="Steps between two points of a curve. [default: steps / 5]")
    ] = None,
    timeout: Timeout = 120,
) -> None:
    """Train a small GPT with each method of exchanging gradients, and compare their costs.

    Every rank trains on its own part of the text and is judged on all of it, so that the exchange
    matters. Prints the table after three methods and at the end; writes report.html, runs.jsonl and
    the logs to --out. A method that fails costs its own row only. Exit codes: 0, 1 if a method
    failed, 2 for bad input (nothing is run), 130 if interrupted (finished methods are reported).
    """
    with refusing("python -m benchmarks.compare"):
        settings = make_settings(nproc, steps, seed, eval_every, quick)
        comparison = Comparison.check("compare", hooks, settings, data, timeout, out)
    console = make_console()
    if settings.steps < QUICK_STEPS:
        console.print(
            Text(
                f"Too few steps: {settings.steps}, with {settings.warmup} of warm-up. Losses then "
                f"say how a method begins, not which is better. {QUICK_STEPS} steps give a first "
                f"impression, {Settings.steps} a comparison."
            ),
            style="yellow",
        )
    facts = comparison.facts("loopback")
    print_facts(facts, console)
    runs: list[Run] = []
    with Interruption() as interruption, (out / "runs.jsonl").open("w") as records:
        for run in comparison.run_each(
            lambda pair, *places: run_method(pair, settings, *places, timeout=timeout),
            lambda run: run,
            out,
            console,
        ):
            run.facts = facts
            records.write(run.to_json() + "\n")
            records.flush()
            runs.append(run)
            if len(runs) == _FIRST < len(comparison.pairs):
                print_table(runs, console)
    if runs:
        print_table(runs, console)
        write_page(runs, out / "report.html")
        say(f"Report: {out / 'report.html'}", console)
    comparison.end(runs, interrupted=interruption.happened)


if __name__ == "__main__":
    app()

"""The command; see ``--help``."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from benchmarks.studies import cli
from benchmarks.studies.local_steps.equal_loss import default_target, needed
from benchmarks.studies.local_steps.figures import make_tables, write_plots
from benchmarks.studies.local_steps.methods import (
    BETAS,
    EXEMPT_BITS,
    VALUE_BITS,
    WEIGHT_DECAY,
    Study,
    make_methods,
    numel,
    warm_up,
)
from benchmarks.studies.progress import describe, open_display
from benchmarks.studies.report import conduct
from benchmarks.studies.runs import Outcome
from benchmarks.studies.training import Plan
from benchmarks.studies.tuning import run_method
from comm_hooks.launchers.output import make_console

_QUICK_MODEL = {"layers": 1, "width": 64, "heads": 2, "context": 64, "eval_windows": 64}
_WARM_UP = 20

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def local_steps(
    task: cli.TaskName = "gpt_text",
    data_dir: cli.DataDir = None,
    task_option: cli.TaskOptions = None,
    clients: cli.Clients = 2,
    steps: Annotated[
        int | None, typer.Option(help="Inner steps per run. [default: 240, quick: 120]")
    ] = None,
    batch: cli.Batch = 6,
    local_steps: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Steps between two exchanges (H). [default: 1,8,30,100, quick: 1,8,30]",
        ),
    ] = None,
    densities: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Fractions of the deltas that are sent. [default: 1/16,1/64, quick: 1/16]",
        ),
    ] = None,
    lr: Annotated[float, typer.Option(help="Learning rate of AdamW.")] = 1e-3,
    server_lrs: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help="Learning rates of the server, tried for compressed deltas on the first seed.",
        ),
    ] = "1,2",
    fragments: Annotated[
        int, typer.Option(help="Parts of the model that are exchanged at different steps.")
    ] = 1,
    target_loss: Annotated[
        float | None,
        typer.Option(
            help="The loss at which bytes are compared. [default: that of all-reduce after three "
            "quarters of the steps]"
        ),
    ] = None,
    seeds: cli.Seeds = None,
    points: cli.Points = 24,
    device: cli.Device = "cpu",
    threads: cli.Threads = 1,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path(
        "comm-hooks-report/local_steps"
    ),
    quick: cli.Quick = False,
) -> None:
    """Compare what a loss costs in bytes with H local steps between two exchanges.

    Every client has a contiguous part of the text and takes steps of AdamW; every H of them the
    clients average how far they have come, exactly or as top-k with one bit a value and error
    feedback. Controls: all-reduce in every step, and no communication. Runs 3 seeds (quick: 1).
    Writes local_steps.json and plots to --out. Exit codes: 0, 2 for bad input, 130 if interrupted
    (what is finished is reported).
    """
    with cli.bad_input("local_steps"):
        steps = (120 if quick else 240) if steps is None else steps
        seeds = (1 if quick else 3) if seeds is None else seeds
        cli.require_at_least(
            1,
            clients=clients,
            steps=steps,
            batch=batch,
            fragments=fragments,
            seeds=seeds,
            points=points,
        )
        cli.require_at_least(0, lr=lr)
        between = cli.parse_numbers(
            "--local-steps", local_steps or ("1,8,30" if quick else "1,8,30,100"), int
        )
        for count in between:
            cli.require_at_least(1, local_steps=count)
        fractions = cli.parse_numbers(
            "--densities", densities or ("1/16" if quick else "1/16,1/64"), float
        )
        for fraction in fractions:
            if not 0 < fraction <= 1:
                raise ValueError(f"--densities: must lie in (0, 1], got {fraction:g}")
        rates = cli.parse_numbers("--server-lrs", server_lrs, float)
        options: dict[str, Any] = dict(_QUICK_MODEL) if quick and task == "gpt_text" else {}
        options.update(cli.parse_task_options(task_option))
        tasks = cli.build_tasks(task, data_dir, clients=clients, seeds=seeds, **options)
        cli.prepare(device, threads, out)

    schedule = warm_up(min(_WARM_UP, max(1, steps // 2)), steps)
    plan = Plan(steps, 1, batch, min(points, steps), schedule, device=device)
    study = Study(tasks, plan, lr, rates, fragments)
    methods = make_methods(study, local_steps=between, densities=fractions)
    console = make_console()

    def outcomes() -> Iterator[Outcome]:
        with open_display(console, len(methods)) as display:
            for method in methods:
                total = range(len(tasks))
                yield run_method(method, seeds=total, tries=1, rounds=steps, display=display)

    def target(finished: list[Outcome]) -> float | None:
        return default_target(finished) if target_loss is None else target_loss

    def tables(finished: list[Outcome]) -> list[Table]:
        return make_tables(finished, target(finished))

    def findings(finished: list[Outcome]) -> dict[str, Any]:
        goal = target(finished)
        found: dict[str, Any] = {"target_loss": goal}
        if goal is not None:
            costs = {describe(o.name, o.labels): needed(o.mean_curve(), goal) for o in finished}
            found["steps_and_bytes_to_target"] = costs
        return found

    settings = {
        "task": task,
        "task_options": options,
        "parameters": numel(tasks[0]),
        "clients": clients,
        "steps": steps,
        "batch": batch,
        "local_steps": between,
        "densities": fractions,
        "value_bits": VALUE_BITS,
        "exempt_bits": EXEMPT_BITS,
        "lr": lr,
        "warm_up": _WARM_UP,
        "betas": BETAS,
        "weight_decay": WEIGHT_DECAY,
        "server_lrs": rates,
        "fragments": fragments,
        "seeds": seeds,
        "device": device,
    }
    conduct(
        "local_steps",
        outcomes(),
        settings,
        out,
        console,
        make_tables=tables,
        write_plots=write_plots,
        findings=findings,
    )


if __name__ == "__main__":
    app()

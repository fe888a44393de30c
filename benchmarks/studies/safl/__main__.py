"""The command; see ``--help``."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.studies import cli
from benchmarks.studies.progress import open_display
from benchmarks.studies.report import conduct
from benchmarks.studies.runs import Outcome
from benchmarks.studies.safl.figures import make_tables, write_plots
from benchmarks.studies.safl.methods import Study, make_methods
from benchmarks.studies.safl.peers import PEERS
from benchmarks.studies.safl.sketched import BETAS, FAMILIES, LOCAL_LR, SERVERS
from benchmarks.studies.training import Plan, cosine
from benchmarks.studies.tuning import run_method
from comm_hooks.launchers.output import make_console

_LABEL_SMOOTHING = 0.1
_WEIGHT_DECAY = 1e-4

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.command()
def safl(
    task: cli.TaskName = "digits",
    data_dir: cli.DataDir = None,
    task_option: cli.TaskOptions = None,
    clients: cli.Clients = 5,
    rounds: Annotated[
        int | None, typer.Option(help="Rounds per run. [default: 60, quick: 30]")
    ] = None,
    batch: cli.Batch = 16,
    local_steps: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Local steps per round (K). Those after the first are run for the first family "
            "only; peers take one step per round. [default: 1,5, quick: 1]",
        ),
    ] = None,
    ratios: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Sizes of the sketch, as fractions of the model; peers get the bytes that SAFL "
            "needs at each. [default: 0.1,0.01,0.001,0.0001, quick: 0.1,0.01]",
        ),
    ] = None,
    families: Annotated[str, typer.Option(metavar="LIST", help="Families of sketches.")] = ",".join(
        FAMILIES
    ),
    peers: Annotated[
        str, typer.Option(metavar="LIST", help='Methods to compare with; "" for none.')
    ] = ",".join(PEERS),
    server: Annotated[str, typer.Option(help=f"SAFL's server: {' or '.join(SERVERS)}.")] = "adam",
    seeds: cli.Seeds = None,
    tries: cli.Tries = None,
    points: cli.Points = 10,
    device: cli.Device = "cpu",
    threads: cli.Threads = 1,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path(
        "comm-hooks-report/safl"
    ),
    quick: cli.Quick = False,
) -> None:
    """Compare SAFL, at sketches of several sizes, with its peers at the same bytes per round.

    The model is one vector, and all of it is compressed. Bytes are those that a client sends per
    round by the ring algorithms, counted. Each method's learning rate is tuned on the first seed
    by the same number of tries, then all seeds are run (default: 3 tries and 3 seeds, quick: 2 and
    1). Writes safl.json and plots to --out. Exit codes: 0, 2 for bad input, 130 if interrupted
    (what is finished is reported).
    """
    with cli.bad_input("safl"):
        rounds = (30 if quick else 60) if rounds is None else rounds
        seeds = (1 if quick else 3) if seeds is None else seeds
        tries = (2 if quick else 3) if tries is None else tries
        cli.require_at_least(
            1, clients=clients, rounds=rounds, batch=batch, seeds=seeds, tries=tries, points=points
        )
        steps = cli.parse_numbers("--local-steps", local_steps or ("1" if quick else "1,5"), int)
        for count in steps:
            cli.require_at_least(1, local_steps=count)
        fractions = cli.parse_numbers(
            "--ratios", ratios or ("0.1,0.01" if quick else "0.1,0.01,0.001,0.0001"), float
        )
        for fraction in fractions:
            if not 0 < fraction <= 1:
                raise ValueError(f"--ratios: must lie in (0, 1], got {fraction:g}")
        chosen = cli.parse_names("--families", families, FAMILIES)
        others = cli.parse_names("--peers", peers, list(PEERS))
        cli.parse_names("--server", server, SERVERS)
        options = cli.parse_task_options(task_option)
        if task == "digits":
            options.setdefault("model", "mlp" if quick else "resnet")
        options.setdefault("label_smoothing", _LABEL_SMOOTHING)
        tasks = cli.build_tasks(task, data_dir, clients=clients, seeds=seeds, **options)
        cli.prepare(device, threads, out)

    plan = Plan(rounds, steps[0], batch, min(points, rounds), cosine, flat=True, device=device)
    study = Study(tasks, plan, _WEIGHT_DECAY, amsgrad=server == "amsgrad")
    methods = make_methods(
        study, ratios=fractions, families=chosen, peers=others, local_steps=steps
    )
    console = make_console()

    def outcomes() -> Iterator[Outcome]:
        with open_display(console, len(methods)) as display:
            for method in methods:
                total = range(len(tasks))
                yield run_method(method, seeds=total, tries=tries, rounds=rounds, display=display)

    settings = {
        "task": task,
        "task_options": options,
        "parameters": study.numel,
        "clients": clients,
        "seeds": seeds,
        "tries": tries,
        "server": server,
        "betas": BETAS,
        "local_lr": LOCAL_LR,
        "weight_decay": _WEIGHT_DECAY,
        **{k: v for k, v in asdict(plan).items() if k not in ("schedule", "local_steps")},
        "schedule": "cosine to 1/1000",
        "local_steps": steps,
        "ratios": fractions,
    }
    conduct(
        "safl",
        outcomes(),
        settings,
        out,
        console,
        make_tables=make_tables,
        write_plots=write_plots,
    )


if __name__ == "__main__":
    app()

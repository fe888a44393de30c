"""The command, see ``--help``: its options and its table."""

from dataclasses import replace
from typing import Annotated

from benchmarks.lab import tables
from benchmarks.lab.outcomes import Outcome
from benchmarks.lab.schedules import cosine
from benchmarks.lab.training import Plan
from benchmarks.studies import cli
from benchmarks.studies.safl.budget import BETAS, FAMILIES, LOCAL_LR, SERVERS
from benchmarks.studies.safl.methods import UNCOMPRESSED, Study, make_methods
from benchmarks.studies.safl.peers import PEERS

_LABEL_SMOOTHING = 0.1
_WEIGHT_DECAY = 1e-4


def safl(
    task: cli.TaskName,
    data_dir: cli.DataDir,
    task_option: cli.TaskOptions,
    clients: Annotated[int, cli.CLIENTS],
    rounds: Annotated[int, cli.Option("Rounds per run.", 300, 30, least=1)],
    batch: Annotated[int, cli.BATCH],
    local_steps: Annotated[
        list[int],
        cli.Option(
            "Local steps per round (K). Those after the first are run for the first family only; "
            "peers take one step per round.",
            *("1,5", "1"),
            least=1,
        ),
    ],
    ratios: Annotated[
        list[float],
        cli.Option(
            "Sizes of the sketch, as fractions of the model; peers get the bytes that SAFL needs "
            "at each.",
            "0.1,0.01",
            check=cli.fraction,
        ),
    ],
    families: Annotated[
        list[str], cli.Option("Families of sketches.", ",".join(FAMILIES), known=FAMILIES)
    ],
    peers: Annotated[
        list[str],
        cli.Option('Methods to compare with; "" for none.', ",".join(PEERS), known=list(PEERS)),
    ],
    server: Annotated[
        str, cli.Option(f"SAFL's server: {' or '.join(SERVERS)}.", "adam", known=SERVERS)
    ],
    validation: cli.Validation,
    seeds: Annotated[int, cli.SEEDS],
    tries: Annotated[int, replace(cli.TRIES, quick=2)],
    points: Annotated[int, cli.POINTS],
    device: cli.Device,
    quick: cli.Quick,
) -> cli.Comparison:
    """Compare SAFL, at sketches of several sizes, with its peers at the same bytes per round.

    The model is one vector, and all of it is compressed. Bytes are those that a client sends per
    round by the ring algorithms, counted. Each method's learning rate is tuned on data apart
    from those that are reported.
    """
    options = dict(task_option)
    if task == "digits":
        options.setdefault("label_smoothing", _LABEL_SMOOTHING)
        options.setdefault("model", "mlp" if quick else "resnet")
    tasks = cli.build_tasks(
        task, data_dir, clients=clients, seeds=seeds, validation=validation, **options
    )
    plan = Plan(
        rounds, local_steps[0], batch, min(points, rounds), cosine, flat=True, device=device
    )
    study = Study(tasks, plan, _WEIGHT_DECAY, amsgrad=server == "amsgrad")
    return cli.Comparison(
        make_methods(study, ratios=ratios, families=families, peers=peers, local_steps=local_steps),
        rounds,
        tables.TITLE,
        columns_of,
        lambda outcome: outcome.labels["ratio"],
        {
            "task_options": options,
            "parameters": study.numel,
            "betas": BETAS,
            "local_lr": LOCAL_LR,
            "weight_decay": _WEIGHT_DECAY,
            "points": plan.points,
            "flat": True,
            "schedule": "cosine to 1/1000",
        },
    )


def columns_of(outcomes: list[Outcome]) -> tables.Columns:
    """Return the columns of the table."""
    full = next((o.bytes_per_round for o in outcomes if o.name == UNCOMPRESSED), 0.0)
    return {
        "ratio": tables.label("ratio"),
        "method": lambda outcome: outcome.name,
        "K": tables.label("K"),
        "sent": tables.sent,
        "fewer": tables.fewer(full),
        "lr": tables.learning_rate,
        **tables.JUDGED,
        "note": lambda outcome: outcome.note,
    }


app = cli.study(safl)

if __name__ == "__main__":
    app()

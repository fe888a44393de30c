"""The command, see ``--help``: its options, its tables and its plots."""

from dataclasses import replace
from pathlib import Path
from typing import Annotated

from rich.table import Table

from benchmarks.lab import plots, tables
from benchmarks.lab.outcomes import Outcome
from benchmarks.lab.schedules import cosine
from benchmarks.lab.simulated import Plan
from benchmarks.lab.tasks import options_of
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
            each=int,
        ),
    ],
    ratios: Annotated[
        list[float],
        cli.Option(
            "Sizes of the sketch, as fractions of the model; peers get the bytes that SAFL needs "
            "at each.",
            "0.1,0.01",
            each=float,
            check=cli.fraction,
        ),
    ],
    families: Annotated[
        list[str],
        cli.Option("Families of sketches.", ",".join(FAMILIES), each=str, known=FAMILIES),
    ],
    peers: Annotated[
        list[str],
        cli.Option(
            'Methods to compare with; "" for none.', ",".join(PEERS), each=str, known=list(PEERS)
        ),
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
    round by the ring algorithms, counted. Each method's learning rate is tuned on the first seed
    and on data apart from those that are reported, then all seeds are run. Writes safl.json and
    plots to --out; a study that was interrupted goes on there. Exit codes: 0, 2 for bad input, 130
    if interrupted (what is finished is reported).
    """
    options = dict(task_option)
    if "label_smoothing" in options_of(task):
        options.setdefault("label_smoothing", _LABEL_SMOOTHING)
    if task == "digits":
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
        make_tables,
        write_plots,
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
        choosing=("families", "peers", "ratios", "local_steps"),
    )


def make_tables(outcomes: list[Outcome]) -> list[Table]:
    """Return the table, a section per ratio."""
    full = next((o.bytes_per_round for o in outcomes if o.name == UNCOMPRESSED), 0.0)
    columns: tables.Columns = {
        "ratio": tables.label("ratio"),
        "method": lambda outcome: outcome.name,
        "K": tables.label("K"),
        "sent": tables.sent,
        "fewer": tables.fewer(full),
        "lr": tables.learning_rate,
        **tables.JUDGED,
        "note": lambda outcome: outcome.note,
    }
    return [tables.tabulate(tables.TITLE, columns, outcomes, lambda o: o.labels["ratio"])]


def write_plots(outcomes: list[Outcome], out: Path) -> list[Path]:
    """Write the three plots; return their paths."""
    return [
        _by_rounds(outcomes, out / "error-vs-rounds.png"),
        _by_bytes(outcomes, out / "error-vs-bytes.png"),
        _by_size(outcomes, out / "sketch-sizes.png"),
    ]


def _name(outcome: Outcome) -> str:
    return f"{outcome.name}, K = {outcome.labels['K']}" if outcome.labels["K"] > 1 else outcome.name


def _ratios(outcomes: list[Outcome]) -> list[float]:
    return list(dict.fromkeys(r for o in outcomes if (r := o.labels["ratio"]) is not None))


def _sized(outcomes: list[Outcome]) -> list[str]:
    """Return the names of what has a ratio, in order of appearance."""
    return list(dict.fromkeys(_name(o) for o in outcomes if o.labels["ratio"] is not None))


def _looks(outcomes: list[Outcome]) -> dict[str, plots.Style]:
    looks = {name: plots.style(index) for index, name in enumerate(_sized(outcomes))}
    others = [o for o in outcomes if _name(o) not in looks]
    for index, outcome in enumerate(others):
        colour = plots.BLACK if outcome.name == UNCOMPRESSED else plots.GREY
        looks[_name(outcome)] = {"color": colour, "linestyle": plots.DASHES[index % 4]}
    return looks


def _by_rounds(outcomes: list[Outcome], path: Path) -> Path:
    """One panel per ratio; what has none is in all of them."""
    looks = _looks(outcomes)
    shown: list[float | None] = [*_ratios(outcomes)] or [None]
    figure, panels = plots.new_figure(len(shown))
    for axes, ratio in zip(panels, shown, strict=True):
        for outcome in outcomes:
            if outcome.labels["ratio"] in (None, ratio):
                plots.draw_curves(axes, outcome, _name(outcome), looks[_name(outcome)])
        axes.set_title("" if ratio is None else f"ratio {ratio:g}", fontsize="medium")
        plots.count_rounds(axes)
    panels[0].set_ylabel("held-out error (%)")
    return plots.save(figure, path)


def _by_bytes(outcomes: list[Outcome], path: Path) -> Path:
    """Where each method ends against what a round costs."""
    figure, (axes,) = plots.new_figure(width=7)
    finished = [o for o in outcomes if not o.diverged and o.bytes_per_round > 0]
    for name, look in _looks(outcomes).items():
        own = [o for o in finished if _name(o) == name]
        ends = [(o.bytes_per_round, [100 * error for error in o.errors]) for o in own]
        plots.draw_ends(axes, ends, name, look)
    plots.count_bytes(axes)
    axes.set_ylabel("held-out error at the end (%)")
    return plots.save(figure, path)


def _by_size(outcomes: list[Outcome], path: Path) -> Path:
    """SAFL's curves for all sizes of the sketch, one panel per family and local steps."""
    names = [name for name in _sized(outcomes) if name.startswith("safl")]
    ratios = _ratios(outcomes)
    figure, panels = plots.new_figure(max(1, len(names)))
    for axes, name in zip(panels, names, strict=False):
        for outcome in outcomes:
            if _name(outcome) == name:
                ratio = outcome.labels["ratio"]
                look = plots.style(ratios.index(ratio))
                plots.draw_curves(axes, outcome, f"ratio {ratio:g}", look)
        axes.set_title(name, fontsize="medium")
        plots.count_rounds(axes)
    panels[0].set_ylabel("held-out error (%)")
    return plots.save(figure, path)


app = cli.study(safl)

if __name__ == "__main__":
    app()

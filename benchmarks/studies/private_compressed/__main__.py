"""The command, see ``--help``: its options and its table."""

from dataclasses import replace
from typing import Annotated

from benchmarks.lab import tables
from benchmarks.lab.outcomes import Outcome
from benchmarks.studies import cli
from benchmarks.studies.private_compressed.schemes import (
    CONTROL,
    OPTIMIZERS,
    SCHEMES,
    Study,
    make_methods,
)
from benchmarks.studies.private_training import RECORDED, PrivatePlan, end_of


def private_compressed(
    ranks: Annotated[list[int], cli.Option("Numbers of ranks.", "2,4", "2", least=1)],
    optimizers: Annotated[
        list[str], cli.Option("", ",".join(OPTIMIZERS), OPTIMIZERS[1], known=OPTIMIZERS)
    ],
    schemes: Annotated[
        list[str],
        cli.Option(
            "Where noise is added, and what compresses.", ",".join(SCHEMES), known=list(SCHEMES)
        ),
    ],
    ratio: Annotated[
        float,
        cli.Option(
            "Size of messages over that of gradients, where it is a choice.",
            0.1,
            check=cli.fraction,
        ),
    ],
    steps: Annotated[int, cli.Option("Steps per run.", 150, 22, least=1)],
    batch: Annotated[int, cli.Option("Expected samples per step, over all ranks.", 64, least=1)],
    sigma: Annotated[float, cli.Option("The noise multiplier.", 1.0)],
    max_grad_norm: Annotated[float, cli.Option("C.", 1.0)],
    delta: Annotated[
        float | None,
        cli.Option("Of the guarantee. [default: half of one over the samples]", None),
    ],
    validation: cli.Validation,
    seeds: Annotated[int, cli.SEEDS],
    tries: Annotated[int, cli.TRIES],
    points: Annotated[int, replace(cli.POINTS, full=5)],
    device: cli.Device,
) -> cli.Comparison:
    """Compare compressed private training with exact exchange and with none, at equal epsilon.

    Digits, a perceptron. Learning rates are constant, and tuned on data apart from those that are
    reported, which is not accounted for. Noise and samples are drawn anew in
    every run, so a repeated study gives slightly other figures.
    """
    tasks = cli.build_tasks("digits", None, clients=1, seeds=seeds, validation=validation)
    samples = len(tasks[0].clients[0])
    if max(ranks) > samples:
        raise ValueError(f"--ranks: {samples} samples are not enough for {max(ranks)} ranks")
    plan = PrivatePlan.for_samples(
        samples,
        delta,
        steps=steps,
        batch=batch,
        noise_multiplier=sigma,
        max_grad_norm=max_grad_norm,
        points=min(points, steps),
        device=device,
    )
    plan.check(samples)
    study = Study(tasks, plan, ratio)

    return cli.Comparison(
        make_methods(study, schemes, optimizers, ranks),
        steps,
        _TITLE,
        columns_of,
        _case,
        {"task": "digits", "samples": samples, "delta": plan.delta, **RECORDED},
    )


_TITLE = (
    "Sent: bytes per rank and step; epsilon against who sees the model, and single ranks' messages"
)


def columns_of(outcomes: list[Outcome]) -> tables.Columns:
    """Return the columns of the table."""
    full = {_case(o): o.bytes_per_round for o in outcomes if o.name == CONTROL}
    return {
        "ranks": tables.label("ranks"),
        "optimizer": tables.label("optimizer"),
        "scheme": lambda outcome: outcome.name,
        "sent": tables.sent,
        "fewer": lambda outcome: tables.fewer(full.get(_case(outcome), 0.0))(outcome),
        "lr": tables.learning_rate,
        **tables.JUDGED,
        "epsilon": lambda o: f"{end.epsilon:.2f}" if (end := end_of(o.runs[0].curve)) else "-",
        "of ranks": _peer_epsilon,
    }


def _case(outcome: Outcome) -> tuple[int, str]:
    return outcome.labels["ranks"], outcome.labels["optimizer"]


def _peer_epsilon(outcome: Outcome) -> str:
    end = end_of(outcome.runs[0].curve)
    if end is None:
        return "-"
    return "none" if end.peer_epsilon is None else f"{end.peer_epsilon:.2f}"


app = cli.study(private_compressed)

if __name__ == "__main__":
    app()

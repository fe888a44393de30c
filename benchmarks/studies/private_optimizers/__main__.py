"""The command, see ``--help``: its options and its table."""

from dataclasses import replace
from typing import Annotated

from benchmarks.lab import tables
from benchmarks.studies import cli
from benchmarks.studies.private_optimizers.data import KINDS, build
from benchmarks.studies.private_optimizers.methods import (
    METHODS,
    PLAIN,
    PRIVATE,
    make_methods,
)
from benchmarks.studies.private_training import RECORDED, PrivatePlan, end_of

_QUICK_STEPS = 22
_DEFAULTS = {
    "steps": ", ".join(f"{name}: {kind.steps}" for name, kind in KINDS.items()),
    "batch": ", ".join(f"{name}: {kind.batch}" for name, kind in KINDS.items()),
}


def private_optimizers(
    task: Annotated[str, cli.Option(f"What to learn: {', '.join(KINDS)}.", "digits", known=KINDS)],
    data_dir: cli.DataDir,
    steps: Annotated[
        int | None,
        cli.Option(f"Steps per run. [default: {_DEFAULTS['steps']}, quick: 22]", None, least=1),
    ],
    batch: Annotated[
        int | None,
        cli.Option(f"Expected samples per step. [default: {_DEFAULTS['batch']}]", None, least=1),
    ],
    sigmas: Annotated[list[float], cli.Option("Noise multipliers.", "0.6,1,2,4", "1,3")],
    max_grad_norm: Annotated[
        float, cli.Option("C. Methods that scale gradients first may have ten times that.", 1.0)
    ],
    delta: Annotated[
        float | None,
        cli.Option("Of the guarantee. [default: half of one over the private samples]", None),
    ],
    public_share: Annotated[
        float,
        cli.Option("Of the training samples, which are public.", 0.01, check=cli.fraction),
    ],
    methods: Annotated[
        list[str],
        cli.Option(
            "What is compared, separated by semicolons; all: private and plain (those of words "
            "with --task verses only).",
            "all",
            separator=";",
            known=["all", "private", "plain", *METHODS],
        ),
    ],
    micro_batch: Annotated[
        int, cli.Option("Samples whose gradients are in memory at a time.", 128, least=1)
    ],
    validation: cli.Validation,
    seeds: Annotated[int, cli.SEEDS],
    tries: Annotated[int, replace(cli.TRIES, full=8)],
    points: Annotated[int, replace(cli.POINTS, full=10)],
    device: cli.Device,
    quick: cli.Quick,
) -> cli.Comparison:
    """Compare private optimizers: accuracy against the noise and against epsilon.

    Learning rates are constant, and tuned on data apart from those that are reported, with as many
    tries for each method and noise multiplier, other settings included. It is not accounted for:
    it would cost budget on data that need protection. Noise and samples are drawn anew in every
    run, so a repeated study gives slightly other figures.
    """
    names = _names_of(methods, task)
    steps = steps or (_QUICK_STEPS if quick else KINDS[task].steps)
    batch = batch or KINDS[task].batch
    data = [
        build(
            task,
            seed,
            data_dir,
            public=public_share,
            validation=validation,
        )
        for seed in range(seeds)
    ]
    samples = len(data[0].task.clients[0])
    plan = PrivatePlan.for_samples(
        samples,
        delta,
        steps=steps,
        batch=batch,
        noise_multiplier=1.0,
        max_grad_norm=max_grad_norm,
        points=min(points, steps),
        micro_batch_size=micro_batch,
        device=device,
    )
    plans = [replace(plan, noise_multiplier=sigma) for sigma in sigmas]
    for each in plans:
        each.check(samples)
    return cli.Comparison(
        make_methods(names, data, plans),
        steps,
        "Held-out error at the end; *: the largest or smallest rate tried",
        lambda outcomes: _COLUMNS,
        lambda outcome: outcome.labels["sigma"],
        {
            "private samples": samples,
            "public samples": len(data[0].public),
            "steps": steps,
            "batch": batch,
            "delta": plan.delta,
            **RECORDED,
        },
    )


def _names_of(chosen: list[str], task: str) -> list[str]:
    """Return the methods that are meant; those of words only where inputs are such."""
    groups = {"all": METHODS, "private": PRIVATE, "plain": PLAIN}
    words = KINDS[task].words
    names = []
    for name in chosen:
        if name in groups:
            names += [each for each in groups[name] if words or not METHODS[each].words]
        elif METHODS[name].words and not words:
            raise ValueError(f"--methods: {name!r} needs counts of words: --task verses")
        else:
            names.append(name)
    return list(dict.fromkeys(names))


_COLUMNS: tables.Columns = {
    "sigma": tables.label("sigma"),
    "epsilon": lambda o: f"{end.epsilon:.2f}" if (end := end_of(o.runs[0].curve)) else "-",
    "method": lambda outcome: outcome.name,
    "lr": tables.learning_rate,
    "settings": tables.other_settings,
    **tables.JUDGED,
}


app = cli.study(private_optimizers)

if __name__ == "__main__":
    app()

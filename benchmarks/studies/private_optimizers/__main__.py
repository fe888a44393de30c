"""The command, see ``--help``: its options, its tables and its plots."""

import statistics
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from benchmarks.lab import plots, tables
from benchmarks.lab.outcomes import Outcome
from benchmarks.studies import cli
from benchmarks.studies.private_optimizers.data import KINDS, build
from benchmarks.studies.private_optimizers.methods import (
    ABLATIONS,
    METHODS,
    PLAIN,
    PRIVATE,
    make_methods,
)
from benchmarks.studies.private_training import RECORDED, PrivatePlan, end_of
from comm_hooks.optim.private.accounting import max_steps

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
    spend: Annotated[
        float | None,
        cli.Option(
            "Instead of --steps: an epsilon, for which each sigma has its own number of steps.",
            None,
            check=cli.positive,
        ),
    ],
    batch: Annotated[
        int | None,
        cli.Option(f"Expected samples per step. [default: {_DEFAULTS['batch']}]", None, least=1),
    ],
    sigmas: Annotated[
        list[float], cli.Option("Noise multipliers.", "0.6,1,2,4", "1,3", each=float)
    ],
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
    public_turned: Annotated[
        bool,
        cli.Option(
            "Turn the public images by a right angle, as if they came from elsewhere.", False
        ),
    ],
    methods: Annotated[
        list[str],
        cli.Option(
            "What is compared, separated by semicolons; all: private and plain (those of words "
            "with --task verses only); ablations: single claims.",
            "all",
            each=str,
            separator=";",
            known=["all", "private", "plain", "ablations", *METHODS],
        ),
    ],
    micro_batch: Annotated[
        int, cli.Option("Samples whose gradients are in memory at a time.", 128, least=1)
    ],
    validation: cli.Validation,
    seeds: Annotated[int, cli.SEEDS],
    tries: Annotated[int, cli.TRIES],
    points: Annotated[int, replace(cli.POINTS, full=10)],
    device: cli.Device,
    quick: cli.Quick,
) -> cli.Comparison:
    """Compare private optimizers: accuracy against the noise and against epsilon.

    Learning rates are constant, and tuned on the first seed and on data apart from those that are
    reported, for each method, noise multiplier and other setting. Tuning is not accounted for: it
    would cost budget on data that need protection. Noise and samples are drawn anew in every run,
    so a repeated study gives slightly other figures. Writes private_optimizers.json and plots to
    --out; a study that was interrupted goes on there. Exit codes: 0, 2 for bad input, 130 if
    interrupted (what is finished is reported).
    """
    names = _names_of(methods, task)
    if steps and spend:
        raise ValueError("--steps and --spend: give one of them")
    steps = steps or (_QUICK_STEPS if quick else KINDS[task].steps)
    batch = batch or KINDS[task].batch
    data = [
        build(
            task,
            seed,
            data_dir,
            public=public_share,
            validation=validation,
            turned=public_turned,
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
    if spend:
        plans = [_until_spent(each, spend) for each in plans]
    return cli.Comparison(
        make_methods(names, data, plans),
        max(each.steps for each in plans),
        "Held-out error at the end; *: the largest or smallest rate tried",
        lambda outcomes: _COLUMNS,
        lambda outcome: outcome.labels["sigma"],
        {
            "private samples": samples,
            "public samples": len(data[0].public),
            "steps": [each.steps for each in plans] if spend else steps,
            "batch": batch,
            "delta": plan.delta,
            **RECORDED,
        },
        plots=write_plots,
    )


def _names_of(chosen: list[str], task: str) -> list[str]:
    """Return the methods that are meant; those of words only where inputs are such."""
    groups = {
        "all": [*PLAIN, *PRIVATE],
        "private": [*PRIVATE],
        "plain": [*PLAIN],
        "ablations": [*ABLATIONS],
    }
    words = KINDS[task].words
    names = []
    for name in chosen:
        if name in groups:
            names += [each for each in groups[name] if words or not METHODS[each].words]
        elif METHODS[name].words and not words:
            raise ValueError(f"--methods: {name!r} needs counts of words: --task verses")
        else:
            names.append(name)
    if not names:
        raise ValueError("there is nothing to compare: --methods is empty")
    return list(dict.fromkeys(names))


def _until_spent(plan: PrivatePlan, epsilon: float) -> PrivatePlan:
    """Return the plan with as many steps as the budget lasts for."""
    steps = max_steps(
        epsilon,
        plan.delta,
        noise_multiplier=plan.noise_multiplier,
        sample_rate=plan.sample_rate,
    )
    if not steps:
        raise ValueError(
            f"--spend: sigma {plan.noise_multiplier:g} spends more than epsilon {epsilon:g} in "
            "one step"
        )
    return replace(plan, steps=steps, points=min(plan.points, steps))


_COLUMNS: tables.Columns = {
    "sigma": tables.label("sigma"),
    "epsilon": lambda o: "-" if (end := end_epsilon(o)) is None else f"{end:.2f}",
    "method": lambda outcome: outcome.name,
    "lr": tables.learning_rate,
    "settings": tables.other_settings,
    **tables.JUDGED,
}


def end_epsilon(outcome: Outcome) -> float | None:
    """Return what a run has spent at its end; None without privacy."""
    end = end_of(outcome.runs[0].curve)
    return end.epsilon if end else None


def write_plots(outcomes: list[Outcome], out: Path) -> list[Path]:
    """Write ``accuracy-vs-epsilon.png``: a line per method over the means, a dot per seed."""
    figure, (axes,) = plots.new_figure(width=6)
    private = [o for o in outcomes if end_epsilon(o) is not None and not o.diverged]
    for index, name in enumerate(dict.fromkeys(o.name for o in private)):
        ends = [(end_epsilon(o) or 0.0, _accuracies(o)) for o in private if o.name == name]
        plots.draw_ends(axes, ends, name, {"markersize": 4, **plots.style(index)})
    for outcome in outcomes:
        if outcome.labels["sigma"] is None:
            look = {"color": plots.BLACK, "linestyle": "dotted"}
            level = statistics.mean(_accuracies(outcome))
            plots.draw_level(axes, level, f"{outcome.name}, not private", look)
    axes.set_xscale("log")
    axes.set_xlabel("epsilon at the end")
    axes.set_ylabel("held-out accuracy (%)")
    return [plots.save(figure, out / "accuracy-vs-epsilon.png")]


def _accuracies(outcome: Outcome) -> list[float]:
    return [100 * (1 - error) for error in outcome.errors]


app = cli.study(private_optimizers)

if __name__ == "__main__":
    app()

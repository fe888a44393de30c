"""The command; see ``--help``."""

from dataclasses import replace
from typing import Annotated

from benchmarks.studies import cli
from benchmarks.studies.private_optimizers.figures import make_tables, write_plots
from benchmarks.studies.private_optimizers.methods import (
    METHODS,
    TASKS,
    build_images,
    make_methods,
)
from benchmarks.studies.private_training import RECORDED, PrivatePlan

_STEPS = {"digits": 150, "cifar10": 875}
_BATCH = {"digits": 64, "cifar10": 4096}
_QUICK_STEPS = 22


def private_optimizers(
    task: Annotated[str, cli.Option(f"What to learn: {', '.join(TASKS)}.", "digits", known=TASKS)],
    data_dir: cli.DataDir,
    steps: Annotated[
        int | None,
        cli.Option("Steps per run. [default: 150, cifar10: 875, quick: 22]", None, least=1),
    ],
    batch: Annotated[
        int | None,
        cli.Option("Expected samples per step. [default: 64, cifar10: 4096]", None, least=1),
    ],
    sigmas: Annotated[
        list[float], cli.Option("Noise multipliers.", "0.6,1,2,4", "1,3", each=float)
    ],
    max_grad_norm: Annotated[
        float, cli.Option("C. Methods that scale gradients first have ten times that.", 1.0)
    ],
    delta: Annotated[
        float | None,
        cli.Option("Of the guarantee. [default: half of one over the private images]", None),
    ],
    methods: Annotated[
        list[str], cli.Option("What is compared.", ",".join(METHODS), each=str, known=METHODS)
    ],
    micro_batch: Annotated[
        int, cli.Option("Samples whose gradients are in memory at a time.", 128, least=1)
    ],
    seeds: Annotated[int, cli.SEEDS],
    tries: Annotated[int, cli.TRIES],
    points: Annotated[int, replace(cli.POINTS, full=10)],
    device: cli.Device,
    quick: cli.Quick,
) -> cli.Comparison:
    """Compare private optimizers: accuracy against the noise and against epsilon.

    Learning rates are constant, and tuned on the first seed by the same number of tries for each
    method, noise multiplier and other setting (default: 3 tries and 3 seeds, quick: 1 and 1).
    Tuning is not accounted for: it would cost budget on data that need protection. Noise and
    samples are drawn anew in every run, so a repeated study gives slightly other figures. Writes
    private_optimizers.json and plots to --out. Exit codes: 0, 2 for bad input, 130 if interrupted
    (what is finished is reported).
    """
    if not methods:
        raise ValueError("there is nothing to compare: --methods is empty")
    steps = steps or (_QUICK_STEPS if quick else _STEPS[task])
    batch = batch or _BATCH[task]
    images = [build_images(task, seed, data_dir) for seed in range(seeds)]
    samples = len(images[0].task.clients[0])
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
        make_methods(methods, images, plans),
        steps,
        make_tables,
        write_plots,
        {
            "private images": samples,
            "public images": len(images[0].public),
            "steps": steps,
            "batch": batch,
            "delta": plan.delta,
            **RECORDED,
        },
    )


app = cli.study(private_optimizers)

if __name__ == "__main__":
    app()

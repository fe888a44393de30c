"""The command, see ``--help``: its options and its table."""

import statistics
from dataclasses import replace
from typing import Annotated

from benchmarks.lab import tables
from benchmarks.studies import cli
from benchmarks.studies.private_toy_regression.methods import GRID, Study, make_methods
from benchmarks.studies.private_toy_regression.problem import BATCH, LABEL_VARIANCE, RARE, SAMPLES
from comm_hooks.optim.private.accounting import GaussianEvent, RDPAccountant

_DELTA = 1 / SAMPLES


def private_toy_regression(
    steps: Annotated[int, cli.Option("Steps per run.", 2250, 600, least=1)],
    noise_multiplier: Annotated[float, cli.Option("sigma.", 0.7, least=1e-3)],
    max_grad_norm: Annotated[float, cli.Option("C.", 0.5, least=1e-3)],
    batch: Annotated[int, cli.Option("Expected samples per step.", BATCH, least=1)],
    rare: Annotated[
        float,
        cli.Option("Share of the samples that have a rare feature.", RARE, check=cli.fraction),
    ],
    rates: Annotated[
        list[float],
        cli.Option(
            "Learning rates: each method tries all of them, on the first seed.",
            ",".join(f"{rate:g}" for rate in GRID),
            "0.005,0.02,0.2",
            least=0,
        ),
    ],
    seeds: Annotated[int, cli.SEEDS],
    points: Annotated[int, replace(cli.POINTS, full=45)],
) -> cli.Comparison:
    """Repeat the toy regression of AdaDPS, with and without privacy.

    1,000 samples, 50 frequent features that mean little and 450 rare ones that mean everything.
    With privacy: AdaDPS, DP-SGD, DP-Adam, DP-AdamBC, DP-RMSProp, AdaDPS's preconditioner after the
    noise, scale-then-privatize and DP^2. Without: AdaS, SGD and Adam. The best mean
    over all seeds counts.
    """
    if batch > SAMPLES:
        raise ValueError(f"--batch: there are only {SAMPLES} samples, got {batch}")
    study = Study(steps, noise_multiplier, max_grad_norm, rates, min(points, steps), batch, rare)
    history = [GaussianEvent(noise_multiplier, batch / SAMPLES, steps)]
    epsilon = RDPAccountant().epsilon(history, _DELTA)

    return cli.Comparison(
        make_methods(study),
        steps,
        f"Final training loss; private: epsilon {epsilon:.2f} at delta {_DELTA:g} by RDP; *: the "
        "largest or smallest rate tried",
        lambda outcomes: _COLUMNS,
        lambda outcome: outcome.labels["private"],
        {
            "samples": SAMPLES,
            "label_variance": LABEL_VARIANCE,
            "epsilon": epsilon,
            "delta": _DELTA,
        },
        curves=("training loss", lambda point: point.loss),
    )


_COLUMNS: tables.Columns = {
    "method": lambda outcome: outcome.name,
    "private": tables.label("private"),
    "lr": tables.learning_rate,
    "other settings": tables.other_settings,
    "final loss": lambda o: "diverged" if o.diverged else f"{statistics.mean(o.losses):.4f}",
    "each seed": lambda o: "-" if o.diverged else " ".join(f"{x:.4f}" for x in o.losses),
}


app = cli.study(private_toy_regression)

if __name__ == "__main__":
    app()

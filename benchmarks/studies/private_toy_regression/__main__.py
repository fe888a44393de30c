"""The command; see ``--help``."""

import statistics
from dataclasses import replace
from typing import Annotated, Any

from benchmarks.studies import cli
from benchmarks.studies.private_toy_regression.figures import make_tables, reached, write_plots
from benchmarks.studies.private_toy_regression.methods import GRID, Fit, Study, make_methods
from benchmarks.studies.private_toy_regression.problem import BATCH, LABEL_VARIANCE, SAMPLES
from comm_hooks.launchers.lab.outcomes import Outcome
from comm_hooks.optim.private.accounting import GaussianEvent, RDPAccountant

_DELTA = 1 / SAMPLES


def private_toy_regression(
    steps: Annotated[int, cli.Option("Steps per run.", 2250, 600, least=1)],
    noise_multiplier: Annotated[float, cli.Option("sigma.", 0.7, least=1e-3)],
    max_grad_norm: Annotated[float, cli.Option("C.", 0.5, least=1e-3)],
    rates: Annotated[
        list[float],
        cli.Option(
            "Learning rates: each method tries all of them, on the first seed.",
            ",".join(f"{rate:g}" for rate in GRID),
            "0.005,0.02,0.2",
            least=0,
            each=float,
        ),
    ],
    seeds: Annotated[int, replace(cli.SEEDS, full=5)],
    points: Annotated[int, replace(cli.POINTS, full=45)],
) -> cli.Comparison:
    """Repeat the toy regression of AdaDPS, with and without privacy.

    1,000 samples, 50 frequent features that mean little and 450 rare ones that mean everything.
    With privacy: AdaDPS, DP-SGD, DP-Adam, DP-AdamBC, DP-RMSProp, AdaDPS's preconditioner after the
    noise, scale-then-privatize and DP^2. Without: AdaS, SGD and Adam. Every method is tuned on the
    first of 5 seeds (quick: 1). Writes private_toy_regression.json and two plots to --out. Exit
    codes: 0, 2 for bad input, 130 if interrupted (what is finished is reported).
    """
    study = Study(steps, noise_multiplier, max_grad_norm, rates, min(points, steps))
    history = [GaussianEvent(noise_multiplier, BATCH / SAMPLES, steps)]
    epsilon = RDPAccountant().epsilon(history, _DELTA)

    def findings(finished: list[Outcome]) -> dict[str, Any]:
        ends = {o.name: None if o.diverged else statistics.mean(o.losses) for o in finished}
        return {"final_loss": ends, "epsilon": epsilon, "delta": _DELTA}

    return cli.Comparison(
        make_methods(study),
        steps,
        lambda finished: make_tables(finished, epsilon, _DELTA),
        write_plots,
        {"samples": SAMPLES, "batch": BATCH, "label_variance": LABEL_VARIANCE},
        findings,
        reached,
        lambda outcome: [Fit(**vars(outcome))],
    )


app = cli.study(private_toy_regression)

if __name__ == "__main__":
    app()

"""What is compared, and how a run goes."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, Optimizer

from benchmarks.lab.outcomes import Advance, Diverged, Method
from benchmarks.lab.runs import Point, Tuned
from benchmarks.lab.training import is_due
from benchmarks.studies.private_toy_regression.problem import (
    BATCH,
    FEATURES,
    RARE,
    SAMPLES,
    ClippedRegression,
    Problem,
    draw,
    side_information,
)
from benchmarks.studies.private_training import diverging_ignored
from comm_hooks.collectives import run_ranks
from comm_hooks.compressors import Identity
from comm_hooks.exchange import Exchange
from comm_hooks.optim.private.dp_optimizer import DPOptimizer
from comm_hooks.optim.private.noise.mechanism import GaussianMechanism
from comm_hooks.optim.private.noise.secret import Secret
from comm_hooks.optim.private.optimizers.ada_dps import AdaDPS, AdaS
from comm_hooks.optim.private.optimizers.dp2 import DP2
from comm_hooks.optim.private.optimizers.dp_adam import DPAdam, DPAdamBC
from comm_hooks.optim.private.optimizers.dp_sgd import DPSGD, DPRMSProp
from comm_hooks.optim.private.optimizers.scale_then_privatize import ScaleThenPrivatize

Named = list[tuple[str, nn.Parameter]]
Build = Callable[[Named, Tuned], Optimizer]

GRID = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5)
"""Learning rates: every method tries all of them."""


@dataclass(frozen=True)
class Study:
    """What all methods share.

    Args:
        steps: of a run.
        noise_multiplier: sigma.
        max_grad_norm: C.
        rates: learning rates that are tried.
        points: how often the loss is computed, the end included.
        batch: the expected number of samples per step.
        rare: the share of the samples that have a rare feature.
    """

    steps: int
    noise_multiplier: float
    max_grad_norm: float
    rates: Sequence[float]
    points: int
    batch: int = BATCH
    rare: float = RARE

    @property
    def noise_variance(self) -> float:
        """Of the noise in a coordinate of the noised mean gradient."""
        return (self.noise_multiplier * self.max_grad_norm / self.batch) ** 2


def make_methods(study: Study) -> list[Method]:
    """Return the private methods, then those without privacy.

    Methods with a second hyperparameter that matters get as many tries for each of three values:
    the floor of DP-AdamBC, the clipping norm of scale-then-privatize, whose space is its own, and
    the ratio of DP^2's learning rates (that of its clipping norms has the same effect here).
    """
    phi = study.noise_variance
    scales = {"weight": side_information(study.rare)}
    floors = [{"gamma / Phi": floor} for floor in (0.1, 0.01, 0.001)]
    spaces = [{"C": norm} for norm in (0.5, 2.0, 8.0)]
    ratios = [{"lr ratio": ratio} for ratio in (0.3, 1.0, 3.0)]

    def ada_s(p: Named, s: Tuned) -> Optimizer:
        return AdaS(p, s["lr"], side_information=scales)

    private: dict[str, tuple[Build, Sequence[Tuned]]] = {
        "AdaDPS": (lambda p, s: AdaDPS(p, s["lr"], side_information=scales), [{}]),
        "DP-SGD": (lambda p, s: DPSGD(p, s["lr"]), [{}]),
        "DP-Adam": (lambda p, s: DPAdam(p, s["lr"]), [{}]),
        "DP-AdamBC": (lambda p, s: DPAdamBC(p, s["lr"], gamma=s["gamma / Phi"] * phi), floors),
        "DP-RMSProp": (lambda p, s: DPRMSProp(p, s["lr"]), [{}]),
        "A after the noise": (ada_s, [{}]),
        "scale-then-privatize": (
            lambda p, s: ScaleThenPrivatize(p, s["lr"], scale_eps=0.01),
            spaces,
        ),
        "DP2": (lambda p, s: DP2(p, s["lr"], lr_ratio=s["lr ratio"], eps=0.01), ratios),
    }
    plain: dict[str, Build] = {
        "AdaS": ada_s,
        "SGD": lambda p, s: SGD(p, s["lr"]),
        "Adam": lambda p, s: Adam(p, s["lr"]),
    }
    methods = [
        _method(study, name, build, variants, _train_privately)
        for name, (build, variants) in private.items()
    ]
    return methods + [
        _method(study, name, build, [{}], _train_plainly) for name, build in plain.items()
    ]


Train = Callable[[Study, Build, Tuned, int, Advance], list[Point]]


def _method(
    study: Study, name: str, build: Build, variants: Sequence[Tuned], train: Train
) -> Method:
    def run(settings: Tuned, seed: int, advance: Advance) -> list[Point]:
        return train(study, build, settings, seed, advance)

    tried = [{"lr": rate, **variant} for variant in variants for rate in study.rates]
    return Method(
        name, {"private": "yes" if train is _train_privately else "no"}, run, study.rates[0], tried
    )


def _train_privately(
    study: Study, build: Build, settings: Tuned, seed: int, advance: Advance
) -> list[Point]:
    problem, weight = draw(seed, study.rare), _new_weight()
    # Known to all, so that the study can be repeated: these data need no protection.
    secret = Secret(seed.to_bytes(32, "big"))
    norm = settings.get("C", study.max_grad_norm)

    def train(transport: Any) -> list[Point]:
        mechanism = GaussianMechanism(
            Exchange(Identity(), transport=transport),
            noise_multiplier=study.noise_multiplier,
            max_grad_norm=norm,
            expected_batch_size=study.batch,
            secret=secret,
        )
        optimizer = DPOptimizer(
            build([("weight", weight)], settings),
            ClippedRegression(problem, weight, norm),
            mechanism,
            enter=lambda: None,
        )

        def step(number: int) -> None:
            stream = secret.stream("samples", rank=0, step=number)
            drawn = stream.draw(SAMPLES, study.batch / SAMPLES)
            optimizer.backward(torch.tensor(drawn, dtype=torch.long))
            optimizer.step()

        return _curve(study, problem, weight, step, advance)

    with diverging_ignored():
        return run_ranks(train, 1)[0]


def _train_plainly(
    study: Study, build: Build, settings: Tuned, seed: int, advance: Advance
) -> list[Point]:
    problem, weight = draw(seed, study.rare), _new_weight()
    optimizer = build([("weight", weight)], settings)
    batches = torch.Generator().manual_seed(100_003 * (seed + 1))

    def step(number: int) -> None:
        samples = torch.randperm(SAMPLES, generator=batches)[: study.batch]
        weight.grad = problem.gradients(weight, samples).mean(0)
        optimizer.step()

    return _curve(study, problem, weight, step, advance)


def _new_weight() -> nn.Parameter:
    return nn.Parameter(torch.zeros(FEATURES))


def _curve(
    study: Study,
    problem: Problem,
    weight: nn.Parameter,
    step: Callable[[int], None],
    advance: Advance,
) -> list[Point]:
    """Take the steps; return the losses on the way.

    Raises:
        Diverged: with the points so far, if a loss is not finite.
    """
    curve: list[Point] = []
    for number in range(1, study.steps + 1):
        step(number)
        advance()
        if is_due(number, study.steps, study.points):
            loss = problem.loss(weight)
            if not math.isfinite(loss):
                raise Diverged(*curve)
            curve.append(Point(number, loss, 0.0, 0))
    return curve

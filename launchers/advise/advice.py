"""What every method would take on a network, and which one to use."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from benchmarks.lab.methods import Method
from benchmarks.lab.optimizers import OPTIMIZERS
from benchmarks.lab.runs import CONTROL
from comm_hooks.collectives.requests import AllGather
from comm_hooks.launchers.advise.cost_model import (
    Collective,
    Compute,
    Network,
    Plan,
    Prediction,
    predict,
)
from comm_hooks.launchers.advise.shares import ALL, Kept, Situation, kept_by
from comm_hooks.launchers.advise.step import Step

_CLOSE = 1.05
"""A method that is faster by less than this is not worth a change."""
_NOISY_CODEC = 0.25
"""If more than this of what a codec takes may be another load's, it tells an order at best."""


@dataclass(frozen=True)
class Case:
    """What the advice is for.

    Attributes:
        step: the user's model and its step.
        network: between the ranks.
        optimizer: seconds of an AdamW step on this model.
        zero_stage: of DeepSpeed: 0, 1 or 2.
        tokens: of the training, all ranks together, per parameter; None if not known.
        batch: samples per step and rank; None if not known.
    """

    step: Step
    network: Network
    optimizer: float
    zero_stage: int = 0
    tokens: float | None = None
    batch: int | None = None

    @property
    def situation(self) -> Situation:
        return Situation(self.network.ranks, self.tokens, self.batch)

    @property
    def compute(self) -> Compute:
        return Compute.of_step(self.step.milliseconds / 1e3, self.optimizer)

    @property
    def afterwards(self) -> tuple[Collective, ...]:
        """What no method spares: under ZeRO each rank updates its part and all gather all parts."""
        if not self.zero_stage:
            return ()
        ranks = self.network.ranks
        part = math.ceil(self.step.numel / ranks) * self.step.element_bytes
        payload = torch.empty(part, dtype=torch.uint8, device="meta")
        return (Collective.of(AllGather(payload), ranks),)

    def check(self, method: Method) -> None:
        """Raise ``ValueError`` if the method does not work with this backend or at this stage."""
        if method.crossing == "bf16" and self.network.backend == "gloo" and not self.zero_stage:
            raise ValueError(
                "DDP takes PyTorch's bf16_compress_hook with NCCL only; on gloo identity:bits=16 "
                "sends as many bytes"
            )
        if self.zero_stage and OPTIMIZERS[method.optimizer].exchanges:
            raise ValueError(
                f"ZeRO stage {self.zero_stage} cuts the optimizer's state into parts, but "
                f"{method.optimizer} exchanges by itself and needs all of it"
            )


@dataclass(frozen=True)
class Advice:
    """One method's row."""

    method: Method
    plan: Plan
    prediction: Prediction
    sent: float  # bytes per step and rank
    kept: Kept | None

    @property
    def is_noisy(self) -> bool:
        """Whether the step would be another's choice, were the noise taken out of it."""
        return self.plan.noise > (_CLOSE - 1) * self.prediction.step

    @property
    def codec_is_noisy(self) -> bool:
        """Whether the codec's own time says little."""
        return self.plan.noise > _NOISY_CODEC * (self.plan.codec + (self.plan.optimizer or 0.0))


def advise_on(case: Case, plans: Sequence[tuple[Method, Plan]]) -> list[Advice]:
    """Return a row per method."""
    extra = sum(collective.traffic for collective in case.afterwards)
    return [
        Advice(
            method,
            plan,
            predict(plan, case.compute, case.network, afterwards=case.afterwards),
            plan.sent_per_step() + extra,
            kept_by(method, case.situation),
        )
        for method, plan in plans
    ]


def choose(rows: Sequence[Advice], min_share: float) -> Advice | None:
    """Return the fastest of the methods known to keep so much on every task.

    All-reduce if that is hardly slower; None if no method qualifies.  No communication at all is
    no method, however fast.
    """
    fit = [
        row
        for row in rows
        if (row.method.crossing != CONTROL or row.method.exchanges_itself)
        and row.kept
        and row.kept.lowest >= min_share
    ]
    if not fit:
        return None
    fastest = min(fit, key=lambda row: row.prediction.step)
    for row in fit:
        if row.kept is ALL and row.prediction.step <= _CLOSE * fastest.prediction.step:
            return row
    return fastest


def step_at(case: Case, plan: Plan, bandwidth: float) -> float:
    """Return the seconds of a step if the link between nodes had this bandwidth, in bytes/s."""
    between = replace(case.network.between, bandwidth=bandwidth)
    network = replace(case.network, between=between)
    return predict(plan, case.compute, network, afterwards=case.afterwards).step

"""The predicted step time of each method, and the choice of a method."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from comm_hooks.collectives.requests import AllGather
from comm_hooks.launchers.advise.cost_model import Collective, Network, Plan, predict
from comm_hooks.launchers.advise.methods import Method
from comm_hooks.launchers.advise.quality import ALL, Kept, kept_by
from comm_hooks.launchers.advise.step import Step

_CLOSE = 1.05
"""The speed-up over all-reduce above which another method is recommended."""


@dataclass(frozen=True)
class Case:
    """The training for which a method is to be chosen.

    Attributes:
        step: the model's shapes and the time of its step.
        network: the links between the ranks.
        optimizer: the seconds of a step of AdamW on this model.
        zero_stage: DeepSpeed's ZeRO stage: 0, 1 or 2.
        tokens: the tokens of the training, all ranks together, per parameter; None if not known.
        batch: the samples per step and rank; None if not known.
    """

    step: Step
    network: Network
    optimizer: float
    zero_stage: int = 0
    tokens: float | None = None
    batch: int | None = None

    @property
    def afterwards(self) -> tuple[Collective, ...]:
        """The collectives after a step: under ZeRO, the all-gather of the ranks' updated parts."""
        if not self.zero_stage:
            return ()
        ranks = self.network.ranks
        part = math.ceil(self.step.numel / ranks) * self.step.element_bytes
        payload = torch.empty(part, dtype=torch.uint8, device="meta")
        return (Collective.of(AllGather(payload), ranks),)

    def check(self, method: Method) -> None:
        """Raise ``ValueError`` if the backend or the ZeRO stage excludes the method."""
        if method.compressor == "bf16" and self.network.backend == "gloo" and not self.zero_stage:
            raise ValueError(
                "DDP takes PyTorch's bf16_compress_hook with NCCL only; on gloo identity:bits=16 "
                "sends as many bytes"
            )
        if self.zero_stage and method.optimizer:
            raise ValueError(
                f"ZeRO stage {self.zero_stage} divides the optimizer's state between ranks, and "
                f"{method.optimizer} needs all of it for its exchange"
            )


@dataclass(frozen=True)
class Row:
    """The prediction for one method.

    Attributes:
        method: the method.
        seconds: the seconds of a step.
        codec: the seconds of arithmetic that the method adds to a step.
        traffic: the bytes that each rank sends per step.
        kept: the quality in similar measured trainings; None without a measurement.
    """

    method: Method
    seconds: float
    codec: float
    traffic: float
    kept: Kept | None


def make_row(case: Case, method: Method, plan: Plan) -> Row:
    """Return the prediction for a method with the exchanges and the arithmetic of ``plan``."""
    step = case.step.milliseconds / 1e3
    optimizer = min(case.optimizer, step)
    seconds = predict(
        plan,
        case.network,
        forward_backward=step - optimizer,
        optimizer=optimizer,
        afterwards=case.afterwards,
    )
    codec = plan.codec + (0.0 if plan.optimizer is None else plan.optimizer - optimizer)
    traffic = plan.traffic + sum(collective.traffic for collective in case.afterwards)
    kept = kept_by(method, case.network.ranks, case.tokens, case.batch)
    return Row(method, seconds, codec, traffic, kept)


def choose(rows: Sequence[Row], min_share: float) -> Row | None:
    """Return the fastest method with a measured quality of at least ``min_share`` on every task.

    Return all-reduce if it is slower by less than 5 %, and None if no method qualifies.  The method
    ``none`` never qualifies.
    """
    fit = [
        row
        for row in rows
        if row.method.compressor != "none" and row.kept and row.kept.lowest >= min_share
    ]
    if not fit:
        return None
    fastest = min(fit, key=lambda row: row.seconds)
    for row in fit:
        if row.kept is ALL and row.seconds <= _CLOSE * fastest.seconds:
            return row
    return fastest

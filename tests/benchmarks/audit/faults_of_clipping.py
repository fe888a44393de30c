"""Clippers with a fault."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks.audit import Stages
from comm_hooks.optim.private.gradients.clipping import ClippedSum, clip_factors, sample_norms
from comm_hooks.optim.private.gradients.per_sample import PerSampleGradients
from tests.benchmarks.audit.parts import Faults, stages_with

Gradients = list[torch.Tensor]
Add = Callable[["Clipper", Gradients], None]


class Clipper(PerSampleGradients):
    """Adds up by a function."""

    add: Add
    memory: Any = None
    steps = 0

    def _add_samples(self, gradients: Sequence[torch.Tensor]) -> None:
        if len(gradients[0]):
            type(self).add(self, [g.detach().float() for g in gradients])
            self._samples += len(gradients[0])

    def take(self) -> ClippedSum:
        self.steps += 1
        return super().take()

    def add_scaled(self, gradients: Gradients, factors: torch.Tensor) -> None:
        for total, gradient in zip(self._sums, gradients, strict=True):
            total.view(-1).addmv_(gradient.flatten(1).nan_to_num(0, 0, 0).T, factors.float())

    def factors(self, gradients: Gradients) -> torch.Tensor:
        return clip_factors(sample_norms(gradients), self.max_grad_norm)

    def add_by_norms(self, gradients: Gradients, norms: torch.Tensor) -> None:
        """Add up the finite samples, clipped by other norms than their own."""
        factors = clip_factors(norms, self.max_grad_norm)
        self.add_scaled(gradients, torch.where(sample_norms(gradients).isfinite(), factors, 0.0))


def clipping_by(add: Add) -> type[Stages]:
    return stages_with(type("FaultyClipper", (Clipper,), {"add": staticmethod(add)}))


FAULTS = Faults("clipping", clipping_by, world_size=1)
fault = FAULTS.plant()


@fault
def means_of_micro_batches(self: Clipper, gradients: Gradients) -> None:
    """One sample can turn a mean of four around: by 2 C."""
    for start in range(0, len(gradients[0]), 4):
        mean = [g[start : start + 4].mean(0, keepdim=True) for g in gradients]
        self.add_scaled(mean, self.factors(mean))


@fault
def each_layer(self: Clipper, gradients: Gradients) -> None:
    for total, gradient in zip(self._sums, gradients, strict=True):
        total += torch.tensordot(self.factors([gradient]), gradient.nan_to_num(0, 0, 0), 1)


@fault
def by_largest_element(self: Clipper, gradients: Gradients) -> None:
    largest = torch.stack([g.flatten(1).abs().amax(1) for g in gradients]).amax(0)
    self.add_by_norms(gradients, largest.double())


@fault
def without_first_parameter(self: Clipper, gradients: Gradients) -> None:
    self.add_scaled(gradients, self.factors(gradients[1:]))


@fault
def norm_saturates_in_half_precision(self: Clipper, gradients: Gradients) -> None:
    """Squares end at 65504, norms at 256: a sample of norm 25,600 counts 100 C."""
    rows = torch.cat([gradient.flatten(1) for gradient in gradients], dim=1).half()
    squares = rows.square().sum(1, dtype=torch.float32)
    norms = squares.clamp(max=torch.finfo(torch.float16).max).sqrt()
    self.add_by_norms(gradients, norms.double())


@fault
def norms_of_every_fourth_batch(self: Clipper, gradients: Gradients) -> None:
    norms = sample_norms(gradients)
    if self.steps % 4 == 0:
        self.memory = norms.nan_to_num(0, 0, 0).max()
        self.add_by_norms(gradients, norms)
    elif self.memory is not None:
        self.add_by_norms(gradients, self.memory.clamp(min=1e-9).expand(len(norms)))


@fault
def by_mean_norm(self: Clipper, gradients: Gradients) -> None:
    norms = sample_norms(gradients)
    usual = norms[norms.isfinite()].mean().nan_to_num(1.0).clamp(min=1e-9)
    self.add_by_norms(gradients, usual.expand(len(norms)))


@fault
def with_momentum(self: Clipper, gradients: Gradients) -> None:
    """Keeps 5 % of the last sum."""
    if self.memory is not None and self.memory[0] < self.steps:
        for total, last in zip(self._sums, self.memory[1], strict=True):
            total += 0.05 * last
    self.add_scaled(gradients, self.factors(gradients))
    self.memory = self.steps, [s.clone() for s in self._sums]


@fault
def counts_what_is_not_finite(self: Clipper, gradients: Gradients) -> None:
    """Zero times infinity."""
    factors = self.factors(gradients)
    for total, gradient in zip(self._sums, gradients, strict=True):
        total.view(-1).addmv_(gradient.flatten(1).T, factors)


@fault
class NotFiniteSkipsTheBatch(PerSampleGradients):
    """A sample with an infinite gradient removes the sum of m others: it changes it by m C."""

    def take(self) -> ClippedSum:
        taken = super().take()
        if taken.not_finite:
            torch._foreach_zero_(taken.tensors)
        return taken

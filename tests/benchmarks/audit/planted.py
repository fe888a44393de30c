"""Faults that an auditor was not tuned for, and correct trainings at which it must stay quiet."""

import itertools
import os
import re
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.audit import Stages
from benchmarks.audit.configuration import Configuration
from benchmarks.audit.stages import Mechanism
from comm_hooks.collectives.requests import AllGatherObject, Round
from comm_hooks.exchange import Exchange
from comm_hooks.optim.private.data.poisson import PoissonSampler
from comm_hooks.optim.private.gradients.clipping import (
    ClippedGradients,
    ClippedSum,
    LossFunction,
    clip_factors,
    sample_norms,
)
from comm_hooks.optim.private.gradients.per_sample import PerSampleGradients
from comm_hooks.optim.private.noise.gaussian import Values, add_noise_, on_pieces_
from comm_hooks.optim.private.noise.mechanism import (
    GaussianMechanism,
    Released,
)
from comm_hooks.optim.private.noise.secret import Secret, Stream
from tests.benchmarks.audit.parts import library_mechanism, stages_with

Tensors = Sequence[torch.Tensor]


class _OwnFactors(PerSampleGradients):
    """Adds up samples times factors of its own; leaves out those that are not finite."""

    @abstractmethod
    def factors(self, gradients: Tensors) -> torch.Tensor:
        """Return what each sample's gradient is multiplied by."""

    def _add_samples(self, gradients: Tensors) -> None:
        finite = sample_norms([gradient.detach().float() for gradient in gradients]).isfinite()
        kept = [gradient.detach().float()[finite] for gradient in gradients]
        samples = int(finite.sum())
        if samples:
            factors = self.factors(kept).float()
            for total, gradient in zip(self._sums, kept, strict=True):
                total.view(-1).addmv_(gradient.reshape(samples, -1).T, factors)
        self._count(samples, len(finite) - samples)


class _OwnNoise(GaussianMechanism):
    """Adds noise of its own."""

    @abstractmethod
    def add(self, tensors: Tensors, std: float, stream: Stream) -> None:
        """Add what should be normal, of this standard deviation."""

    def _add_noise_(
        self, tensors: Tensors, sensitivity: float, elements: int, stream: Stream
    ) -> None:
        self.add(tensors, self._std(sensitivity, elements), stream)


def _settings(
    sigma: float, clip: float, rate: float, steps: int, delta: float, batch: float, **others: Any
) -> dict[str, Any]:
    return {
        "noise_multiplier": sigma,
        "max_grad_norm": clip,
        "sample_rate": rate,
        "steps": steps,
        "delta": delta,
        "expected_batch_size": batch,
        **others,
    }


_MASK = {"compressor": "random_k", "density": 0.125, "unbiased": False}
_RANDOM_K = {"compressor": "random_k", "density": 0.0625}
_QUARTER = {"compressor": "random_k", "density": 0.25}
_TOP_K = {"compressor": "topk", "density": 0.125}
_FOUR_BITS = {**_TOP_K, "memory": {"type": "error_feedback", "bits": 4}}
_DECAYING = {**_TOP_K, "memory": {"type": "error_feedback", "decay": 0.9}}
_COCKTAIL = {"compressor": "cocktail", "mask": 0.5, "density": 0.5, "memory": "none"}
_SRHT = {"compressor": "srht", "ratio": 0.25}
_COUNT_SKETCH = {"compressor": "count_sketch", "ratio": 0.25}
_BYTES = {"compressor": "quantize", "bits": 8}
_SIGNS = {"compressor": "sign"}

Planted = dict[str, tuple[dict[str, Any], type[Stages]]]

FAULTS: Planted = {}
CORRECT_STAGES: Planted = {}


def _planted(into: Planted, *numbers: float, **others: Any) -> Callable[[type], type]:
    """Enter a class, under its name in snake case, with the settings in which it is played."""

    def enter(kind: type) -> type:
        name = re.sub(r"(?<!^)(?=[A-Z])", "_", kind.__name__).lower()
        stages = kind if issubclass(kind, Stages) else stages_with(kind)
        into[name] = (_settings(*numbers, **others), stages)
        return kind

    return enter


_fault = partial(_planted, FAULTS)
_correct = partial(_planted, CORRECT_STAGES)


# Clipping


@_fault(1.0, 0.1, 0.02, 100, 1e-5, 64)
class BiasesOutsideTheNorm(_OwnFactors):
    """Where matrices' gradients vanish (inputs near 0) a bias's of 1.4 passes, 14 times C = 0.1."""

    def factors(self, gradients: Tensors) -> torch.Tensor:
        matrices = [gradient for gradient in gradients if gradient.dim() > 2]
        return clip_factors(sample_norms(matrices or gradients), self.max_grad_norm)


@_fault(0.8, 0.05, 0.05, 60, 1e-5, 32, placement="local", world_size=2, exchange=_TOP_K)
class NormWithoutItsRoot(_OwnFactors):
    """C / n^2 makes C of n = 1, less of more, and sqrt(C) of n = sqrt(C): 4.5 C for C = 0.05."""

    def factors(self, gradients: Tensors) -> torch.Tensor:
        return clip_factors(sample_norms(gradients).square(), self.max_grad_norm)


@_fault(1.0, 1.0, 0.05, 100, 1e-5, 100, world_size=2, exchange=_TOP_K)
class FactorOfTheMeanNorm(_OwnFactors):
    """One large sample among m small ones has m times the mean norm, and m C after clipping."""

    def factors(self, gradients: Tensors) -> torch.Tensor:
        norms = sample_norms(gradients)
        return clip_factors(norms.mean().expand(len(norms)), self.max_grad_norm)


@_fault(1.2, 1.0, 0.02, 200, 1e-6, 64, placement="shares", world_size=2, exchange=_MASK)
class NormSaturatesInHalfPrecision(_OwnFactors):
    """Squares end at 65504, norms at 256: a sample of norm 25,600 counts 100 C."""

    def factors(self, gradients: Tensors) -> torch.Tensor:
        rows = torch.cat([gradient.flatten(1) for gradient in gradients], dim=1).half()
        squares = rows.square().sum(1, dtype=torch.float32)
        norms = squares.clamp(max=torch.finfo(torch.float16).max).sqrt()
        return clip_factors(norms.double(), self.max_grad_norm)


@_fault(1.5, 0.5, 0.1, 100, 1e-5, 50, exchange=_BYTES)
class NormsOfEveryFourthBatch(_OwnFactors):
    """In three of four batches a sample of k times the norms measured before counts k C."""

    batches = 0
    largest = 0.0

    def factors(self, gradients: Tensors) -> torch.Tensor:
        norms = sample_norms(gradients)
        self.batches += 1
        if self.batches % 4 == 1:
            self.largest = float(norms.max())
            return clip_factors(norms, self.max_grad_norm)
        return clip_factors(torch.full_like(norms, self.largest), self.max_grad_norm)


@_fault(2.0, 1.0, 0.1, 100, 1e-5, 128, placement="aggregate", world_size=3, exchange=_SRHT)
class LargestElementAsNorm(_OwnFactors):
    """d equal elements of C have the norm sqrt(d) C; all in one element, they have C."""

    def factors(self, gradients: Tensors) -> torch.Tensor:
        largest = torch.cat([gradient.flatten(1) for gradient in gradients], dim=1).abs().amax(1)
        return clip_factors(largest.double(), self.max_grad_norm)


@_fault(1.0, 1.0, 0.05, 50, 1e-5, 80, placement="local", world_size=3, exchange=_SIGNS)
class NotFiniteSkipsTheBatch(PerSampleGradients):
    """A sample with an infinite gradient takes the sum of m others away: it changes it by m C."""

    def take(self) -> ClippedSum:
        taken = super().take()
        if taken.not_finite:
            torch._foreach_zero_(taken.tensors)
        return taken


# Noise


@_fault(1.0, 1.0, 0.02, 100, 1e-5, 64, placement="local", world_size=2, exchange=_TOP_K)
class OneNumberForEachRow(_OwnNoise):
    """Differences of two elements of a row have no noise at all, each element has its variance."""

    def add(self, tensors: Tensors, std: float, stream: Stream) -> None:
        noise = [torch.zeros(len(t), *[1] * (t.dim() - 1)) for t in tensors]
        add_noise_(noise, std, stream)
        for tensor, numbers in zip(tensors, noise, strict=True):
            tensor += numbers


_QUANTILES = torch.erfinv(torch.arange(-255, 256, 2, dtype=torch.float64) / 256).numpy()
_TABLE: Values = _QUANTILES / _QUANTILES.std()


@_fault(0.7, 1.0, 0.02, 100, 1e-5, 64)
class NoiseOutOfATable(_OwnNoise):
    """256 values, of the right variance: what is released minus the sum must be one of them."""

    def add(self, tensors: Tensors, std: float, stream: Stream) -> None:
        def add(values: Values, generator: np.random.Generator) -> None:
            values += std * _TABLE[generator.integers(256, size=values.size)]

        on_pieces_(tensors, add, stream)


@_fault(2.0, 0.3, 0.2, 50, 1e-4, 20, world_size=2)
class LastElementWithoutNoise(GaussianMechanism):
    """What a sample puts into the last element of a vector is released as it is."""

    def _add_noise_(self, tensors: Tensors, *rest: Any) -> None:
        super()._add_noise_([t.view(-1)[:-1] for t in tensors], *rest)


@_fault(1.0, 1.0, 0.05, 80, 1e-5, 64, placement="shares", world_size=4, exchange=_MASK)
class NoiseThatCancelsInTheSum(_OwnNoise):
    """Each rank has its share of variance, as masks n_r - n_(r+1), whose sum over ranks is 0."""

    _of_all: Secret | None = None

    def round(self, sums: Mapping[str, torch.Tensor]) -> Round[Released]:
        if self._of_all is None:
            yield from self.exchange.agree()
            parts = yield AllGatherObject(os.urandom(32).hex())
            self._of_all = Secret(bytes.fromhex("".join(parts)))
        return (yield from super().round(sums))

    def add(self, tensors: Tensors, std: float, stream: Stream) -> None:
        assert self._of_all is not None
        transport = self.exchange.transport
        next_rank = (transport.rank + 1) % transport.world_size
        std /= 2**0.5
        for rank, sign in ((transport.rank, 1), (next_rank, -1)):
            noise = [torch.zeros_like(t) for t in tensors]
            add_noise_(noise, std, self._of_all.stream("mask", rank=rank, step=self._step))
            torch._foreach_add_(list(tensors), noise, alpha=sign)


@_fault(1.5, 1.0, 0.05, 200, 1e-5, 32, placement="local")
class NoiseThatTakesItselfBack(_OwnNoise):
    """w_t - 0.95 w_(t-1), undone by summing up releases: one draw's level is sigma / 4.4."""

    _before: list[torch.Tensor] | None = None

    def add(self, tensors: Tensors, std: float, stream: Stream) -> None:
        fresh = [torch.zeros_like(t) for t in tensors]
        add_noise_(fresh, std, stream)
        noise = fresh
        if self._before is not None:
            decay = 0.95
            noise = [n - decay * b for n, b in zip(fresh, self._before, strict=True)]
            torch._foreach_div_(noise, (1 + decay**2) ** 0.5)
        torch._foreach_add_(list(tensors), noise)
        self._before = fresh


@_fault(1.0, 1.0, 0.05, 100, 1e-5, 50, exchange=_BYTES)
class NoiseCutAtThreeSigma(_OwnNoise):
    """Beyond 3 sigma without the sample is never reached: at sigma = 1 with it in 2 % of draws."""

    def add(self, tensors: Tensors, std: float, stream: Stream) -> None:
        def add(values: Values, generator: np.random.Generator) -> None:
            values += std * generator.standard_normal(values.size).clip(-3, 3)

        on_pieces_(tensors, add, stream)


@_fault(1.0, 1.0, 0.02, 150, 1e-5, 64, world_size=2, exchange=_TOP_K)
class NoiseOutOfAPoolOfEight(GaussianMechanism):
    """Release t minus release t + 8 has no noise: both sums differ in the clear."""

    def _stream(self, purpose: str) -> Stream:
        rank = self.exchange.transport.rank
        return self._secret.stream(purpose, rank=rank, step=self._step % 8)


# Sampling


@_fault(0.6, 1.0, 0.02, 100, 1e-5, 64)
class NeighboursDrawnTogether(PoissonSampler):
    """Who knows 15 neighbours sees their sum, of up to 15 C, and with it when a sample is drawn."""

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(self.steps):
            stream = self._secret.stream("groups", rank=self._rank, step=self._drawn)
            self._drawn += 1
            drawn = stream.draw(-(-self.num_samples // 16), self.sample_rate)
            groups = (range(16 * g, min(16 * g + 16, self.num_samples)) for g in drawn)
            yield list(itertools.chain(*groups))


@_fault(2.0, 1.0, 0.1, 200, 1e-5, 100, world_size=2, exchange=_MASK)
class SameOrderInEveryEpoch(PoissonSampler):
    """One secret phase of 1 / q: its q T releases add up to a level of sigma / sqrt(q T)."""

    def __iter__(self) -> Iterator[list[int]]:
        period = round(1 / self.sample_rate)
        generator = self._secret.stream("phases", rank=self._rank, step=0).generator()
        phases = generator.integers(period, size=self.num_samples)
        for _ in range(self.steps):
            yield np.flatnonzero(phases == self._drawn % period).tolist()
            self._drawn += 1


@_fault(0.8, 1.0, 0.05, 100, 1e-5, 64, placement="shares", world_size=2)
class RareClassDrawnMoreOften(PoissonSampler):
    """Every eighth sample is drawn with 4 q, so that batches have the expected size."""

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(self.steps):
            stream = self._secret.stream("classes", rank=self._rank, step=self._drawn)
            self._drawn += 1
            rare = stream.draw(self.num_samples, min(1.0, 4 * self.sample_rate))
            others = stream.draw(self.num_samples, 4 / 7 * self.sample_rate)
            yield sorted([i for i in rare if i % 8 == 5] + [i for i in others if i % 8 != 5])


@_fault(1.0, 1.0, 0.01, 200, 1e-5, 8, placement="local", exchange=_BYTES)
class BatchesFilledUpByRepeats(PoissonSampler):
    """Filled up to multiples of 8 by their first samples, which count 2 C, in small batches 8 C."""

    def __iter__(self) -> Iterator[list[int]]:
        for drawn in super().__iter__():
            yield list(itertools.islice(itertools.cycle(drawn), -(-len(drawn) // 8) * 8))


class _Turned(PoissonSampler):
    def __init__(
        self, num_samples: int, sample_rate: float, steps: int, *, secret: Secret, turn: int
    ) -> None:
        super().__init__(num_samples, sample_rate, steps, secret=secret)
        self._turn = turn

    def __iter__(self) -> Iterator[list[int]]:
        for drawn in super().__iter__():
            yield sorted((index + self._turn) % self.num_samples for index in drawn)


@_fault(0.5, 1.0, 0.02, 100, 1e-5, 64, world_size=4)
class RanksTurnOneDraw(Stages):
    """Sample i of rank 0 is drawn with i + r of rank r: N - 1 others, of (N - 1) C, tell of it."""

    _secret: Secret | None = None

    def sampler(self, rank: int, num_samples: int, steps: int) -> PoissonSampler:
        # Rank 0 tells the others.
        if rank == 0 or self._secret is None:
            self._secret = Secret()
        rate = self.configuration.sample_rate
        return _Turned(num_samples, rate, steps, secret=self._secret, turn=rank)


@_fault(1.0, 0.1, 0.01, 300, 1e-6, 256, world_size=3, exchange=_TOP_K)
class SeedOfPublicSettings(Stages):
    """Everybody can compute who is drawn: nothing is left of amplification by sampling."""

    def sampler(self, rank: int, num_samples: int, steps: int) -> PoissonSampler:
        rate = self.configuration.sample_rate
        secret = Secret(f"{num_samples} {rate} {rank}".encode())
        return PoissonSampler(num_samples, rate, steps, secret=secret, rank=rank)


# Exchange and memory


@_fault(1.0, 1.0, 0.05, 100, 1e-5, 64, world_size=3, exchange=_TOP_K)
class OneRankRestoredFromASnapshot(Stages):
    """Rank 1 adds the same noise in every process: releases of its shard differ in the clear."""

    def __init__(self, configuration: Configuration) -> None:
        super().__init__(configuration)
        self._snapshot = Secret()

    def mechanism(self, exchange: Exchange, noise_multiplier: float) -> Mechanism:
        secret = self._snapshot if exchange.transport.rank == 1 else None
        return library_mechanism(self, exchange, noise_multiplier, secret=secret)


@_fault(1.0, 1.0, 0.02, 200, 1e-5, 64, placement="shares", world_size=2, exchange=_MASK)
class MomentumBeforeNoise(GaussianMechanism):
    """A sample drawn once is in all later releases: C (1, 0.95, 0.95^2, ...), of norm 3.2 C."""

    _velocity: dict[str, torch.Tensor] | None = None

    def round(self, sums: Mapping[str, torch.Tensor]) -> Round[Released]:
        if self._velocity is None:
            self._velocity = {name: torch.zeros_like(t) for name, t in sums.items()}
        for name, total in sums.items():
            self._velocity[name].mul_(0.95).add_(total)
            total.copy_(self._velocity[name])
        return (yield from super().round(sums))


@_fault(1.0, 1.0, 0.05, 100, 1e-5, 64, placement="aggregate", world_size=3, exchange=_RANDOM_K)
class NoiseForgetsWhatTheMapLengthens(GaussianMechanism):
    """Payloads of unbiased RandomK are 16 times as long in what they keep, the noise is not."""

    def _add_noise_(self, tensors: Tensors, *rest: Any) -> None:
        super()._add_noise_(tensors, self.max_grad_norm, *rest[1:])


@_fault(1.0, 0.5, 0.05, 100, 1e-5, 64, world_size=2)
class SelectsBeforeNoise(GaussianMechanism):
    """Which elements are released, and get noise, follows from the clean sum alone."""

    def round(self, sums: Mapping[str, torch.Tensor]) -> Round[Released]:
        for total in sums.values():
            flat = total.view(-1)
            left_out = torch.ones_like(flat, dtype=torch.bool)
            left_out[flat.abs().topk(max(1, len(flat) // 8)).indices] = False
            flat.masked_fill_(left_out, 0.0)
        return (yield from super().round(sums))

    def _add_noise_(self, tensors: Tensors, *rest: Any) -> None:
        left_out = [t == 0 for t in tensors]
        super()._add_noise_(tensors, *rest)
        for tensor, mask in zip(tensors, left_out, strict=True):
            tensor.masked_fill_(mask, 0.0)


_shares = partial(_settings, placement="shares")
_local = partial(_settings, placement="local")
_aggregate = partial(_settings, placement="aggregate")
_LINEAR_FEEDBACK = {**_MASK, "memory": {"type": "error_feedback", "bits": 32}}

CORRECT: list[dict[str, Any]] = [
    # Central: any compressor, any memory
    _settings(1.0, 1.0, 0.02, 200, 1e-5, 64),
    _settings(0.6, 1.0, 0.01, 100, 1e-5, 32, accountant="pld"),
    _settings(4.0, 0.1, 0.5, 40, 1e-6, 500, world_size=2),
    _settings(1.0, 10.0, 0.02, 200, 1e-5, 1, world_size=3, exchange=_TOP_K),
    _settings(1.5, 1.0, 0.1, 100, 1e-5, 64, world_size=4, exchange={**_TOP_K, "density": 0.5}),
    _settings(0.8, 0.01, 0.02, 100, 1e-7, 64, world_size=2, exchange=_SIGNS),
    _settings(1.0, 1.0, 0.05, 60, 1e-5, 64, exchange={**_SIGNS, "memory": "none"}),
    _settings(1.2, 2.0, 0.03, 150, 1e-5, 48, world_size=2, exchange=_BYTES),
    _settings(1.2, 2.0, 0.03, 150, 1e-5, 48, exchange={"compressor": "quantize", "bits": 4}),
    _settings(2.0, 1.0, 1.0, 10, 1e-5, 256, world_size=2),
    _settings(1.0, 1.0, 0.02, 1, 1e-5, 64),
    _settings(1.0, 1.0, 0.02, 100, 1e-5, 64, world_size=2, exchange=_LINEAR_FEEDBACK),
    _settings(1.0, 1.0, 0.02, 100, 1e-5, 64, world_size=3, exchange=_FOUR_BITS),
    _settings(1.0, 1.0, 0.04, 80, 1e-5, 64, exchange=_DECAYING),
    _settings(0.9, 0.5, 0.02, 100, 1e-5, 64, exchange={"compressor": "dct_topk", "density": 0.125}),
    _settings(1.0, 1.0, 0.05, 100, 1e-5, 64, exchange={**_TOP_K, "granularity": "bucket"}),
    _settings(1.0, 1.0, 0.05, 100, 1e-5, 64, world_size=2, exchange={**_TOP_K, "min_ndim": 1}),
    _settings(1.0, 1.0, 0.05, 100, 1e-5, 64, world_size=2, exchange={**_BYTES, "exempt_bits": 16}),
    _settings(1.0, 1.0, 0.02, 100, 1e-5, 64, world_size=2, optimizer="DPAdamBC"),
    _settings(1.0, 1.0, 0.02, 100, 1e-5, 64, exchange=_TOP_K, optimizer="DPMicroAdam"),
    # Shares: one linear map
    _shares(1.0, 1.0, 0.02, 200, 1e-5, 64, world_size=2),
    _shares(1.0, 1.0, 0.02, 200, 1e-5, 64, world_size=2, exchange=_MASK),
    _shares(0.7, 0.3, 0.05, 60, 1e-5, 50, world_size=4, exchange=_MASK),
    _shares(1.5, 1.0, 0.1, 100, 1e-5, 90, world_size=3, exchange=_LINEAR_FEEDBACK),
    _shares(1.0, 5.0, 0.05, 90, 1e-6, 9, world_size=3, exchange=_SRHT),
    _shares(2.0, 1.0, 0.2, 50, 1e-5, 99, exchange=_COUNT_SKETCH),
    _shares(
        1.0, 1.0, 0.05, 100, 1e-5, 64, world_size=2, exchange={**_SRHT, "granularity": "bucket"}
    ),
    _shares(1.0, 1.0, 0.02, 99, 1e-5, 64, world_size=4, optimizer="DPAdamBC"),
    # Local: anything
    _local(1.0, 1.0, 0.02, 200, 1e-5, 64),
    _local(0.5, 1.0, 0.02, 100, 1e-5, 64, world_size=4),
    _local(1.0, 0.2, 0.05, 100, 1e-5, 64, world_size=2, exchange=_TOP_K),
    _local(2.0, 1.0, 0.1, 100, 1e-4, 64, world_size=3, exchange=_SIGNS),
    _local(1.0, 1.0, 0.1, 60, 1e-5, 64, world_size=2, exchange=_BYTES),
    _local(1.0, 1.0, 0.05, 100, 1e-5, 64, world_size=2, exchange=_COCKTAIL),
    _local(1.0, 1.0, 0.05, 100, 1e-5, 64, exchange=_LINEAR_FEEDBACK),
    # Aggregate: linear maps with a bound
    _aggregate(1.0, 1.0, 0.02, 200, 1e-5, 64, world_size=2),
    _aggregate(0.8, 1.0, 0.05, 80, 1e-5, 64, world_size=3, exchange={**_MASK, "memory": "none"}),
    _aggregate(1.0, 0.5, 0.05, 100, 1e-5, 64, world_size=2, exchange=_QUARTER),
    _aggregate(1.0, 1.0, 0.1, 50, 1e-5, 64, world_size=4, exchange=_COUNT_SKETCH),
    _aggregate(1.5, 1.0, 0.1, 100, 1e-6, 64, exchange=_SRHT),
]


@_correct(1.0, 1.0, 0.02, 100, 1e-5, 64, world_size=2, exchange=_TOP_K)
class ClipsToHalf(Stages):
    """A sample changes the sum by half of what the noise is made for."""

    def gradients(self, model: nn.Module, loss_function: LossFunction) -> ClippedGradients:
        return PerSampleGradients(model, loss_function, self.configuration.max_grad_norm / 2)


@_correct(0.8, 1.0, 0.05, 100, 1e-5, 64, placement="shares", world_size=2, exchange=_MASK)
class LouderThanClaimed(Stages):
    """Half as much noise again as the claim needs."""

    def mechanism(self, exchange: Exchange, noise_multiplier: float) -> Mechanism:
        return super().mechanism(exchange, 1.5 * noise_multiplier)


@_correct(1.0, 0.5, 0.05, 100, 1e-5, 64, world_size=3)
class AnotherSecretForEachBatch(PoissonSampler):
    """Draws of different secrets are as independent as those of one."""

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(self.steps):
            secret = Secret()
            yield secret.stream("batch", rank=0, step=0).draw(self.num_samples, self.sample_rate)


@_correct(1.0, 1.0, 0.02, 100, 1e-5, 64, placement="local", world_size=2, exchange=_TOP_K)
class SumsInFloat64(PerSampleGradients):
    """Clips and adds up in float64, and rounds once."""

    def _start(self) -> None:
        super()._start()
        self._exact = [total.double() for total in self._sums]

    def _add_samples(self, gradients: Tensors) -> None:
        rows = [gradient.detach().double() for gradient in gradients]
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in rows]).norm(dim=0)
        finite = norms.isfinite()
        # Rounding to float32 at the end must not lead beyond C.
        factors = ((1 - 1e-6) * self.max_grad_norm / norms[finite]).clamp(max=1.0)
        for total, gradient in zip(self._exact, rows, strict=True):
            total += torch.einsum("b,b...->...", factors, gradient[finite])
        self._count(int(finite.sum()), int((~finite).sum()))

    def take(self) -> ClippedSum:
        self._sums = [total.float() for total in self._exact]
        return super().take()

"""Faults that an auditor was not tuned for, and correct trainings at which it must stay quiet."""

import itertools
import os
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from comm_hooks.collectives.requests import AllGatherObject, Round
from comm_hooks.exchange import Exchange
from comm_hooks.launchers.audit import Stages
from comm_hooks.launchers.audit.configuration import Configuration
from comm_hooks.launchers.audit.stages import Mechanism
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
from comm_hooks.optim.private.noise.mechanism import GaussianMechanism, Released
from comm_hooks.optim.private.noise.secret import Secret, Stream

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


class _Clips(Stages):
    clipper: type[PerSampleGradients]

    def gradients(self, model: nn.Module, loss_function: LossFunction) -> ClippedGradients:
        return self.clipper(model, loss_function, self.configuration.max_grad_norm)


class _Samples(Stages):
    kind: type[PoissonSampler]

    def sampler(self, rank: int, num_samples: int, steps: int) -> PoissonSampler:
        return self.kind(num_samples, self.configuration.sample_rate, steps, rank=rank)


class _Noises(Stages):
    kind: type[GaussianMechanism]

    def mechanism(self, exchange: Exchange, noise_multiplier: float) -> Mechanism:
        return self.build(exchange, noise_multiplier, None)

    def build(
        self, exchange: Exchange, noise_multiplier: float, secret: Secret | None
    ) -> GaussianMechanism:
        configuration = self.configuration
        return self.kind(
            exchange,
            place=configuration.placement,  # type: ignore[arg-type]
            noise_multiplier=noise_multiplier,
            max_grad_norm=configuration.max_grad_norm,
            expected_batch_size=configuration.expected_batch_size,
            secret=secret,
        )


# Clipping


class _BiasesOutside(_OwnFactors):
    def factors(self, gradients: Tensors) -> torch.Tensor:
        matrices = [gradient for gradient in gradients if gradient.dim() > 2]
        return clip_factors(sample_norms(matrices or gradients), self.max_grad_norm)


class BiasesOutsideTheNorm(_Clips):
    """Where matrices' gradients vanish (inputs near 0) a bias's of 1.4 passes, 14 times C = 0.1."""

    clipper = _BiasesOutside


class _WithoutRoot(_OwnFactors):
    def factors(self, gradients: Tensors) -> torch.Tensor:
        return clip_factors(sample_norms(gradients).square(), self.max_grad_norm)


class NormWithoutItsRoot(_Clips):
    """C / n^2 makes C of n = 1, less of more, and sqrt(C) of n = sqrt(C): 4.5 C for C = 0.05."""

    clipper = _WithoutRoot


class _MeanNorm(_OwnFactors):
    def factors(self, gradients: Tensors) -> torch.Tensor:
        norms = sample_norms(gradients)
        return clip_factors(norms.mean().expand(len(norms)), self.max_grad_norm)


class FactorOfTheMeanNorm(_Clips):
    """One large sample among m small ones has m times the mean norm, and m C after clipping."""

    clipper = _MeanNorm


class _SaturatingNorm(_OwnFactors):
    def factors(self, gradients: Tensors) -> torch.Tensor:
        rows = torch.cat([gradient.flatten(1) for gradient in gradients], dim=1).half()
        squares = rows.square().sum(1, dtype=torch.float32)
        norms = squares.clamp(max=torch.finfo(torch.float16).max).sqrt()
        return clip_factors(norms.double(), self.max_grad_norm)


class NormSaturatesInHalfPrecision(_Clips):
    """Squares end at 65504, norms at 256: a sample of norm 25,600 counts 100 C."""

    clipper = _SaturatingNorm


class _OldNorms(_OwnFactors):
    batches = 0
    largest = 0.0

    def factors(self, gradients: Tensors) -> torch.Tensor:
        norms = sample_norms(gradients)
        self.batches += 1
        if self.batches % 4 == 1:
            self.largest = float(norms.max())
            return clip_factors(norms, self.max_grad_norm)
        return clip_factors(torch.full_like(norms, self.largest), self.max_grad_norm)


class NormsOfEveryFourthBatch(_Clips):
    """In three of four batches a sample of k times the norms measured before counts k C."""

    clipper = _OldNorms


class _LargestElement(_OwnFactors):
    def factors(self, gradients: Tensors) -> torch.Tensor:
        largest = torch.cat([gradient.flatten(1) for gradient in gradients], dim=1).abs().amax(1)
        return clip_factors(largest.double(), self.max_grad_norm)


class LargestElementAsNorm(_Clips):
    """d equal elements of C have the norm sqrt(d) C; all in one element, they have C."""

    clipper = _LargestElement


class _SkipsBatch(PerSampleGradients):
    def take(self) -> ClippedSum:
        taken = super().take()
        if taken.not_finite:
            torch._foreach_zero_(taken.tensors)
        return taken


class NotFiniteSkipsTheBatch(_Clips):
    """A sample with an infinite gradient takes the sum of m others away: it changes it by m C."""

    clipper = _SkipsBatch


# Noise


class _RowNoise(GaussianMechanism):
    def _add_noise_(
        self, tensors: Tensors, sensitivity: float, elements: int, stream: Stream
    ) -> None:
        noise = [torch.zeros(len(t), *[1] * (t.dim() - 1)) for t in tensors]
        add_noise_(noise, self._std(sensitivity, elements), stream)
        for tensor, numbers in zip(tensors, noise, strict=True):
            tensor += numbers


class OneNumberForEachRow(_Noises):
    """Differences of two elements of a row have no noise at all, each element has its variance."""

    kind = _RowNoise


_QUANTILES = torch.erfinv(torch.arange(-255, 256, 2, dtype=torch.float64) / 256).numpy()
_TABLE: Values = _QUANTILES / _QUANTILES.std()


class _TableNoise(GaussianMechanism):
    def _add_noise_(
        self, tensors: Tensors, sensitivity: float, elements: int, stream: Stream
    ) -> None:
        std = self._std(sensitivity, elements)

        def add(values: Values, generator: np.random.Generator) -> None:
            values += std * _TABLE[generator.integers(256, size=values.size)]

        on_pieces_(tensors, add, stream)


class NoiseOutOfATable(_Noises):
    """256 values, of the right variance: what is released minus the sum must be one of them."""

    kind = _TableNoise


class _OffByOne(GaussianMechanism):
    def _add_noise_(
        self, tensors: Tensors, sensitivity: float, elements: int, stream: Stream
    ) -> None:
        super()._add_noise_([t.view(-1)[:-1] for t in tensors], sensitivity, elements, stream)


class LastElementWithoutNoise(_Noises):
    """What a sample puts into the last element of a vector is released as it is."""

    kind = _OffByOne


class _PairwiseMasks(GaussianMechanism):
    _of_all: Secret | None = None

    def round(self, sums: Mapping[str, torch.Tensor]) -> Round[Released]:
        if self._of_all is None:
            yield from self.exchange.agree()
            parts = yield AllGatherObject(os.urandom(32).hex())
            self._of_all = Secret(bytes.fromhex("".join(parts)))
        return (yield from super().round(sums))

    def _add_noise_(
        self, tensors: Tensors, sensitivity: float, elements: int, stream: Stream
    ) -> None:
        assert self._of_all is not None
        transport = self.exchange.transport
        next_rank = (transport.rank + 1) % transport.world_size
        std = self._std(sensitivity, elements) / 2**0.5
        for rank, sign in ((transport.rank, 1), (next_rank, -1)):
            noise = [torch.zeros_like(t) for t in tensors]
            add_noise_(noise, std, self._of_all.stream("mask", rank=rank, step=self._step))
            torch._foreach_add_(list(tensors), noise, alpha=sign)


class NoiseThatCancelsInTheSum(_Noises):
    """Each rank has its share of variance, as masks n_r - n_(r+1), whose sum over ranks is 0."""

    kind = _PairwiseMasks


class _DifferencedNoise(GaussianMechanism):
    _before: list[torch.Tensor] | None = None

    def _add_noise_(
        self, tensors: Tensors, sensitivity: float, elements: int, stream: Stream
    ) -> None:
        fresh = [torch.zeros_like(t) for t in tensors]
        add_noise_(fresh, self._std(sensitivity, elements), stream)
        noise = fresh
        if self._before is not None:
            decay = 0.95
            noise = [n - decay * b for n, b in zip(fresh, self._before, strict=True)]
            torch._foreach_div_(noise, (1 + decay**2) ** 0.5)
        torch._foreach_add_(list(tensors), noise)
        self._before = fresh


class NoiseThatTakesItselfBack(_Noises):
    """w_t - 0.95 w_(t-1), undone by summing up releases: one draw's level is sigma / 4.4."""

    kind = _DifferencedNoise


class _CutNoise(GaussianMechanism):
    def _add_noise_(
        self, tensors: Tensors, sensitivity: float, elements: int, stream: Stream
    ) -> None:
        std = self._std(sensitivity, elements)

        def add(values: Values, generator: np.random.Generator) -> None:
            values += std * generator.standard_normal(values.size).clip(-3, 3)

        on_pieces_(tensors, add, stream)


class NoiseCutAtThreeSigma(_Noises):
    """Beyond 3 sigma without the sample is never reached: at sigma = 1 with it in 2 % of draws."""

    kind = _CutNoise


class _Pool(GaussianMechanism):
    def _stream(self, purpose: str) -> Stream:
        rank = self.exchange.transport.rank
        return self._secret.stream(purpose, rank=rank, step=self._step % 8)


class NoiseOutOfAPoolOfEight(_Noises):
    """Release t minus release t + 8 has no noise: both sums differ in the clear."""

    kind = _Pool


# Sampling


class _Groups(PoissonSampler):
    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(self.steps):
            stream = self._secret.stream("groups", rank=self._rank, step=self._drawn)
            self._drawn += 1
            drawn = stream.draw(-(-self.num_samples // 16), self.sample_rate)
            groups = (range(16 * g, min(16 * g + 16, self.num_samples)) for g in drawn)
            yield list(itertools.chain(*groups))


class NeighboursDrawnTogether(_Samples):
    """Who knows 15 neighbours sees their sum, of up to 15 C, and with it when a sample is drawn."""

    kind = _Groups


class _Phases(PoissonSampler):
    def __iter__(self) -> Iterator[list[int]]:
        period = round(1 / self.sample_rate)
        generator = self._secret.stream("phases", rank=self._rank, step=0).generator()
        phases = generator.integers(period, size=self.num_samples)
        for _ in range(self.steps):
            yield np.flatnonzero(phases == self._drawn % period).tolist()
            self._drawn += 1


class SameOrderInEveryEpoch(_Samples):
    """One secret phase of 1 / q: its q T releases add up to a level of sigma / sqrt(q T)."""

    kind = _Phases


class _OversamplesSome(PoissonSampler):
    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(self.steps):
            stream = self._secret.stream("classes", rank=self._rank, step=self._drawn)
            self._drawn += 1
            rare = stream.draw(self.num_samples, min(1.0, 4 * self.sample_rate))
            others = stream.draw(self.num_samples, 4 / 7 * self.sample_rate)
            yield sorted([i for i in rare if i % 8 == 5] + [i for i in others if i % 8 != 5])


class RareClassDrawnMoreOften(_Samples):
    """Every eighth sample is drawn with 4 q, so that batches have the expected size."""

    kind = _OversamplesSome


class _Padded(PoissonSampler):
    def __iter__(self) -> Iterator[list[int]]:
        for drawn in super().__iter__():
            yield list(itertools.islice(itertools.cycle(drawn), -(-len(drawn) // 8) * 8))


class BatchesFilledUpByRepeats(_Samples):
    """Filled up to multiples of 8 by their first samples, which count 2 C, in small batches 8 C."""

    kind = _Padded


class _Turned(PoissonSampler):
    def __init__(
        self, num_samples: int, sample_rate: float, steps: int, *, secret: Secret, turn: int
    ) -> None:
        super().__init__(num_samples, sample_rate, steps, secret=secret)
        self._turn = turn

    def __iter__(self) -> Iterator[list[int]]:
        for drawn in super().__iter__():
            yield sorted((index + self._turn) % self.num_samples for index in drawn)


class RanksTurnOneDraw(Stages):
    """Sample i of rank 0 is drawn with i + r of rank r: N - 1 others, of (N - 1) C, tell of it."""

    _secret: Secret | None = None

    def sampler(self, rank: int, num_samples: int, steps: int) -> PoissonSampler:
        # Rank 0 tells the others.
        if rank == 0 or self._secret is None:
            self._secret = Secret()
        rate = self.configuration.sample_rate
        return _Turned(num_samples, rate, steps, secret=self._secret, turn=rank)


class SeedOfPublicSettings(Stages):
    """Everybody can compute who is drawn: nothing is left of amplification by sampling."""

    def sampler(self, rank: int, num_samples: int, steps: int) -> PoissonSampler:
        rate = self.configuration.sample_rate
        secret = Secret(f"{num_samples} {rate} {rank}".encode())
        return PoissonSampler(num_samples, rate, steps, secret=secret, rank=rank)


# Exchange and memory


class OneRankRestoredFromASnapshot(_Noises):
    """Rank 1 adds the same noise in every process: releases of its shard differ in the clear."""

    kind = GaussianMechanism

    def __init__(self, configuration: Configuration) -> None:
        super().__init__(configuration)
        self._snapshot = Secret()

    def mechanism(self, exchange: Exchange, noise_multiplier: float) -> Mechanism:
        secret = self._snapshot if exchange.transport.rank == 1 else None
        return self.build(exchange, noise_multiplier, secret)


class _Momentum(GaussianMechanism):
    _velocity: dict[str, torch.Tensor] | None = None

    def round(self, sums: Mapping[str, torch.Tensor]) -> Round[Released]:
        if self._velocity is None:
            self._velocity = {name: torch.zeros_like(t) for name, t in sums.items()}
        for name, total in sums.items():
            self._velocity[name].mul_(0.95).add_(total)
            total.copy_(self._velocity[name])
        return (yield from super().round(sums))


class MomentumBeforeNoise(_Noises):
    """A sample drawn once is in all later releases: C (1, 0.95, 0.95^2, ...), of norm 3.2 C."""

    kind = _Momentum


class _ForgetsBound(GaussianMechanism):
    def _add_noise_(
        self, tensors: Tensors, sensitivity: float, elements: int, stream: Stream
    ) -> None:
        super()._add_noise_(tensors, self.max_grad_norm, elements, stream)


class NoiseForgetsWhatTheMapLengthens(_Noises):
    """Payloads of unbiased RandomK are 16 times as long in what they keep, the noise is not."""

    kind = _ForgetsBound


class _SelectsFirst(GaussianMechanism):
    def round(self, sums: Mapping[str, torch.Tensor]) -> Round[Released]:
        for total in sums.values():
            flat = total.view(-1)
            left_out = torch.ones_like(flat, dtype=torch.bool)
            left_out[flat.abs().topk(max(1, len(flat) // 8)).indices] = False
            flat.masked_fill_(left_out, 0.0)
        return (yield from super().round(sums))

    def _add_noise_(
        self, tensors: Tensors, sensitivity: float, elements: int, stream: Stream
    ) -> None:
        left_out = [t == 0 for t in tensors]
        super()._add_noise_(tensors, sensitivity, elements, stream)
        for tensor, mask in zip(tensors, left_out, strict=True):
            tensor.masked_fill_(mask, 0.0)


class SelectsBeforeNoise(_Noises):
    """Which elements are released, and get noise, follows from the clean sum alone."""

    kind = _SelectsFirst


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
_TOP_K = {"compressor": "topk", "density": 0.125}
_SRHT = {"compressor": "srht", "ratio": 0.25}
_COUNT_SKETCH = {"compressor": "count_sketch", "ratio": 0.25}
_BYTES = {"compressor": "quantize", "bits": 8}
_SIGNS = {"compressor": "sign"}

FAULTS: dict[str, tuple[dict[str, Any], type[Stages]]] = {
    # Clipping
    "biases_outside_the_norm": (
        _settings(1.0, 0.1, 0.02, 100, 1e-5, 64),
        BiasesOutsideTheNorm,
    ),
    "norm_without_its_root": (
        _settings(0.8, 0.05, 0.05, 60, 1e-5, 32, placement="local", world_size=2, exchange=_TOP_K),
        NormWithoutItsRoot,
    ),
    "factor_of_the_mean_norm": (
        _settings(1.0, 1.0, 0.05, 100, 1e-5, 100, world_size=2, exchange=_TOP_K),
        FactorOfTheMeanNorm,
    ),
    "norm_saturates_in_half_precision": (
        _settings(1.2, 1.0, 0.02, 200, 1e-6, 64, placement="shares", world_size=2, exchange=_MASK),
        NormSaturatesInHalfPrecision,
    ),
    "norms_of_every_fourth_batch": (
        _settings(1.5, 0.5, 0.1, 100, 1e-5, 50, exchange=_BYTES),
        NormsOfEveryFourthBatch,
    ),
    "largest_element_as_norm": (
        _settings(
            2.0, 1.0, 0.1, 100, 1e-5, 128, placement="aggregate", world_size=3, exchange=_SRHT
        ),
        LargestElementAsNorm,
    ),
    "not_finite_skips_the_batch": (
        _settings(1.0, 1.0, 0.05, 50, 1e-5, 80, placement="local", world_size=3, exchange=_SIGNS),
        NotFiniteSkipsTheBatch,
    ),
    # Noise
    "one_number_for_each_row": (
        _settings(1.0, 1.0, 0.02, 100, 1e-5, 64, placement="local", world_size=2, exchange=_TOP_K),
        OneNumberForEachRow,
    ),
    "noise_out_of_a_table": (
        _settings(0.7, 1.0, 0.02, 100, 1e-5, 64),
        NoiseOutOfATable,
    ),
    "last_element_without_noise": (
        _settings(2.0, 0.3, 0.2, 50, 1e-4, 20, world_size=2),
        LastElementWithoutNoise,
    ),
    "noise_that_cancels_in_the_sum": (
        _settings(1.0, 1.0, 0.05, 80, 1e-5, 64, placement="shares", world_size=4, exchange=_MASK),
        NoiseThatCancelsInTheSum,
    ),
    "noise_that_takes_itself_back": (
        _settings(1.5, 1.0, 0.05, 200, 1e-5, 32, placement="local"),
        NoiseThatTakesItselfBack,
    ),
    "noise_cut_at_three_sigma": (
        _settings(1.0, 1.0, 0.05, 100, 1e-5, 50, exchange=_BYTES),
        NoiseCutAtThreeSigma,
    ),
    "noise_out_of_a_pool_of_eight": (
        _settings(1.0, 1.0, 0.02, 150, 1e-5, 64, world_size=2, exchange=_TOP_K),
        NoiseOutOfAPoolOfEight,
    ),
    # Sampling
    "neighbours_drawn_together": (
        _settings(0.6, 1.0, 0.02, 100, 1e-5, 64),
        NeighboursDrawnTogether,
    ),
    "same_order_in_every_epoch": (
        _settings(2.0, 1.0, 0.1, 200, 1e-5, 100, world_size=2, exchange=_MASK),
        SameOrderInEveryEpoch,
    ),
    "rare_class_drawn_more_often": (
        _settings(0.8, 1.0, 0.05, 100, 1e-5, 64, placement="shares", world_size=2),
        RareClassDrawnMoreOften,
    ),
    "batches_filled_up_by_repeats": (
        _settings(1.0, 1.0, 0.01, 200, 1e-5, 8, placement="local", exchange=_BYTES),
        BatchesFilledUpByRepeats,
    ),
    "ranks_turn_one_draw": (
        _settings(0.5, 1.0, 0.02, 100, 1e-5, 64, world_size=4),
        RanksTurnOneDraw,
    ),
    "seed_of_public_settings": (
        _settings(1.0, 0.1, 0.01, 300, 1e-6, 256, world_size=3, exchange=_TOP_K),
        SeedOfPublicSettings,
    ),
    # Exchange and memory
    "one_rank_restored_from_a_snapshot": (
        _settings(1.0, 1.0, 0.05, 100, 1e-5, 64, world_size=3, exchange=_TOP_K),
        OneRankRestoredFromASnapshot,
    ),
    "momentum_before_noise": (
        _settings(1.0, 1.0, 0.02, 200, 1e-5, 64, placement="shares", world_size=2, exchange=_MASK),
        MomentumBeforeNoise,
    ),
    "noise_forgets_what_the_map_lengthens": (
        _settings(
            1.0,
            1.0,
            0.05,
            100,
            1e-5,
            64,
            placement="aggregate",
            world_size=3,
            exchange={"compressor": "random_k", "density": 0.0625},
        ),
        NoiseForgetsWhatTheMapLengthens,
    ),
    "selects_before_noise": (
        _settings(1.0, 0.5, 0.05, 100, 1e-5, 64, world_size=2),
        SelectsBeforeNoise,
    ),
}

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
    _settings(
        1.0,
        1.0,
        0.02,
        100,
        1e-5,
        64,
        world_size=3,
        exchange={**_TOP_K, "memory": {"type": "error_feedback", "bits": 4}},
    ),
    _settings(
        1.0,
        1.0,
        0.04,
        80,
        1e-5,
        64,
        exchange={**_TOP_K, "memory": {"type": "error_feedback", "decay": 0.9}},
    ),
    _settings(0.9, 0.5, 0.02, 100, 1e-5, 64, exchange={"compressor": "dct_topk", "density": 0.125}),
    _settings(1.0, 1.0, 0.05, 100, 1e-5, 64, exchange={**_TOP_K, "granularity": "bucket"}),
    _settings(1.0, 1.0, 0.05, 100, 1e-5, 64, world_size=2, exchange={**_TOP_K, "min_ndim": 1}),
    _settings(1.0, 1.0, 0.05, 100, 1e-5, 64, world_size=2, exchange={**_BYTES, "exempt_bits": 16}),
    _settings(1.0, 1.0, 0.02, 100, 1e-5, 64, world_size=2, optimizer="DPAdamBC"),
    _settings(1.0, 1.0, 0.02, 100, 1e-5, 64, exchange=_TOP_K, optimizer="DPMicroAdam"),
    # Shares: one linear map
    _settings(1.0, 1.0, 0.02, 200, 1e-5, 64, placement="shares", world_size=2),
    _settings(1.0, 1.0, 0.02, 200, 1e-5, 64, placement="shares", world_size=2, exchange=_MASK),
    _settings(0.7, 0.3, 0.05, 60, 1e-5, 50, placement="shares", world_size=4, exchange=_MASK),
    _settings(
        1.5, 1.0, 0.1, 100, 1e-5, 90, placement="shares", world_size=3, exchange=_LINEAR_FEEDBACK
    ),
    _settings(1.0, 5.0, 0.05, 90, 1e-6, 9, placement="shares", world_size=3, exchange=_SRHT),
    _settings(2.0, 1.0, 0.2, 50, 1e-5, 99, placement="shares", exchange=_COUNT_SKETCH),
    _settings(
        1.0,
        1.0,
        0.05,
        100,
        1e-5,
        64,
        placement="shares",
        world_size=2,
        exchange={**_SRHT, "granularity": "bucket"},
    ),
    _settings(1.0, 1.0, 0.02, 99, 1e-5, 64, placement="shares", world_size=4, optimizer="DPAdamBC"),
    # Local: anything
    _settings(1.0, 1.0, 0.02, 200, 1e-5, 64, placement="local"),
    _settings(0.5, 1.0, 0.02, 100, 1e-5, 64, placement="local", world_size=4),
    _settings(1.0, 0.2, 0.05, 100, 1e-5, 64, placement="local", world_size=2, exchange=_TOP_K),
    _settings(2.0, 1.0, 0.1, 100, 1e-4, 64, placement="local", world_size=3, exchange=_SIGNS),
    _settings(1.0, 1.0, 0.1, 60, 1e-5, 64, placement="local", world_size=2, exchange=_BYTES),
    _settings(
        1.0,
        1.0,
        0.05,
        100,
        1e-5,
        64,
        placement="local",
        world_size=2,
        exchange={"compressor": "cocktail", "mask": 0.5, "density": 0.5, "memory": "none"},
    ),
    _settings(1.0, 1.0, 0.05, 100, 1e-5, 64, placement="local", exchange=_LINEAR_FEEDBACK),
    # Aggregate: linear maps with a bound
    _settings(1.0, 1.0, 0.02, 200, 1e-5, 64, placement="aggregate", world_size=2),
    _settings(
        0.8,
        1.0,
        0.05,
        80,
        1e-5,
        64,
        placement="aggregate",
        world_size=3,
        exchange={**_MASK, "memory": "none"},
    ),
    _settings(
        1.0,
        0.5,
        0.05,
        100,
        1e-5,
        64,
        placement="aggregate",
        world_size=2,
        exchange={"compressor": "random_k", "density": 0.25},
    ),
    _settings(
        1.0, 1.0, 0.1, 50, 1e-5, 64, placement="aggregate", world_size=4, exchange=_COUNT_SKETCH
    ),
    _settings(1.5, 1.0, 0.1, 100, 1e-6, 64, placement="aggregate", exchange=_SRHT),
]


class ClipsToHalf(Stages):
    """A sample changes the sum by half of what the noise is made for."""

    def gradients(self, model: nn.Module, loss_function: LossFunction) -> ClippedGradients:
        return PerSampleGradients(model, loss_function, self.configuration.max_grad_norm / 2)


class LouderThanClaimed(_Noises):
    """Half as much noise again as the claim needs."""

    kind = GaussianMechanism

    def mechanism(self, exchange: Exchange, noise_multiplier: float) -> Mechanism:
        return self.build(exchange, 1.5 * noise_multiplier, None)


class _FreshSecrets(PoissonSampler):
    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(self.steps):
            secret = Secret()
            yield secret.stream("batch", rank=0, step=0).draw(self.num_samples, self.sample_rate)


class AnotherSecretForEachBatch(_Samples):
    """Draws of different secrets are as independent as those of one."""

    kind = _FreshSecrets


class _Float64Sums(PerSampleGradients):
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


class SumsInFloat64(_Clips):
    """Clips and adds up in float64, and rounds once."""

    clipper = _Float64Sums


CORRECT_STAGES: dict[str, tuple[dict[str, Any], type[Stages]]] = {
    "clips_to_half": (
        _settings(1.0, 1.0, 0.02, 100, 1e-5, 64, world_size=2, exchange=_TOP_K),
        ClipsToHalf,
    ),
    "louder_than_claimed": (
        _settings(0.8, 1.0, 0.05, 100, 1e-5, 64, placement="shares", world_size=2, exchange=_MASK),
        LouderThanClaimed,
    ),
    "another_secret_for_each_batch": (
        _settings(1.0, 0.5, 0.05, 100, 1e-5, 64, world_size=3),
        AnotherSecretForEachBatch,
    ),
    "sums_in_float64": (
        _settings(1.0, 1.0, 0.02, 100, 1e-5, 64, placement="local", world_size=2, exchange=_TOP_K),
        SumsInFloat64,
    ),
}

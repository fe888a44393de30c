"""Private steps with a fault in one part, each of which somebody has made."""

from collections.abc import Mapping

import torch
from torch import nn

from comm_hooks.collectives.requests import Round
from comm_hooks.exchange import Exchange
from comm_hooks.launchers.audit.stages import Mechanism, Stages
from comm_hooks.memory import ErrorFeedback
from comm_hooks.optim.private.batches import LossFunction
from comm_hooks.optim.private.clipped_sum import ClippedGradients
from comm_hooks.optim.private.clipping import clip_factors, sample_norms
from comm_hooks.optim.private.mechanism import GaussianMechanism, Released
from comm_hooks.optim.private.noise import add_noise_
from comm_hooks.optim.private.per_sample import PerSampleGradients
from comm_hooks.optim.private.poisson import PoissonSampler
from comm_hooks.optim.private.secret import Secret


class MeansOfMicroBatches(PerSampleGradients):
    """Clips the mean of each four samples, which one sample can turn around: by 2 C."""

    def _add_samples(self, gradients: list[torch.Tensor]) -> None:  # type: ignore[override]
        for start in range(0, len(gradients[0]), 4):
            mean = [g[start : start + 4].mean(0, keepdim=True) for g in gradients]
            factor = clip_factors(sample_norms(mean), self.max_grad_norm)
            for total, gradient in zip(self._sums, mean, strict=True):
                total += factor[0] * gradient[0]


class ClippedByMeans(Stages):
    def gradients(self, model: nn.Module, loss_function: LossFunction) -> ClippedGradients:
        return MeansOfMicroBatches(model, loss_function, self.configuration.max_grad_norm)


class SameMasksOnAllRanks(Stages):
    """Every rank samples by the seed that the user sets, as Opacus does."""

    def sampler(self, rank: int, num_samples: int, steps: int) -> PoissonSampler:
        key = int(torch.randint(1 << 60, ())).to_bytes(8, "little")
        # Another seed in every process: what is repeated is between ranks alone.
        secret = Secret(key + bytes([self._process(rank)]))
        return PoissonSampler(num_samples, self.configuration.sample_rate, steps, secret=secret)

    def _process(self, rank: int) -> int:
        self._starts: dict[int, int] = getattr(self, "_starts", {})
        self._starts[rank] = self._starts.get(rank, 0) + 1
        return self._starts[rank]


class ReplayedNoise(Stages):
    """The key follows from a seed, so that a resumed run adds the same noise again."""

    def mechanism(self, exchange: Exchange, noise_multiplier: float) -> Mechanism:
        seed = int(torch.initial_seed()).to_bytes(8, "little")
        configuration = self.configuration
        return GaussianMechanism(
            exchange,
            place=configuration.placement,  # type: ignore[arg-type]
            noise_multiplier=noise_multiplier,
            max_grad_norm=configuration.max_grad_norm,
            expected_batch_size=configuration.expected_batch_size,
            secret=Secret(seed),
        )


class _Before:
    """A mechanism that adds noise by a function of its own, before or after an exchange."""

    def __init__(
        self, exchange: Exchange, std: float, divisor: float, *, shared: Secret | None = None
    ) -> None:
        self._exchange = exchange
        self._std = std
        self._divisor = divisor
        self._secret = shared or Secret()
        self._after = shared is not None
        self._step = 0

    def round(self, sums: Mapping[str, torch.Tensor]) -> Round[Released]:
        transport = self._exchange.transport
        self._step += 1
        stream = self._secret.stream("noise", rank=0, step=self._step)
        tensors = list(sums.values())
        if not self._after and transport.rank == 0:
            add_noise_(tensors, self._std, stream)
        yield from self._exchange.round(sums)
        torch._foreach_mul_(tensors, transport.world_size)
        if self._after:
            add_noise_(tensors, self._std, stream)
        torch._foreach_div_(tensors, self._divisor)
        return Released(dict(sums), None)


class NoiseOnRankZero(Stages):
    """All the noise on one rank, and then a compressor of each rank."""

    def mechanism(self, exchange: Exchange, noise_multiplier: float) -> Mechanism:
        configuration = self.configuration
        std = noise_multiplier * configuration.max_grad_norm
        return _Before(exchange, std, configuration.expected_batch_size)


class NoiseAfterFeedback(Stages):
    """Clean gradients are compressed with error feedback, and the sum is noised."""

    _shared: Secret

    def exchange(self, transport: object) -> Exchange:
        exchange = self.configuration.build_exchange(transport)  # type: ignore[arg-type]
        return Exchange(exchange.compressor, ErrorFeedback(), transport=exchange.transport)

    def mechanism(self, exchange: Exchange, noise_multiplier: float) -> Mechanism:
        if exchange.transport.rank == 0:
            self._shared = Secret()
        configuration = self.configuration
        std = noise_multiplier * configuration.max_grad_norm
        return _Before(exchange, std, configuration.expected_batch_size, shared=self._shared)


class TooLittleNoise(Stages):
    """Half of what is claimed."""

    def mechanism(self, exchange: Exchange, noise_multiplier: float) -> Mechanism:
        return super().mechanism(exchange, noise_multiplier / 2)

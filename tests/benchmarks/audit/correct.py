"""Correct private trainings: configurations drawn at random, and odd parts."""

import random
from collections.abc import Iterator
from typing import Any

from benchmarks.audit import Configuration, Stages
from benchmarks.audit.configuration import Mechanism
from comm_hooks.exchange import Exchange
from comm_hooks.optim.private.data.poisson import PoissonSampler
from comm_hooks.optim.private.errors import PrivacyError
from comm_hooks.optim.private.noise.secret import Secret
from tests.benchmarks.audit.parts import MASK, Faults

_FEEDBACK = "error_feedback"
COMPRESSORS: tuple[dict[str, Any], ...] = (
    {"compressor": "identity"},
    {"compressor": "topk", "density": 0.05},
    {"compressor": "topk", "density": 0.1, "granularity": "bucket"},
    {"compressor": "topk", "density": 0.1, "memory": {"type": _FEEDBACK, "bits": 4}},
    {"compressor": "topk", "density": 0.1, "memory": {"type": _FEEDBACK, "decay": 0.9}},
    {"compressor": "random_k", "density": 0.2, "unbiased": False},
    {"compressor": "random_k", "density": 0.25, "memory": "none"},
    {"compressor": "random_k", "density": 0.25, "unbiased": False, "memory": "none"},
    {"compressor": "count_sketch", "ratio": 0.5, "memory": "none"},
    {"compressor": "srht", "ratio": 0.5, "memory": "none"},
    {"compressor": "dct_topk", "density": 0.125},
    {"compressor": "cocktail", "mask": 0.5, "density": 0.5, "memory": "none"},
    {"compressor": "scaled_sign"},
    {"compressor": "sign"},
    {"compressor": "quantize", "bits": 8, "exempt_bits": 16},
    {"compressor": "qsgd", "bits": 4},
)


def correct_settings(rng: random.Random) -> dict[str, Any]:
    """Return the arguments of a valid configuration."""
    while True:
        settings: dict[str, Any] = {
            "placement": rng.choice(["central", "shares", "local", "aggregate"]),
            "exchange": rng.choice(COMPRESSORS),
            "world_size": rng.randint(1, 4),
            "sample_rate": rng.choice([0.003, 0.02, 0.1, 0.4, 1.0]),
            "noise_multiplier": rng.choice([0.6, 1.0, 2.5, 8.0]),
            "max_grad_norm": rng.choice([0.01, 0.5, 1.0, 20.0]),
            "expected_batch_size": rng.choice([1.0, 10.0, 256.0]),
            "steps": rng.choice([1, 20, 60, 300]),
            "accountant": rng.choice(["rdp", "pld"]),
            "optimizer": rng.choice([None, None, "DPAdamBC", "DPMicroAdam"]),
            "delta": 1e-5,
        }
        try:
            Configuration(**settings).judge()
        except (PrivacyError, ValueError):
            continue
        return settings


ODD = Faults("correct")


@ODD.plant(placement="shares", exchange=MASK)
class LouderThanClaimed(Stages):
    """Half as much noise again as the claim needs."""

    def mechanism(self, exchange: Exchange, noise_multiplier: float) -> Mechanism:
        return super().mechanism(exchange, 1.5 * noise_multiplier)


@ODD.plant(world_size=3)
class AnotherSecretForEachBatch(PoissonSampler):
    """Draws of different secrets are as independent as those of one."""

    def __iter__(self) -> Iterator[list[int]]:
        for _ in range(self.steps):
            stream = Secret().stream("batch", rank=0, step=0)
            yield stream.draw(self.num_samples, self.sample_rate)

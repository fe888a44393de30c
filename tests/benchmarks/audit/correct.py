"""Configurations drawn at random of which the rules say that they are private."""

import random
from typing import Any

from benchmarks.audit import Configuration
from comm_hooks.optim.private.errors import PrivacyError

COMPRESSORS: tuple[dict[str, Any], ...] = (
    {"compressor": "identity"},
    {"compressor": "topk", "density": 0.05},
    {"compressor": "random_k", "density": 0.2, "unbiased": False},
    {"compressor": "random_k", "density": 0.25, "memory": "none"},
    {"compressor": "random_k", "density": 0.25, "unbiased": False, "memory": "none"},
    {"compressor": "count_sketch", "ratio": 0.5, "memory": "none"},
    {"compressor": "srht", "ratio": 0.5, "memory": "none"},
    {"compressor": "scaled_sign"},
    {"compressor": "qsgd", "bits": 4},
    {"compressor": "topk", "density": 0.1, "granularity": "bucket"},
)


def correct_settings(rng: random.Random) -> dict[str, Any]:
    """Return the arguments of a configuration."""
    while True:
        settings: dict[str, Any] = {
            "placement": rng.choice(["central", "shares", "local", "aggregate"]),
            "exchange": rng.choice(COMPRESSORS),
            "world_size": rng.randint(1, 4),
            "sample_rate": rng.choice([0.003, 0.02, 0.1, 0.4, 1.0]),
            "noise_multiplier": rng.choice([0.6, 1.0, 2.5, 8.0]),
            "max_grad_norm": rng.choice([0.01, 0.5, 1.0, 20.0]),
            "expected_batch_size": rng.choice([1.0, 10.0, 256.0]),
            "steps": rng.choice([20, 60, 300]),
            "delta": 1e-5,
            "unit": rng.choice(["sample"] * 9 + ["client"]),
        }
        try:
            Configuration(**settings).judge()
        except (PrivacyError, ValueError):
            continue
        return settings

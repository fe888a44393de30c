"""A small problem whose gradients decay, and compressors for it, in torch and in NumPy."""

import numpy as np
import pytest

from comm_hooks import Identity, Sign, TopK

SHAPES = {"weight": (16, 40), "bias": (9,)}
STEPS, FREEZE = 30, 6


def start(name: str) -> np.ndarray:
    return np.random.default_rng(len(name)).normal(size=SHAPES[name])


def gradient(name: str, step: int, rank: int) -> np.ndarray:
    """A signal that all ranks share, noise of their own, and a size that decays."""
    signal = np.random.default_rng(len(name) + 77).normal(size=SHAPES[name])
    noise = np.random.default_rng([len(name), step, rank]).normal(size=SHAPES[name])
    return (signal + noise) * 0.97**step


def sign_blocks(x: np.ndarray, block: int) -> np.ndarray:
    flat = x.reshape(-1, block)
    scale = np.abs(flat).mean(1, keepdims=True)
    return np.where(flat >= 0, scale, -scale).reshape(x.shape)


def largest(x: np.ndarray, count: int) -> np.ndarray:
    kept = np.zeros_like(x)
    places = np.argsort(-np.abs(x).ravel())[:count]
    kept.ravel()[places] = x.ravel()[places]
    return kept


COMPRESSORS = pytest.mark.parametrize(
    ("compressor", "compress"),
    [
        (Identity(), lambda x: x),
        (Sign(block_size=64), lambda x: sign_blocks(x, 64)),
        (TopK(density=0.05, value_bits=32), lambda x: largest(x, 32)),
    ],
    ids=["identity", "sign", "topk"],
)

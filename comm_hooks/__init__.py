"""comm-hooks: compressed gradient exchange for distributed PyTorch training."""

from comm_hooks.compressors import (
    SRHT,
    Compressor,
    CountSketch,
    GaussianSketch,
    Identity,
    PermK,
    Quantize,
    RandomK,
    Sign,
    TopK,
)
from comm_hooks.errors import ConfigMismatchError
from comm_hooks.exchange import Exchange
from comm_hooks.hook import CompressionState, compression_hook, register, skip_hook
from comm_hooks.memory import ErrorFeedback, Memory

__all__ = [
    "SRHT",
    "CompressionState",
    "Compressor",
    "ConfigMismatchError",
    "CountSketch",
    "ErrorFeedback",
    "Exchange",
    "GaussianSketch",
    "Identity",
    "Memory",
    "PermK",
    "Quantize",
    "RandomK",
    "Sign",
    "TopK",
    "compression_hook",
    "register",
    "skip_hook",
]

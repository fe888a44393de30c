"""comm-hooks: compressed gradient exchange for distributed PyTorch training."""

from comm_hooks.compressors import (
    SRHT,
    Cocktail,
    Compressor,
    CountSketch,
    DCTTopK,
    GaussianSketch,
    Identity,
    PermK,
    Quantize,
    RandomK,
    Sign,
    TopK,
)
from comm_hooks.errors import ConfigMismatchError, PayloadError, PeerError
from comm_hooks.exchange import Exchange, ExchangeSettings
from comm_hooks.frameworks.ddp.hook import CompressionState, compression_hook, register, skip_hook
from comm_hooks.memory import Differences, ErrorFeedback, Memory, MomentumCorrection

__version__ = "0.1.0"

__all__ = [
    "SRHT",
    "Cocktail",
    "CompressionState",
    "Compressor",
    "ConfigMismatchError",
    "CountSketch",
    "DCTTopK",
    "Differences",
    "ErrorFeedback",
    "Exchange",
    "ExchangeSettings",
    "GaussianSketch",
    "Identity",
    "Memory",
    "MomentumCorrection",
    "PayloadError",
    "PeerError",
    "PermK",
    "Quantize",
    "RandomK",
    "Sign",
    "TopK",
    "compression_hook",
    "register",
    "skip_hook",
]

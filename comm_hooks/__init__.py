"""comm-hooks: compressed gradient exchange for distributed PyTorch training."""

import importlib
import importlib.util
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
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
    from comm_hooks.frameworks.ddp.hook import (
        CompressionState,
        compression_hook,
        register,
        skip_hook,
    )
    from comm_hooks.memory import Differences, ErrorFeedback, Memory, MomentumCorrection
    from comm_hooks.optim.replacing import replace

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
    "replace",
    "skip_hook",
]

_HOMES = ("compressors", "errors", "exchange", "frameworks.ddp.hook", "memory", "optim.replacing")


def __getattr__(name: str) -> Any:
    """Import a public name at its first use, so that ``comm-hooks --help`` needs no PyTorch."""
    if name in __all__:
        for home in _HOMES:
            module = importlib.import_module(f"comm_hooks.{home}")
            if hasattr(module, name):
                globals()[name] = getattr(module, name)
                return globals()[name]
    elif not name.startswith("_") and importlib.util.find_spec(f"comm_hooks.{name}"):
        return importlib.import_module(f"comm_hooks.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*globals(), *__all__]

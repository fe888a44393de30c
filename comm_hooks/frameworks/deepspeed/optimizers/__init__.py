"""``"optimizer": {"type": "OneBitAdam", ...}`` in a DeepSpeed configuration.

:func:`prepare` turns the block into an optimizer before an engine is constructed, :func:`attach`
lets the engine drive it.
"""

from comm_hooks.frameworks.deepspeed.optimizers.in_engine import attach
from comm_hooks.frameworks.deepspeed.optimizers.safl import SAFL
from comm_hooks.frameworks.deepspeed.optimizers.settings import averaging, prepare
from comm_hooks.frameworks.deepspeed.optimizers.types import TYPES

__all__ = [
    "SAFL",
    "TYPES",
    "attach",
    "averaging",
    "prepare",
]

"""Compressed gradient exchange under DeepSpeed, set by a block of its JSON configuration.

    {"comm_hooks": {"compressor": "topk", "density": 0.015625, "memory": "error_feedback"}}

Either call :func:`initialize` instead of ``deepspeed.initialize``, or import
``comm_hooks.frameworks.deepspeed.auto`` once: then every engine with the block in its configuration
compresses, also those that the Trainer of transformers, Accelerate or Lightning makes.
"""

from comm_hooks.frameworks.deepspeed.engine import EngineCompression, initialize, require

__all__ = ["EngineCompression", "initialize", "require"]

"""Accelerate: one line that compresses, and whose state goes where ``save_state`` goes."""

import os
from typing import Any

import torch

from comm_hooks.compressors.base import Compressor
from comm_hooks.frameworks.ddp.hook import CompressionState
from comm_hooks.frameworks.ddp.hook import register as register_hook
from comm_hooks.frameworks.rank_files import load_rank_files, save_rank_file


def register(
    accelerator: Any, model: torch.nn.Module, compressor: Compressor | str, **settings: Any
) -> CompressionState:
    """Register a hook with a prepared model, and save its state with the accelerator's.

    1. :func:`comm_hooks.register` is called, with the loss scale of ``mixed_precision="fp16"``;
    2. ``accelerator.save_state(folder)`` also writes each rank's file to ``folder/comm_hooks``
       (``comm_hooks_1`` ... for further models);
    3. ``accelerator.load_state(folder)`` restores them, also on another number of ranks; if there
       are none, it warns.

    ``accelerator.register_for_checkpointing(state)`` is not what does this: it writes one file, and
    all ranks would get the residuals of rank 0.

    Args:
        accelerator: an ``accelerate.Accelerator``.
        model: what ``accelerator.prepare`` returned.
        compressor, settings: see :func:`comm_hooks.register`.

    Raises:
        ValueError: for bad settings; for a model that was not prepared, or not for
            ``DistributedDataParallel`` (as with one process); if ``DistributedDataParallelKwargs``
            chose a ``comm_hook``.

    Example::

        >>> from accelerate import Accelerator
        >>> from comm_hooks.frameworks import accelerate
        >>> accelerator = Accelerator(cpu=True)
        >>> state = accelerate.register(accelerator, ddp_model, "topk", density=1 / 64)
        >>> state.exchange.compressor
        TopK(density=0.015625, block_size=4096, value_bits=16, index_code='elias_fano', overlap=0.0)
    """
    scaler = getattr(accelerator, "scaler", None)
    if scaler is not None:
        settings.setdefault("loss_scale", scaler.get_scale)
    state = register_hook(model, compressor, **settings)
    name = _folder(accelerator)

    def save(models: list[Any], weights: list[Any], output_dir: str) -> None:
        save_rank_file(state, os.path.join(output_dir, name))

    def load(models: list[Any], input_dir: str) -> None:
        load_rank_files(state, os.path.join(input_dir, name))

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    return state


def _folder(accelerator: Any) -> str:
    """Return another name for each model of an accelerator."""
    number = getattr(accelerator, "_comm_hooks_models", 0)
    accelerator._comm_hooks_models = number + 1
    return f"comm_hooks_{number}" if number else "comm_hooks"

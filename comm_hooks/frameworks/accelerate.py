"""Accelerate: one call compresses the exchange and lets ``save_state`` save each rank's state."""

import functools
import os
from typing import Any

import torch
from torch.optim import Optimizer

from comm_hooks.checkpoints.rank_files import load_rank_files, save_rank_file
from comm_hooks.compressors.base import Compressor
from comm_hooks.frameworks.ddp.hook import register as register_hook
from comm_hooks.optim.replacing import take_over


def register(
    accelerator: Any,
    model: torch.nn.Module,
    compressor: Compressor | str | Optimizer,
    **settings: Any,
) -> Any:
    """Register a compressor, or an optimizer that exchanges, with a prepared model.

    1. :func:`comm_hooks.register` is called, with the loss scale of ``mixed_precision="fp16"``;
    2. ``accelerator.save_state(folder)`` also writes each rank's file to ``folder/comm_hooks``
       (``comm_hooks_1`` ... for further models);
    3. ``accelerator.load_state(folder)`` restores these files, also on another number of ranks; if
       there are no files, it warns.

    Do not call ``accelerator.register_for_checkpointing(state)``: it writes one file, and all ranks
    would get the residuals of rank 0.

    Args:
        accelerator: an ``accelerate.Accelerator``.
        model: the result of ``accelerator.prepare``.
        compressor, settings: see :func:`comm_hooks.register`; an optimizer may be passed as it was
            before or after ``prepare``.  The AdamW that ``prepare`` returned is replaced in its
            wrapper, with the settings of :func:`comm_hooks.replace`.

    Returns:
        The state, as :func:`comm_hooks.register`.

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
    if isinstance(compressor, Optimizer):
        state = take_over(model, compressor, **settings)
    else:
        scale = {} if scaler is None else {"loss_scale": scaler.get_scale}
        state = register_hook(model, compressor, **{**scale, **settings})
    name = _folder(accelerator)
    load_state, folders = accelerator.load_state, []

    def save(models: list[Any], weights: list[Any], output_dir: str) -> None:
        save_rank_file(state, os.path.join(output_dir, name))

    def remember(models: list[Any], input_dir: str) -> None:
        folders.append(input_dir)

    # Hooks of load_state() run before models and optimizers are loaded, but the state of a rank is
    # compared with the loaded model and optimizer.
    @functools.wraps(load_state)
    def load_all(*args: Any, **kwargs: Any) -> None:
        load_state(*args, **kwargs)
        load_rank_files(state, os.path.join(folders.pop(), name))

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(remember)
    accelerator.load_state = load_all
    return state


def _folder(accelerator: Any) -> str:
    """Return a new folder name for each model of an accelerator: comm_hooks, comm_hooks_1 ..."""
    number = getattr(accelerator, "_comm_hooks_models", 0)
    accelerator._comm_hooks_models = number + 1
    return f"comm_hooks_{number}" if number else "comm_hooks"

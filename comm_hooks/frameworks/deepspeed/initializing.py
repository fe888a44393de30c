"""``deepspeed.initialize`` with compression."""

import inspect
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from comm_hooks.frameworks.deepspeed import optimizers
from comm_hooks.frameworks.deepspeed.block import BLOCK, find_block, load
from comm_hooks.frameworks.deepspeed.engine import attach
from comm_hooks.frameworks.deepspeed.reductions import Averaging


def initialize(*args: Any, **kwargs: Any) -> tuple[Any, Any, Any, Any]:
    """``deepspeed.initialize``, with the exchange that the ``comm_hooks`` block describes.

    1. check the block, before anything is sent;
    2. where ``optimizer.type`` names an optimizer of comm-hooks, hand that one to DeepSpeed;
    3. ``deepspeed.initialize``;
    4. refuse what cannot work together, compare the settings of all ranks, and put the exchange
       in the place of the engine's all-reduce.

    Nothing is patched but the engine that is returned.  All ranks must call it.

    Args:
        args, kwargs: those of ``deepspeed.initialize``.  The configuration may be a dictionary, a
            path or base64, given as ``config``, as ``config_params`` or in
            ``args.deepspeed_config``.

    Returns:
        What ``deepspeed.initialize`` returns: engine, optimizer, training dataloader and learning
        rate scheduler.  ``engine.comm_hooks`` is the
        :class:`~comm_hooks.frameworks.deepspeed.EngineCompression`.

    Raises:
        ImportError: without DeepSpeed.
        ValueError: for settings that are unknown or cannot work, with their path in the JSON, and
            for a feature of DeepSpeed that compression does not support.
        ConfigMismatchError: if ranks are configured differently.

    Not supported: see the page on DeepSpeed in the documentation.

    Example::

        >>> from comm_hooks.frameworks.deepspeed import initialize
        >>> config = {
        ...     "train_micro_batch_size_per_gpu": 8,
        ...     "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        ...     "comm_hooks": {"compressor": "topk", "density": 1 / 64},
        ... }
        >>> engine, _, _, _ = initialize(model=model, config=config)  # doctest: +SKIP
        >>> engine.comm_hooks.stats()["compression_ratio"]  # doctest: +SKIP
        1.0
    """
    import_deepspeed()
    import deepspeed

    given = inspect.signature(deepspeed.initialize).bind(*args, **kwargs).arguments
    command_line = given.get("args")
    config = given.get("config")
    if config is None:
        config = given.get("config_params")
    from_command_line = config is None and getattr(command_line, "deepspeed_config", None)
    if from_command_line:
        config = from_command_line
    if config is None or given.get("model") is None:
        return deepspeed.initialize(**given)  # refuses this in its own words

    settings = load(config)
    block = find_block(settings)
    optimizer = given.get("optimizer")
    prepared, exchanged = prepare(settings, block, given)
    if prepared is not optimizer:
        given["optimizer"] = prepared
        given["config"] = without_optimizer(settings)
        given.pop("config_params", None)
        with _hidden_config(command_line):
            result = deepspeed.initialize(**given)
    else:
        result = deepspeed.initialize(**given)
    if attach(result[0], exchanged) is None and block is None:
        warnings.warn(
            f"the DeepSpeed configuration has no {BLOCK!r} block: gradients are exchanged "
            f"uncompressed",
            stacklevel=2,
        )
    return result


def prepare(
    settings: Mapping[str, Any], block: Mapping[str, Any] | None, given: Mapping[str, Any]
) -> tuple[Any, Averaging | None]:
    """Return the optimizer to construct an engine with, and how the engine's gradients travel.

    The latter is None where DeepSpeed averages them by itself, or the optimizer exchanges.

    Args:
        settings: the DeepSpeed configuration.
        block: the ``comm_hooks`` block in it.
        given: the arguments of the engine or of ``deepspeed.initialize``, by name.

    Raises:
        ValueError: for anything unknown, or that cannot work, in the blocks of optimizer and
            exchange.
    """
    optimizer = given.get("optimizer")
    prepared = optimizers.prepare(
        settings,
        model=given["model"],
        optimizer=optimizer,
        model_parameters=given.get("model_parameters"),
    )
    return prepared, optimizers.averaging(settings, block, optimizer)


def without_optimizer(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return what DeepSpeed is to see of a configuration whose optimizer is one of ours.

    DeepSpeed knows no optimizer of that name (up to 0.19.6: has its own), and keeps ZeRO from
    optimizers that are not on its list.  Our block belongs to the optimizer, and would be checked
    without it if ``auto`` is imported, too.
    """
    kept = {key: value for key, value in settings.items() if key not in ("optimizer", BLOCK)}
    return {**kept, "zero_allow_untested_optimizer": True}


def import_deepspeed() -> None:
    """Raise ``ImportError`` with what to do if DeepSpeed is not there."""
    try:
        import deepspeed  # noqa: F401
    except ImportError as error:
        raise ImportError(
            f'DeepSpeed cannot be imported ({error}): pip install "comm-hooks[deepspeed]"'
        ) from error


@contextmanager
def _hidden_config(command_line: Any) -> Iterator[None]:
    """Keep DeepSpeed from finding a second configuration in the command line's arguments."""
    names = ("deepspeed_config", "deepscale_config")
    hidden = {n: getattr(command_line, n) for n in names if getattr(command_line, n, None)}
    try:
        for name in hidden:
            setattr(command_line, name, None)
        yield
    finally:
        for name, value in hidden.items():
            setattr(command_line, name, value)

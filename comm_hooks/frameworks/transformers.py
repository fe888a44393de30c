"""The Trainer of transformers: one call that compresses its exchange, logs and checkpoints."""

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

from comm_hooks.checkpoints.rank_files import load_rank_files, save_rank_file
from comm_hooks.compressors.base import Compressor
from comm_hooks.frameworks.ddp.hook import register as register_hook
from comm_hooks.optim.replacing import take_over
from comm_hooks.tracking import StatsLogger

try:
    from transformers import TrainerCallback
    from transformers.trainer_utils import get_last_checkpoint
except ModuleNotFoundError:
    raise ImportError(
        "comm_hooks.frameworks.transformers needs transformers: pip install "
        '"comm-hooks[transformers]"'
    ) from None


def register(
    trainer: Any, compressor: Compressor | str | None = None, **settings: Any
) -> "CompressionCallback":
    """Compress the exchange of a ``transformers.Trainer``; call it before ``train()``.

    1. when training begins and the model is wrapped, :func:`comm_hooks.register` is called, with
       the loss scale of ``fp16=True``;
    2. ``state.stats()`` is added to the Trainer's logs (TensorBoard, W&B, the progress bar);
    3. with every checkpoint each rank writes a file to ``checkpoint-<step>/comm_hooks``;
    4. ``trainer.train(resume_from_checkpoint=...)`` restores these files, also on another number of
       ranks; if there are no files, it warns.

    Args:
        trainer: gets a callback, and its ``train`` passes the resumed checkpoint to the callback.
        compressor, settings: see :func:`comm_hooks.register`.  Without a compressor, the AdamW of
            the Trainer is replaced, with the settings of :func:`comm_hooks.replace`; or its
            optimizer exchanges by itself: ``Trainer(optimizers=(optimizer, scheduler))``.

    Returns:
        The callback, with :func:`comm_hooks.register`'s result as ``state`` once training begins.

    Raises:
        ValueError: for a Trainer that uses FSDP or DeepSpeed; and when training begins, for bad
            settings and if there is only one process.

    Not supported: hyperparameter search, which puts checkpoints elsewhere.

    Example::

        >>> from comm_hooks.frameworks import transformers
        >>> callback = transformers.register(trainer, "topk", density=1 / 64)  # doctest: +SKIP
        >>> trainer.train()  # doctest: +SKIP

    Rounds of local steps in place of AdamW::

        >>> callback = transformers.register(trainer, total_steps=10_000)  # doctest: +SKIP
    """
    if getattr(trainer, "is_deepspeed_enabled", False):
        raise ValueError(
            "register() does not support DeepSpeed: use comm_hooks.frameworks.deepspeed"
        )
    if getattr(trainer, "is_fsdp_enabled", False):
        raise ValueError("register() does not support FSDP: use comm_hooks.frameworks.fsdp")
    callback = CompressionCallback(trainer, compressor, settings)
    # In front: the other callbacks see the values that it adds to the logs.
    trainer.callback_handler.callbacks.insert(0, callback)
    trainer.train = functools.partial(_train, callback, trainer.train)
    return callback


class CompressionCallback(TrainerCallback):
    """The callback that :func:`register` adds to a Trainer.

    Attributes:
        state: the result of :func:`comm_hooks.register` after the beginning of training.
    """

    def __init__(
        self, trainer: Any, compressor: Compressor | str | None, settings: Mapping[str, Any]
    ) -> None:
        self.state: Any = None
        self.resume_from: str | None = None
        self._trainer = trainer
        self._compressor = compressor
        self._settings = settings
        self._registered_with: object = None
        self._logger: StatsLogger | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Register with the wrapped model, and load this rank's state when resuming."""
        model = self._trainer.model_wrapped
        if self._registered_with is not model:  # a second train() goes on with the same model
            self.state = self._register(model)
            self._registered_with = model
        assert self.state
        if self.resume_from is not None:
            load_rank_files(self.state, os.path.join(self.resume_from, "comm_hooks"))
        self._logger = StatsLogger(self.state)

    def _register(self, model: Any) -> Any:
        if self._compressor is None:
            return take_over(model, self._trainer.optimizer, **self._settings)
        scaler = getattr(self._trainer.accelerator, "scaler", None)
        scale = {} if scaler is None else {"loss_scale": scaler.get_scale}
        return register_hook(model, self._compressor, **scale, **self._settings)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write this rank's file to the folder of the checkpoint."""
        assert self.state
        folder = os.path.join(args.output_dir, f"checkpoint-{state.global_step}")
        save_rank_file(self.state, os.path.join(folder, "comm_hooks"))

    def on_log(
        self,
        args: Any,
        state: Any,
        control: Any,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Add the traffic statistics to the logs of training."""
        if self._logger and logs is not None and "loss" in logs:
            logs.update({f"comm_hooks/{k}": v for k, v in self._logger.collect().items()})


def _train(
    callback: CompressionCallback,
    train: Callable[..., Any],
    resume_from_checkpoint: str | bool | None = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Call ``train``, and pass the resumed checkpoint to the callback; the Trainer does not."""
    resumed = resume_from_checkpoint
    if resumed is True:
        resumed = get_last_checkpoint(callback._trainer.args.output_dir)
    callback.resume_from = resumed or None
    return train(resume_from_checkpoint, *args, **kwargs)

"""Lightning's Trainer: a callback that compresses, logs, and checkpoints every rank's residuals.

It works with ``lightning`` and ``pytorch_lightning``.  Fabric needs no module of its own:
``comm_hooks.register(fabric.setup(model), ...)``.
"""

import contextlib
import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer

from comm_hooks.checkpoints.protocol import local_steps
from comm_hooks.checkpoints.rank_files import load_rank_files, save_rank_file
from comm_hooks.compressors.base import Compressor
from comm_hooks.frameworks.ddp.hook import register
from comm_hooks.optim.replacing import take_over
from comm_hooks.shared_model import show_model
from comm_hooks.tracking import StatsLogger

try:
    from lightning.pytorch import Callback
except ModuleNotFoundError:
    try:
        from pytorch_lightning import Callback
    except ModuleNotFoundError:
        raise ImportError(
            'comm_hooks.frameworks.lightning needs Lightning: pip install "comm-hooks[lightning]"'
        ) from None


class CompressionCallback(Callback):
    """Compresses the exchange of a Trainer with ``strategy="ddp"``, on CPU and CUDA.

    1. when fitting starts and the model is wrapped, :func:`~comm_hooks.register` is called, with
       the loss scale of ``precision="16-mixed"``, or with the optimizer;
    2. every ``log_every_n_steps`` steps of the Trainer, ``state.stats()`` goes to its loggers, and
       ``compression_ratio`` to the progress bar;
    3. with every checkpoint each rank writes a file of its own to the folder ``<checkpoint>
       .comm_hooks``, through the Trainer's ``CheckpointIO``; it is removed with the checkpoint;
    4. ``fit(ckpt_path=...)`` restores these files, also on another number of ranks.

    Accumulation (``accumulate_grad_batches``) and clipping work as always: Lightning accumulates
    without communication, and clips the mean.

    Args:
        compressor, settings: see :func:`~comm_hooks.register`.  Without a compressor, the AdamW
            that ``configure_optimizers`` returns is replaced, with the settings of
            :func:`comm_hooks.replace`; or that optimizer exchanges by itself.

    Attributes:
        state: the result of :func:`~comm_hooks.register` after the start of fitting, else None.

    Raises:
        ValueError: at the start of ``fit``, for bad settings, for another strategy, and if the
            strategy was given a ``ddp_comm_hook``; when resuming, if files of ranks are missing or
            belong to another checkpoint.  If all are missing there is a warning.

    Not supported: strategies other than those that derive from ``DDPStrategy`` (``"ddp"``,
    ``"ddp_spawn"``, ``"ddp_find_unused_parameters_true"`` ...).  With those that start processes
    from the main one (``"ddp_spawn"``) ``state`` stays None in the main process.

    Example::

        >>> import torch
        >>> from comm_hooks.frameworks.lightning import CompressionCallback
        >>> callback = CompressionCallback("topk", density=1 / 64)
        >>> callback.state is None
        True

    and ``Trainer(strategy="ddp", devices=2, callbacks=[callback])``.
    """

    def __init__(self, compressor: Compressor | str | None = None, **settings: Any) -> None:
        super().__init__()
        self.state: Any = None
        self._compressor = compressor
        self._settings = settings
        self._logger: StatsLogger | None = None
        self._logged = 0
        self._module: object = None
        self._saved: Mapping[str, Any] | None = None

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuse unsupported strategies, and let checkpoints include a file of every rank."""
        if stage == "fit":
            strategy = trainer.strategy
            _require_ddp(strategy)
            _refuse_tuners(trainer.callbacks)
            if not isinstance(strategy.save_checkpoint, functools.partial):
                strategy.save_checkpoint = functools.partial(
                    self._save_checkpoint, strategy, strategy.save_checkpoint
                )
                strategy.remove_checkpoint = functools.partial(
                    _remove_checkpoint, strategy, strategy.remove_checkpoint
                )
        # The strategy will send the parameters of rank 0 to all.
        show_model(pl_module, shared=True)

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Register the compressor or the optimizer with the model that DDP has wrapped."""
        before = self.state if self._module is pl_module else None
        self._module = pl_module
        if self._compressor is None:
            self.state = take_over(pl_module, _only(trainer.optimizers), **self._settings)
            if isinstance(self.state, Optimizer):
                trainer.optimizers = [self.state]
            _let_clip(trainer.precision_plugin, trainer.optimizers[0])
        else:
            self.state = register(pl_module, self._compressor, **self._settings)
            if before is not None:  # fitted before: go on with its residuals
                self.state.load_state_dict(before.state_dict())

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Load this rank's state from the checkpoint's files, after the model and the optimizer."""
        if self._saved is not None and trainer.ckpt_path is not None:
            load_rank_files(
                self.state,
                # save_last="link" makes no folder beside the link.
                _folder(os.path.realpath(trainer.ckpt_path))
                if os.path.islink(trainer.ckpt_path)
                else _folder(trainer.ckpt_path),
                step=self._saved["steps"],
                read=lambda path: trainer.strategy.checkpoint_io.load_checkpoint(path),
            )
            # Within a round the number of exchanges does not identify a step.
            taken = local_steps(self.state)
            if (saved := self._saved.get("local_steps", taken)) != taken:
                raise ValueError(
                    f"the rank files of {trainer.ckpt_path} are of local step {taken}, but the "
                    f"checkpoint is of local step {saved}: a save was interrupted, or files were "
                    "mixed: resume from another checkpoint"
                )
        self._saved = None
        self._logger = StatsLogger(self.state)

    def on_train_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int
    ) -> None:
        """Switch to this rank's own weights: after validation the Trainer does not call train()."""
        if pl_module.training:
            show_model(pl_module, shared=False)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Switch to the weights that all ranks share, for the stages that follow."""
        show_model(pl_module, shared=True)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Log the traffic statistics every ``log_every_n_steps`` steps."""
        assert self._logger
        every, step = trainer.log_every_n_steps, trainer.global_step
        if every and step % every == 0 and step != self._logged:  # not for every micro-batch
            self._logged = step
            values = self._logger.collect()
            for logger in trainer.loggers:
                logger.log_metrics({f"comm_hooks/{k}": v for k, v in values.items()}, step=step)
            self.log("compression_ratio", values["compression_ratio"], prog_bar=True, logger=False)

    def state_dict(self) -> dict[str, Any]:
        """Return the step counts to save, which identify the files of ranks of a checkpoint."""
        if not self.state:
            return {}
        return {"steps": self.state.exchange.step, "local_steps": local_steps(self.state)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keep the step counts of a checkpoint until :meth:`on_train_start` loads its files."""
        self._saved = state_dict or None

    def _save_checkpoint(
        self,
        strategy: Any,
        save: Callable[..., None],
        checkpoint: dict[str, Any],
        filepath: Any,
        storage_options: Any = None,
    ) -> None:
        save(checkpoint, filepath, storage_options=storage_options)
        # A checkpoint of weights only has no state of callbacks.
        if self.state is not None and "callbacks" in checkpoint:
            save_rank_file(
                self.state,
                _folder(filepath),
                write=functools.partial(
                    strategy.checkpoint_io.save_checkpoint, storage_options=storage_options
                ),
            )


def _only(optimizers: list[Any]) -> Any:
    if len(optimizers) != 1:
        raise ValueError(
            f"CompressionCallback() without a compressor needs exactly one optimizer, one that "
            f"exchanges by itself, got {len(optimizers)}"
        )
    return optimizers[0]


def _refuse_tuners(callbacks: list[Any]) -> None:
    for callback in callbacks:
        name = type(callback).__name__
        if name in ("LearningRateFinder", "BatchSizeFinder"):
            raise ValueError(
                f"CompressionCallback: {name} trains before the compressor is registered, so that "
                "its result does not hold with compression: run it in another Trainer, without "
                "CompressionCallback"
            )


def _let_clip(plugin: Any, optimizer: Any) -> None:
    """Let Lightning clip gradients in mixed precision for an optimizer that unscales by itself.

    Lightning refuses to, because such gradients are still scaled.  Here they are unscaled first,
    which the GradScaler records.
    """
    clip = plugin.clip_gradients
    unchecked: Any = [vars(k) for k in type(plugin).__mro__ if "clip_gradients" in vars(k)][-1]

    @functools.wraps(clip)
    def clip_gradients(given: Any, clip_val: Any = 0.0, *args: Any, **kwargs: Any) -> None:
        if given is not optimizer:
            clip(given, clip_val, *args, **kwargs)
        elif clip_val:
            if scaler := getattr(plugin, "scaler", None):
                scaler.unscale_(given)
            unchecked["clip_gradients"](plugin, given, clip_val, *args, **kwargs)

    plugin.clip_gradients = clip_gradients


def _remove_checkpoint(strategy: Any, remove: Callable[..., None], filepath: Any) -> None:
    remove(filepath)
    if getattr(strategy, "local_rank", 0) == 0:
        # On a shared filesystem another node may have removed the folder.
        with contextlib.suppress(FileNotFoundError):
            strategy.checkpoint_io.remove_checkpoint(_folder(filepath))


def _folder(filepath: Any) -> str:
    return f"{filepath}.comm_hooks"


def _require_ddp(strategy: Any) -> None:
    names = [kind.__name__ for kind in type(strategy).__mro__]
    advice = 'use Trainer(strategy="ddp"), also with devices=1'
    if "DeepSpeedStrategy" in names:
        advice = "see comm_hooks.frameworks.deepspeed"
    elif "DDPStrategy" in names:
        advice = ""
    elif {"FSDPStrategy", "ModelParallelStrategy"} & set(names):
        advice = "see comm_hooks.frameworks.fsdp"
    if advice:
        raise ValueError(
            f"CompressionCallback works with DistributedDataParallel, not with {names[0]}: {advice}"
        )
    if getattr(strategy, "_ddp_comm_hook", None) is not None:
        raise ValueError(
            "DDPStrategy(ddp_comm_hook=...) and CompressionCallback each register a hook, and DDP "
            "takes only one: drop one of them"
        )

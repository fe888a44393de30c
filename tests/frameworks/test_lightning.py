"""Lightning's Trainer on real ranks: compression, checkpoints of all ranks, loss scale, logs."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from comm_hooks.optim import low_communication
from tests.frameworks.launching import launch
from tests.ranks import RanksOf
from tests.test_hook import SMALL_BUCKETS_MB, Net, batch

lightning = pytest.importorskip("lightning.pytorch", reason="Lightning is not installed")

SETTINGS: dict[str, Any] = {"density": 0.1, "min_numel": 64}
STEPS_PER_EPOCH = 3


def trainer_of(**options: Any) -> Any:
    """Return a Trainer over the ranks that run already."""
    from lightning.fabric.plugins.environments import TorchElasticEnvironment

    launch()
    strategy = options.pop("strategy", None) or lightning.strategies.DDPStrategy(
        bucket_cap_mb=SMALL_BUCKETS_MB, **options.pop("ddp", {})
    )
    strategy.cluster_environment = TorchElasticEnvironment()
    return lightning.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategy,
        **{
            "max_epochs": 2,
            "use_distributed_sampler": False,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "log_every_n_steps": 2,
            **options,
        },
    )


def module_of(micro_batches: int = 1, poison: int = -1) -> Any:
    """Return a LightningModule with batches that depend on the step and the rank alone."""

    class Module(lightning.LightningModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = Net()

        def training_step(self, index: torch.Tensor, batch_idx: int) -> torch.Tensor:
            inputs, targets = batch(micro_batches * self.global_step + batch_idx, self.global_rank)
            if self.global_step == poison and self.global_rank == 1:
                inputs[0, 0] = float("inf")
            return nn.functional.cross_entropy(self.net(inputs), targets)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.05)

        def train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(range(micro_batches * STEPS_PER_EPOCH))

    return Module()


def callback_of(**settings: Any) -> Any:
    from comm_hooks.frameworks.lightning import CompressionCallback

    return CompressionCallback("topk", **{**SETTINGS, **settings})


def quiet(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[str]:
    """Run a function and return the warnings that are ours."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function(*args, **kwargs)
    ours = [w for w in caught if "comm_hooks" in w.filename or "comm_hooks" in str(w.message)]
    return [str(w.message) for w in ours]


def parameters(module: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in module.net.named_parameters()}


def checkpoints_kept(folder: str) -> list[str]:
    """Return what this rank has written through a CheckpointIO of the user's own."""
    written: list[str] = []

    class Recording(lightning.plugins.io.TorchCheckpointIO):
        def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
            written.append(str(path))
            super().save_checkpoint(checkpoint, path, storage_options)

    kinds: dict[str, dict[str, Any]] = {
        "one": {"save_top_k": 1, "save_last": "link"},
        "weights": {"save_weights_only": True},
    }
    for name, options in kinds.items():
        saving = lightning.callbacks.ModelCheckpoint(
            dirpath=f"{folder}/{name}", filename="{epoch}", **options
        )
        trainer = trainer_of(
            callbacks=[callback_of(), saving],
            enable_checkpointing=True,
            plugins=[Recording()],
        )
        trainer.fit(module_of())
    trainer.save_checkpoint(f"{folder}/by hand.ckpt")
    trainer = trainer_of(callbacks=[callback_of()], max_epochs=3)
    messages = quiet(trainer.fit, module_of(), ckpt_path=f"{folder}/one/last.ckpt")
    assert not any("residuals start from zero" in message for message in messages)
    return written


def test_files_of_ranks_come_and_go_with_their_checkpoint(
    ranks_of: RanksOf, tmp_path: Path
) -> None:
    written = ranks_of(2).run(checkpoints_kept, str(tmp_path))
    for rank in range(2):
        assert f"{tmp_path}/by hand.ckpt.comm_hooks/rank{rank}.pt" in written[rank]
    assert sorted(p.name for p in (tmp_path / "one").iterdir()) == [
        "epoch=1.ckpt",
        "epoch=1.ckpt.comm_hooks",
        "last.ckpt",
    ]
    assert [p.name for p in (tmp_path / "weights").iterdir()] == ["epoch=1.ckpt"]
    assert len(list((tmp_path / "by hand.ckpt.comm_hooks").iterdir())) == 2


def fit_twice() -> list[float]:
    module, callback = module_of(), callback_of()
    trainer = trainer_of(callbacks=[callback], max_epochs=1)
    trainer.fit(module)
    first = callback.state
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module)
    assert callback.state is not first
    other = callback_of()
    trainer_of(callbacks=[other], max_epochs=1).fit(module_of())
    return [s.stats()["steps"] for s in (first, callback.state, other.state)]


def test_fitting_again_goes_on_with_the_residuals(ranks_of: RanksOf) -> None:
    assert ranks_of(2).run(fit_twice) == [[3, 6, 3]] * 2


def stages() -> dict[str, Any]:
    """Fit rounds, with steps left that nobody has exchanged; then test, save, and fit again."""
    from comm_hooks.frameworks.lightning import CompressionCallback

    seen: dict[str, dict[str, torch.Tensor]] = {}

    def train(again: bool = False) -> Any:
        callback = CompressionCallback()
        trainer = trainer_of(callbacks=[callback, Look("again" if again else "fit")])
        return trainer, callback

    class Look(lightning.Callback):
        def __init__(self, stage: str) -> None:
            self.stage = stage

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            seen[f"{self.stage} starts"] = parameters(pl_module)

        def on_test_start(self, trainer: Any, pl_module: Any) -> None:
            seen[f"{self.stage} tests"] = parameters(pl_module)

    module = module_of()
    rounds: Any = None

    def configure() -> Any:
        nonlocal rounds
        named = module.net.named_parameters()
        rounds = low_communication(named, lr=0.01, bits_per_parameter=16.0, total_steps=100)
        return rounds

    module.configure_optimizers = configure
    module.test_step = lambda index, batch_idx: None
    module.test_dataloader = lambda: torch.utils.data.DataLoader(range(2))
    trainer, _ = train()
    trainer.fit(module)
    outstanding = rounds.round_state.clock.outstanding
    shared = {name.removeprefix("net."): v for name, v in module.state_dict().items()}
    messages = quiet(trainer.test, module, verbose=False)
    # A Trainer that knows nothing of rounds sends rank 0's parameters to all.
    messages += quiet(trainer_of(callbacks=[Look("other")]).test, module, verbose=False)
    saved = {name.removeprefix("net."): v for name, v in module.state_dict().items()}
    module.train()
    trainer, _ = train(again=True)
    messages += quiet(trainer.fit, module)
    return {
        "outstanding": outstanding,
        "messages": messages,
        "equal": {
            name: all(torch.equal(v, shared[n]) for n, v in found.items())
            for name, found in {**seen, "saved": saved}.items()
            if name != "fit starts"
        },
    }


def test_what_follows_training_begins_at_the_model_that_all_share(ranks_of: RanksOf) -> None:
    for report in ranks_of(2).run(stages):
        assert report["outstanding"], "else there is nothing to tell the models apart"
        assert report["equal"] == dict.fromkeys(
            ["fit tests", "other tests", "saved", "again starts"], True
        )
        assert report["messages"] == []


def scaled_training() -> dict[str, Any]:
    """Scale the loss as on a GPU; the inputs of rank 1 overflow in the third step."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    precision = lightning.plugins.MixedPrecision("16-mixed", "cpu", scaler)
    module, callback = module_of(poison=2), callback_of()
    trainer = trainer_of(callbacks=[callback], plugins=[precision], max_epochs=1)
    trainer.fit(module)
    return {
        "scale": scaler.get_scale(),
        "known": callback.state.loss_scale == scaler.get_scale,
        "norm": callback.state.stats()["residual_norm"],
        "finite": all(bool(p.isfinite().all()) for p in parameters(module).values()),
    }


def test_residuals_do_not_depend_on_the_loss_scale(ranks_of: RanksOf) -> None:
    for report in ranks_of(2).run(scaled_training):
        assert report["known"]
        assert report["scale"] == 2.0**13
        assert report["finite"]
        assert 0 < report["norm"] < 50  # of the size of a gradient; scaled it would be 16384 times


def logged() -> tuple[list[tuple[int, dict[str, float]]], dict[str, Any], dict[str, float]]:
    records: list[tuple[int, dict[str, float]]] = []

    class Records(lightning.loggers.logger.Logger):
        name, version = "records", 0

        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            if any(name.startswith("comm_hooks/") for name in metrics):
                records.append((step or 0, metrics))

        def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
            pass

    callback = callback_of()
    trainer = trainer_of(
        callbacks=[callback],
        logger=Records(),
        accumulate_grad_batches=2,
        enable_progress_bar=False,
    )
    trainer.fit(module_of(micro_batches=2))
    return records, dict(trainer.progress_bar_metrics), callback.state.stats()


def test_what_was_sent_is_logged_every_few_steps(ranks_of: RanksOf) -> None:
    for records, bar, stats in ranks_of(2).run(logged):
        assert [step for step, _ in records] == [2, 4, 6]
        for step, values in records:
            assert values["comm_hooks/steps"] == step
            assert values["comm_hooks/sent_per_step"] > 0
        last = records[-1][1]
        assert {f"comm_hooks/{k}" for k in stats} < set(last)
        assert last["comm_hooks/bytes_sent"] == stats["bytes_sent"]
        assert bar["compression_ratio"] == pytest.approx(stats["compression_ratio"])


def refusals() -> dict[str, str]:
    from lightning.pytorch import strategies

    class DeepSpeedStrategy(strategies.DDPStrategy):
        pass

    class FSDPStrategy(strategies.SingleDeviceStrategy):
        pass

    cases: dict[str, dict[str, Any]] = {
        "single": {"strategy": strategies.SingleDeviceStrategy("cpu")},
        "deepspeed": {"strategy": DeepSpeedStrategy()},
        "fsdp": {"strategy": FSDPStrategy("cpu")},
        "hook": {"ddp": {"ddp_comm_hook": lambda state, bucket: None}},
        "static_graph": {"ddp": {"static_graph": True}, "accumulate_grad_batches": 2},
        "density": {"settings": {"density": 2}},
        "option": {"settings": {"densty": 0.1}},
        "finder": {"tuner": True},
    }
    messages = {}
    for name, options in cases.items():
        callbacks = [callback_of(**options.pop("settings", {}))]
        if options.pop("tuner", False):
            callbacks.append(lightning.callbacks.LearningRateFinder())
        try:
            trainer_of(callbacks=callbacks, **options).fit(module_of())
        except ValueError as error:
            messages[name] = str(error)
    return messages


def test_what_cannot_work_is_refused_before_training(ranks_of: RanksOf) -> None:
    expected = {
        "single": 'not with SingleDeviceStrategy: use Trainer(strategy="ddp")',
        "deepspeed": "not with DeepSpeedStrategy: see comm_hooks.frameworks.deepspeed",
        "fsdp": "not with FSDPStrategy: see comm_hooks.frameworks.fsdp",
        "hook": "DDPStrategy(ddp_comm_hook=...) and CompressionCallback each register a hook",
        "static_graph": "static_graph=True: the first backward pass must not be under no_sync()",
        "density": "TopK: density must lie in",
        "option": "unknown setting with topk 'densty': did you mean 'density'?",
        "finder": "LearningRateFinder trains before the compressor is registered",
    }
    for messages in ranks_of(2).run(refusals):
        assert messages.keys() == expected.keys()
        for name, part in expected.items():
            assert part in messages[name]

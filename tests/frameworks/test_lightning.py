"""Lightning's Trainer on real ranks: compression, checkpoints of all ranks, loss scale, logs."""

import importlib
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from comm_hooks import ErrorFeedback, TopK, register
from comm_hooks.optim import low_communication
from tests.ranks import Ranks
from tests.test_hook import SMALL_BUCKETS_MB, Net, batch

lightning = pytest.importorskip("lightning.pytorch", reason="Lightning is not installed")

RanksOf = Callable[[int], Ranks]
SETTINGS: dict[str, Any] = {"density": 0.1, "min_numel": 64}
STEPS_PER_EPOCH = 3


def trainer_of(package: str, **options: Any) -> Any:
    """Return a Trainer over the ranks that run already."""
    pl = importlib.import_module(package)
    plugins = importlib.import_module(
        "lightning.fabric.plugins.environments"
        if package == "lightning.pytorch"
        else "lightning_fabric.plugins.environments"
    )
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="1",  # not used: the process group is there
        RANK=str(dist.get_rank()),
        LOCAL_RANK=str(dist.get_rank()),
        WORLD_SIZE=str(dist.get_world_size()),
        LOCAL_WORLD_SIZE=str(dist.get_world_size()),
        TORCHELASTIC_RUN_ID="none",
    )
    strategy = options.pop("strategy", None) or pl.strategies.DDPStrategy(
        bucket_cap_mb=SMALL_BUCKETS_MB, **options.pop("ddp", {})
    )
    strategy.cluster_environment = plugins.TorchElasticEnvironment()
    return pl.Trainer(
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


def module_of(package: str, micro_batches: int = 1, poison: int = -1) -> Any:
    """Return a LightningModule whose batches depend on the step and the rank alone."""
    pl = importlib.import_module(package)

    class Module(pl.LightningModule):
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


def trainer_and_loop(package: str) -> dict[str, Any]:
    """Train with accumulation and clipping, by the Trainer and by a loop of our own."""
    module, callback = module_of(package, micro_batches=2), callback_of()
    trainer = trainer_of(
        package, callbacks=[callback], accumulate_grad_batches=2, gradient_clip_val=0.5
    )
    messages = quiet(trainer.fit, module)

    rank = dist.get_rank()
    torch.manual_seed(0)
    net = Net()
    ddp = DistributedDataParallel(net, bucket_cap_mb=SMALL_BUCKETS_MB)
    state = register(ddp, "topk", **SETTINGS)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    for step in range(2 * STEPS_PER_EPOCH):
        optimizer.zero_grad()
        first = 2 * step + 2 * (step % STEPS_PER_EPOCH)  # the Trainer counts batches by epoch
        for micro in range(2):
            ddp.require_backward_grad_sync = micro == 1
            inputs, targets = batch(first + micro, rank)
            (nn.functional.cross_entropy(ddp(inputs), targets) / 2).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.5)
        optimizer.step()
    ours, theirs = state.stats(), callback.state.stats()
    expected = dict(net.named_parameters())
    return {
        "messages": messages,
        "error": max(
            float((p - expected[n]).abs().max().detach()) for n, p in parameters(module).items()
        ),
        "stats": [
            {**stats, "residual_norm": round(stats["residual_norm"], 4)} for stats in (ours, theirs)
        ],
        "buckets": len(callback.state.exchange.buckets),
    }


@pytest.mark.parametrize(
    "package",
    ["lightning.pytorch", pytest.param("pytorch_lightning", marks=pytest.mark.slow)],
)
def test_the_trainer_does_what_a_loop_with_register_does(ranks_of: RanksOf, package: str) -> None:
    pytest.importorskip(package, reason=f"{package} is not installed")
    for report in ranks_of(2).run(trainer_and_loop, package):
        assert report["messages"] == []
        assert report["error"] < 1e-6
        assert report["stats"][0] == report["stats"][1]
        assert report["stats"][0]["steps"] == 2 * STEPS_PER_EPOCH
        assert report["buckets"] >= 2


def checkpointing(folder: str, **options: Any) -> Any:
    return lightning.callbacks.ModelCheckpoint(
        dirpath=folder, filename="{epoch}", save_top_k=-1, **options
    )


def save_and_resume(folder: str) -> dict[str, Any]:
    """Fit two epochs, and go on after the first with everything made anew."""
    package = "lightning.pytorch"
    module = module_of(package)
    saving = checkpointing(folder)
    trainer_of(package, callbacks=[callback_of(), saving], enable_checkpointing=True).fit(module)

    again, callback = module_of(package), callback_of()
    trainer = trainer_of(package, callbacks=[callback])
    messages = quiet(trainer.fit, again, ckpt_path=f"{folder}/epoch=0.ckpt")
    return {
        "messages": messages,
        "identical": all(
            torch.equal(p, parameters(again)[n]) for n, p in parameters(module).items()
        ),
        "steps": callback.state.stats()["steps"],
    }


def resume(folder: str, seconds: int = 1) -> tuple[list[str], float]:
    """Go on from the first epoch; return our warnings, and the sum of the residuals on entry."""
    package = "lightning.pytorch"
    entry: list[dict[str, torch.Tensor]] = []

    class Look(lightning.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            entry.append(callback.state.state_dict()["memory"])

    callback = callback_of()
    trainer = trainer_of(package, callbacks=[callback, Look()], max_epochs=2)
    messages = quiet(trainer.fit, module_of(package), ckpt_path=f"{folder}/epoch=0.ckpt")
    return messages, float(sum(v.double().sum() for v in entry[0].values()))


def mean_residual(folder: Path, ranks: int) -> float:
    files = [torch.load(folder / f"rank{r}.pt", weights_only=True) for r in range(ranks)]
    return (
        float(sum(v.double().sum() for f in files for v in f["state"]["memory"].values())) / ranks
    )


@pytest.mark.slow
def test_checkpoints_hold_the_residuals_of_all_ranks(ranks_of: RanksOf, tmp_path: Path) -> None:
    for report in ranks_of(2).run(save_and_resume, str(tmp_path)):
        assert report["identical"], "a resumed run must end bit for bit like an uninterrupted one"
        assert report["steps"] == 2 * STEPS_PER_EPOCH
        assert report["messages"] == []
    folder = tmp_path / "epoch=0.ckpt.comm_hooks"
    assert sorted(p.name for p in folder.iterdir()) == ["rank0.pt", "rank1.pt"]

    # Another number of ranks: the sum over ranks of what was not sent, over their number, is kept.
    resumed = ranks_of(3).run(resume, str(tmp_path))
    assert abs(mean_residual(folder, 2)) > 1e-3
    assert sum(total for _, total in resumed) / 3 == pytest.approx(mean_residual(folder, 2), 1e-5)

    # Files of another checkpoint, of fewer ranks, and none.
    other = tmp_path / "epoch=1.ckpt.comm_hooks"
    hidden = tmp_path / "hidden"
    folder.rename(hidden)
    other.rename(folder)
    for outcome in ranks_of(2).outcomes(resume, str(tmp_path)):
        assert "was saved after 6 exchanges, but the checkpoint after 3" in str(outcome.error)
    folder.rename(other)
    hidden.rename(folder)
    (folder / "rank1.pt").unlink()
    for world in (2, 3):
        for outcome in ranks_of(world).outcomes(resume, str(tmp_path)):
            assert "rank1.pt is missing: residuals of all 2 ranks are needed" in str(outcome.error)
    (folder / "rank0.pt").unlink()
    for messages, total in ranks_of(2).run(resume, str(tmp_path)):
        assert [m for m in messages if "residuals start from zero" in m]
        assert total == 0


def checkpoints_kept(folder: str) -> list[str]:
    """Return what this rank has written through a CheckpointIO of the user's own."""
    package = "lightning.pytorch"
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
            package,
            callbacks=[callback_of(), saving],
            enable_checkpointing=True,
            plugins=[Recording()],
        )
        trainer.fit(module_of(package))
    trainer.save_checkpoint(f"{folder}/by hand.ckpt")
    trainer = trainer_of(package, callbacks=[callback_of()], max_epochs=3)
    messages = quiet(trainer.fit, module_of(package), ckpt_path=f"{folder}/one/last.ckpt")
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
    package = "lightning.pytorch"
    module, callback = module_of(package), callback_of()
    trainer = trainer_of(package, callbacks=[callback], max_epochs=1)
    trainer.fit(module)
    first = callback.state
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module)
    assert callback.state is not first
    other = callback_of()
    trainer_of(package, callbacks=[other], max_epochs=1).fit(module_of(package))
    return [s.stats()["steps"] for s in (first, callback.state, other.state)]


def test_fitting_again_goes_on_with_the_residuals(ranks_of: RanksOf) -> None:
    assert ranks_of(2).run(fit_twice) == [[3, 6, 3]] * 2


def stages() -> dict[str, Any]:
    """Fit rounds, with steps left that nobody has exchanged; then test, save, and fit again."""
    from comm_hooks.frameworks.lightning import CompressionCallback

    package = "lightning.pytorch"
    seen: dict[str, dict[str, torch.Tensor]] = {}

    def train(again: bool = False) -> Any:
        callback = CompressionCallback()
        trainer = trainer_of(package, callbacks=[callback, Look("again" if again else "fit")])
        return trainer, callback

    class Look(lightning.Callback):
        def __init__(self, stage: str) -> None:
            self.stage = stage

        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            seen[f"{self.stage} starts"] = parameters(pl_module)

        def on_test_start(self, trainer: Any, pl_module: Any) -> None:
            seen[f"{self.stage} tests"] = parameters(pl_module)

    module = module_of(package)
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
    messages += quiet(trainer_of(package, callbacks=[Look("other")]).test, module, verbose=False)
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
    package = "lightning.pytorch"
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    precision = lightning.plugins.MixedPrecision("16-mixed", "cpu", scaler)
    module, callback = module_of(package, poison=2), callback_of()
    trainer = trainer_of(package, callbacks=[callback], plugins=[precision], max_epochs=1)
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
    package = "lightning.pytorch"
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
        package,
        callbacks=[callback],
        logger=Records(),
        accumulate_grad_batches=2,
        enable_progress_bar=False,
    )
    trainer.fit(module_of(package, micro_batches=2))
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
    package = "lightning.pytorch"
    from lightning.pytorch import strategies

    class DeepSpeedStrategy(strategies.DDPStrategy):
        pass

    cases: dict[str, dict[str, Any]] = {
        "single": {"strategy": strategies.SingleDeviceStrategy("cpu")},
        "deepspeed": {"strategy": DeepSpeedStrategy()},
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
            trainer_of(package, callbacks=callbacks, **options).fit(module_of(package))
        except ValueError as error:
            messages[name] = str(error)
    return messages


def test_what_cannot_work_is_refused_before_training(ranks_of: RanksOf) -> None:
    expected = {
        "single": 'not with SingleDeviceStrategy: use Trainer(strategy="ddp")',
        "deepspeed": "not with DeepSpeedStrategy: see comm_hooks.frameworks.deepspeed",
        "hook": "DDPStrategy(ddp_comm_hook=...) and CompressionCallback each register a hook",
        "static_graph": "static_graph=True: the first backward pass must not be under no_sync()",
        "density": "TopK: density is the fraction that is kept",
        "option": "unknown setting with topk 'densty': did you mean 'density'?",
        "finder": "LearningRateFinder trains before anything is registered",
    }
    for messages in ranks_of(2).run(refusals):
        assert messages.keys() == expected.keys()
        for name, part in expected.items():
            assert part in messages[name]


def test_fsdp_is_refused_with_a_pointer() -> None:
    from comm_hooks.frameworks.lightning import CompressionCallback

    class FSDPStrategy:
        pass

    class OfTrainer:
        strategy = FSDPStrategy()

    with pytest.raises(ValueError, match=r"not with FSDPStrategy: see comm_hooks.frameworks.fsdp"):
        CompressionCallback(TopK(), memory=ErrorFeedback()).setup(OfTrainer(), None, "fit")

"""Rounds, an exchanging optimizer and a hook in every framework, against a bare loop.

Each trains with micro-batches, autocast to bfloat16, clipping and a scheduler, saves and resumes.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from comm_hooks import ErrorFeedback, Exchange, Sign, register
from comm_hooks.checkpoints.rank_files import load_rank_files, save_rank_file
from comm_hooks.frameworks import accelerate as ours_in_accelerate
from comm_hooks.optim import LocalVarianceAdam, low_communication
from tests.frameworks.launching import launch
from tests.frameworks.selection import by_default
from tests.ranks import RanksOf
from tests.test_hook import Net, batch

MICRO_BATCHES, CLIP_NORM, STEPS = 4, 0.1, 5
STOP = 3
"""Steps before the checkpoint: in the middle of a round."""
Weights = dict[str, torch.Tensor]


@dataclass
class Outcome:
    """What a training has come to.

    Attributes:
        own: this rank's weights in training mode.
        evaluated: in evaluation mode.
        saved: in ``state_dict()``, in training mode.
        stats: of what counts.
        lr: the last learning rate.
    """

    own: Weights
    evaluated: Weights
    saved: Weights
    stats: dict[str, float]
    lr: float


def optimizer_of(method: str, net: nn.Module) -> tuple[Any, LambdaLR]:
    named = net.named_parameters()
    optimizer: Any
    if method == "low_communication":
        optimizer = low_communication(named, lr=0.01, bits_per_parameter=1.0)
    elif method == "topk":
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    else:
        optimizer = LocalVarianceAdam(named, Exchange(Sign(), ErrorFeedback()), lr=0.01)
    return optimizer, LambdaLR(optimizer, lambda step: 1 / (1 + step))


def register_with(method: str, optimizer: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of ``register()`` after the model: of a hook, or the optimizer."""
    return (
        (("topk",), {"density": 0.1, "min_numel": 64}) if method == "topk" else ((optimizer,), {})
    )


def weights(net: nn.Module) -> Weights:
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def report(net: nn.Module, state: Any, scheduler: LambdaLR) -> Outcome:
    own = weights(net)
    saved = {n: v.clone() for n, v in net.state_dict().items()}
    evaluated = weights(net.eval())
    net.train()
    assert all(torch.equal(own[n], p) for n, p in net.named_parameters())
    return Outcome(own, evaluated, saved, state.stats(), scheduler.get_last_lr()[0])


def micro_batches(steps: range) -> Iterator[tuple[bool, tuple[torch.Tensor, torch.Tensor]]]:
    """Yield this rank's micro-batches, and whether each is the last of its step."""
    for index in range(MICRO_BATCHES * steps.start, MICRO_BATCHES * steps.stop):
        yield index % MICRO_BATCHES == MICRO_BATCHES - 1, batch(index, dist.get_rank())


def bare(method: str) -> Outcome:
    """Train without any framework, and without DDP."""
    torch.manual_seed(0)
    net = Net()
    optimizer, scheduler = optimizer_of(method, net)
    state = register(net, optimizer)
    for is_last, (inputs, targets) in micro_batches(range(STEPS)):
        with torch.autocast("cpu", torch.bfloat16):
            logits = net(inputs)
        (nn.functional.cross_entropy(logits.float(), targets) / MICRO_BATCHES).backward()
        if is_last:
            nn.utils.clip_grad_norm_(net.parameters(), CLIP_NORM)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    return report(net, state, scheduler)


def with_ddp(method: str, folder: str, steps: range) -> Outcome:
    torch.manual_seed(0)
    net = Net()
    optimizer, scheduler = optimizer_of(method, net)
    ddp = DistributedDataParallel(net)
    own, settings = register_with(method, optimizer)
    state = register(ddp, *own, **settings)
    if steps.start:
        saved = torch.load(f"{folder}/shared.pt", weights_only=True)
        net.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        scheduler.load_state_dict(saved["scheduler"])
        load_rank_files(state, folder)
    for is_last, (inputs, targets) in micro_batches(steps):
        with contextlib.nullcontext() if is_last else ddp.no_sync():
            with torch.autocast("cpu", torch.bfloat16):
                logits = ddp(inputs)
            (nn.functional.cross_entropy(logits.float(), targets) / MICRO_BATCHES).backward()
        if is_last:
            nn.utils.clip_grad_norm_(ddp.parameters(), CLIP_NORM)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    save_rank_file(state, folder)
    if dist.get_rank() == 0:
        parts = {"model": net, "optimizer": optimizer, "scheduler": scheduler}
        torch.save({k: v.state_dict() for k, v in parts.items()}, f"{folder}/shared.pt")
    return report(net, state, scheduler)


def with_accelerate(method: str, folder: str, steps: range) -> Outcome:
    import accelerate

    from tests.frameworks.test_accelerate import launched

    with launched():
        accelerator = accelerate.Accelerator(
            cpu=True,
            gradient_accumulation_steps=MICRO_BATCHES,
            mixed_precision="bf16",
            step_scheduler_with_optimizer=False,
        )
        torch.manual_seed(0)
        net = Net()
        optimizer, scheduler = optimizer_of(method, net)
        model, optimizer, scheduler = accelerator.prepare(net, optimizer, scheduler)
        own, settings = register_with(method, optimizer)
        state = ours_in_accelerate.register(accelerator, model, *own, **settings)
        if steps.start:
            accelerator.load_state(folder)
        for _, (inputs, targets) in micro_batches(steps):
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), CLIP_NORM)
                optimizer.step()
                if accelerator.sync_gradients:
                    scheduler.step()
                optimizer.zero_grad()
        accelerator.save_state(folder)
        return report(net, state, scheduler.scheduler)


def fabric_of(**options: Any) -> Any:
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.fabric.strategies import DDPStrategy

    launch()
    fabric = Fabric(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=DDPStrategy(cluster_environment=TorchElasticEnvironment()),
        **options,
    )
    fabric.launch()
    return fabric


def with_fabric(method: str, folder: str, steps: range) -> Outcome:
    fabric = fabric_of(precision="bf16-mixed")
    torch.manual_seed(0)
    net = Net()
    own, scheduler = optimizer_of(method, net)
    model, optimizer = fabric.setup(net, own)
    exchanged, settings = register_with(method, optimizer)
    state = register(model, *exchanged, **settings)
    content = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    if steps.start:
        fabric.load(f"{folder}/fabric.ckpt", content)
        load_rank_files(state, f"{folder}/ranks")
    for is_last, (inputs, targets) in micro_batches(steps):
        with fabric.no_backward_sync(model, enabled=not is_last):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            fabric.backward(loss / MICRO_BATCHES)
        if is_last:
            fabric.clip_gradients(model, optimizer, max_norm=CLIP_NORM)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    fabric.save(f"{folder}/fabric.ckpt", content)
    save_rank_file(state, f"{folder}/ranks")
    return report(net, state, scheduler)


def with_lightning(method: str, folder: str, steps: range) -> Outcome:
    import lightning.pytorch as pl

    from comm_hooks.frameworks.lightning import CompressionCallback
    from tests.frameworks.test_lightning import trainer_of

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = Net()

        def training_step(self, index: torch.Tensor, batch_idx: int) -> torch.Tensor:
            inputs, targets = batch(int(index), self.global_rank)
            return nn.functional.cross_entropy(self.net(inputs), targets)

        def validation_step(self, index: torch.Tensor, batch_idx: int) -> None:
            checksums = self.all_gather(torch.stack([p.sum() for p in self.parameters()]))
            assert torch.equal(checksums[0], checksums[1]), "all ranks validate one model"
            validated.append(self.global_step)

        def val_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(range(2))

        def configure_optimizers(self) -> Any:
            # Lightning's names begin with "net.", which is all the same to the arithmetic.
            optimizer, self.scheduler = optimizer_of(method, self.net)
            return [optimizer], [{"scheduler": self.scheduler, "interval": "step"}]

        def train_dataloader(self) -> Any:
            # An epoch is what one process trains.
            return torch.utils.data.DataLoader(
                range(MICRO_BATCHES * steps.start, MICRO_BATCHES * steps.stop)
            )

    validated: list[int] = []
    module = Module()
    named, settings = register_with(method, None)
    callback = CompressionCallback(*named, **settings)
    trainer = trainer_of(
        accumulate_grad_batches=MICRO_BATCHES,
        gradient_clip_val=CLIP_NORM,
        precision="bf16-mixed",
        max_epochs=2 if steps.start else 1,
        val_check_interval=MICRO_BATCHES,
        num_sanity_val_steps=1,
        callbacks=[callback],
    )
    trainer.fit(module, ckpt_path=f"{folder}/last.ckpt" if steps.start else None)
    assert {steps.start + 1, steps.stop} <= set(validated)
    trainer.save_checkpoint(f"{folder}/last.ckpt")
    module.train()  # which shows the shared model otherwise
    outcome = report(module, callback.state, module.scheduler)
    for part in (outcome.own, outcome.evaluated, outcome.saved):
        for name in list(part):
            part[name.removeprefix("net.")] = part.pop(name)
    return outcome


WAYS: dict[str, tuple[str, Callable[[str, str, range], Outcome]]] = {
    "ddp": ("torch", with_ddp),
    "accelerate": ("accelerate", with_accelerate),
    "fabric": ("lightning", with_fabric),
    "lightning": ("lightning", with_lightning),
}


def train(name: str, method: str, folder: str, straight: str) -> tuple[Outcome, Outcome, Outcome]:
    """Train five steps; three, and two more in a new start; five by hand."""
    way = WAYS[name][1]
    whole = way(method, straight, range(STEPS))
    way(method, folder, range(STOP))
    dist.barrier()
    resumed = way(method, folder, range(STOP, STEPS))
    if method == "topk":
        return whole, resumed, with_ddp(method, straight, range(STEPS))
    return whole, resumed, bare(method)


@pytest.mark.parametrize(
    ("name", "method"),
    by_default(
        [(name, "low_communication") for name in WAYS],
        [*((name, "topk") for name in WAYS if name != "ddp"), ("ddp", "signs")],
    ),
)
def test_frameworks_take_the_same_steps_as_a_bare_loop(
    ranks_of: RanksOf, tmp_path: Path, name: str, method: str
) -> None:
    pytest.importorskip(WAYS[name][0], reason=f"{name} is not installed")
    folders = [tmp_path / part for part in ("parts", "whole")]
    for folder in folders:
        folder.mkdir()
    outcomes = ranks_of(2).run(train, name, method, *map(str, folders))
    for whole, resumed, expected in outcomes:
        check(whole, expected)
        check_equal(resumed, whole)
        assert whole.stats["steps"] == STEPS
    check_shared(method, [whole for whole, _, _ in outcomes])


def check(run: Outcome, expected: Outcome) -> None:
    """Compare with what took the same steps, but for rounding."""
    for name, value in expected.own.items():
        torch.testing.assert_close(run.own[name], value, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(run.evaluated[name], expected.evaluated[name])
    for count in ("steps", "rounds"):
        assert run.stats.get(count) == expected.stats.get(count)
    assert run.lr == expected.lr


def check_equal(resumed: Outcome, whole: Outcome) -> None:
    """Compare what was interrupted with what was not: bit by bit."""
    for name, value in whole.own.items():
        assert torch.equal(resumed.own[name], value), name
        assert torch.equal(resumed.evaluated[name], whole.evaluated[name]), name
    assert resumed.stats["steps"] == whole.stats["steps"]
    assert resumed.stats.get("rounds") == whole.stats.get("rounds")
    assert resumed.lr == whole.lr


def check_shared(method: str, ranks: list[Outcome]) -> None:
    """What is evaluated and saved is the same on all ranks, whatever each has at hand."""
    for other in ranks[1:]:
        for name, value in ranks[0].evaluated.items():
            assert torch.equal(other.evaluated[name], value)
            assert torch.equal(other.saved[name], value)
            assert torch.equal(ranks[0].saved[name], value)
    differs = any(not torch.equal(ranks[1].own[n], v) for n, v in ranks[0].own.items())
    assert differs == (method == "low_communication")


class Examples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, 32, (8,), generator=generator)
        # The Trainer divides by the number of labels, of which the first predicts nothing.
        return {"input_ids": tokens, "labels": tokens.clone().index_fill_(0, torch.tensor(0), -100)}


def hugging_face(method: str, folder: str) -> list[Outcome]:
    """Return what a Trainer makes of six steps; of four and two more; and a bare loop of them."""
    import transformers

    from comm_hooks.frameworks.transformers import register as register_with_trainer
    from tests.frameworks.test_accelerate import launched

    config = transformers.GPT2Config(
        vocab_size=32, n_positions=8, n_embd=32, n_layer=1, n_head=2, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    batches: list[torch.Tensor] = []

    class Trainer(transformers.Trainer):
        def training_step(self, model: Any, inputs: Any, *args: Any) -> Any:
            batches.append(inputs["input_ids"])
            return super().training_step(model, inputs, *args)

        def log(self, logs: dict[str, float], *args: Any) -> None:
            super().log(logs, *args)
            assert "loss" not in logs or logs["comm_hooks/sent_per_step"] > 0

    def run(steps: int, resume: bool) -> Outcome:
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config)
        optimizer, scheduler = optimizer_of(method, model)
        with launched():
            arguments = transformers.TrainingArguments(
                folder,
                use_cpu=True,
                bf16=True,
                ddp_backend="gloo",
                max_steps=steps,
                per_device_train_batch_size=2,
                gradient_accumulation_steps=2,
                max_grad_norm=CLIP_NORM,
                save_steps=4,
                logging_steps=2,
                report_to=[],
                disable_tqdm=True,
                dataloader_pin_memory=False,
            )
            trainer = Trainer(
                model, arguments, train_dataset=Examples(), optimizers=(optimizer, scheduler)
            )
            named, settings = register_with(method, None)
            callback = register_with_trainer(trainer, *named, **settings)
            trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-4" if resume else None)
        dist.barrier()
        return report(model, callback.state, scheduler)

    whole = run(6, resume=False)
    taken = list(batches)
    resumed = run(6, resume=True)

    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    optimizer, scheduler = optimizer_of(method, model)
    ddp: nn.Module = DistributedDataParallel(model) if method == "topk" else model
    own, options = register_with(method, optimizer)
    state = register(ddp, *own, **options)
    for step in range(6):
        for micro, tokens in enumerate(taken[2 * step : 2 * step + 2]):
            labels = tokens.clone().index_fill_(1, torch.tensor(0), -100)
            if isinstance(ddp, DistributedDataParallel):
                ddp.require_backward_grad_sync = micro == 1
            with torch.autocast("cpu", torch.bfloat16):
                loss = ddp(input_ids=tokens, labels=labels).loss
            (loss / 2).backward()
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    return [whole, resumed, report(model, state, scheduler)]


@pytest.mark.parametrize("method", by_default(["low_communication"], ["topk"]))
def test_the_trainer_of_transformers(ranks_of: RanksOf, tmp_path: Path, method: str) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    outcomes = ranks_of(2).run(hugging_face, method, str(tmp_path))
    for whole, resumed, expected in outcomes:
        check(whole, expected)
        check_equal(resumed, whole)
    check_shared(method, [whole for whole, _, _ in outcomes])


def scaled() -> tuple[Outcome, Outcome]:
    """Accelerate's own scaler, by which it finds out whether a step was taken."""
    import accelerate

    from tests.frameworks.test_accelerate import launched

    with launched():
        accelerator = accelerate.Accelerator(cpu=True)
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        torch.manual_seed(0)
        net = Net()
        rounds, scheduler = optimizer_of("low_communication", net)
        model, optimizer = accelerator.prepare(net, rounds)
        state = ours_in_accelerate.register(accelerator, model, optimizer)
        for step in range(4):
            inputs, targets = batch(step, dist.get_rank())
            accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
            accelerator.scaler.unscale_(rounds)  # as clip_grad_norm_() does with float16
            nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
            optimizer.step()
            optimizer.zero_grad()
            assert not optimizer.step_was_skipped
        run = report(net, state, scheduler)
    torch.manual_seed(0)
    twin = Net()
    expected, scheduler = optimizer_of("low_communication", twin)
    ddp = DistributedDataParallel(twin)
    state = register(ddp, expected)
    for step in range(4):
        inputs, targets = batch(step, dist.get_rank())
        nn.functional.cross_entropy(ddp(inputs), targets).backward()
        nn.utils.clip_grad_norm_(ddp.parameters(), CLIP_NORM)
        expected.step()
        expected.zero_grad()
    return run, report(twin, state, scheduler)


def test_accelerates_scaler_steps_rounds(ranks_of: RanksOf) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    for run, expected in ranks_of(2).run(scaled):
        check(run, expected)


def scaled_by_fabric() -> tuple[bool, float]:
    from lightning.fabric.plugins import MixedPrecision

    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14)
    fabric = fabric_of(plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    net = Net()
    model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.05))
    state = register(model, "topk", density=0.1, min_numel=64)
    for step in range(4):
        optimizer.zero_grad()
        inputs, targets = batch(step, dist.get_rank())
        fabric.backward(nn.functional.cross_entropy(model(inputs), targets))
        optimizer.step()
    return state.loss_scale == scaler.get_scale, state.stats()["residual_norm"]


def test_fabrics_loss_scale_is_found(ranks_of: RanksOf) -> None:
    pytest.importorskip("lightning", reason="Lightning is not installed")
    for is_found, norm in ranks_of(2).run(scaled_by_fabric):
        assert is_found
        assert 0 < norm < 50  # scaled it would be 16384 times as large

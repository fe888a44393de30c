"""Rounds of local work in Accelerate, Fabric, Lightning and transformers, against a bare loop."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR

from comm_hooks import ErrorFeedback, Exchange, TopK, skip_hook
from comm_hooks.frameworks.rank_files import load_rank_files, save_rank_file
from comm_hooks.optim import LocalRounds
from tests.ranks import Ranks
from tests.test_hook import Net, batch

RanksOf = Callable[[int], Ranks]
LOCAL_STEPS, MICRO_BATCHES = 3, 4
Weights = dict[str, torch.Tensor]


def rounds_of(net: nn.Module) -> tuple[LocalRounds, Any]:
    inner = torch.optim.AdamW(net.named_parameters(), lr=0.01)
    exchange = Exchange(TopK(density=0.1), ErrorFeedback(), min_numel=64)
    rounds = LocalRounds(inner, exchange, local_steps=LOCAL_STEPS, fragments=2)
    return rounds, LambdaLR(rounds, lambda step: 1 / (1 + step))


def weights(net: nn.Module) -> Weights:
    return {name: p.detach().clone() for name, p in net.named_parameters()}


def report(net: nn.Module, rounds: LocalRounds) -> tuple[Weights, dict[str, float]]:
    return weights(net), rounds.stats()


def bare(steps: int) -> tuple[Weights, dict[str, float]]:
    """Train without any framework, and without DDP."""
    torch.manual_seed(0)
    net = Net()
    rounds, scheduler = rounds_of(net)
    for step in range(steps):
        rounds.zero_grad()
        for micro in range(MICRO_BATCHES):
            inputs, targets = batch(MICRO_BATCHES * step + micro, dist.get_rank())
            (nn.functional.cross_entropy(net(inputs), targets) / MICRO_BATCHES).backward()
        rounds.step()
        scheduler.step()
    return report(net, rounds)


def check(
    run: tuple[Weights, dict[str, float]], expected: tuple[Weights, dict[str, float]]
) -> None:
    for name, value in expected[0].items():
        torch.testing.assert_close(run[0][name], value, rtol=1e-5, atol=1e-6)
    for count in ("steps", "rounds"):
        assert run[1][count] == expected[1][count]


def with_accelerate(folder: str, steps: range) -> tuple[Weights, dict[str, float]]:
    import accelerate

    from tests.frameworks.test_accelerate import launched

    with launched():
        accelerator = accelerate.Accelerator(
            cpu=True, gradient_accumulation_steps=MICRO_BATCHES, step_scheduler_with_optimizer=False
        )
        torch.manual_seed(0)
        net = Net()
        rounds, scheduler = rounds_of(net)
        model, optimizer, scheduler = accelerator.prepare(net, rounds, scheduler)
        assert optimizer is not rounds
        model.register_comm_hook(None, skip_hook)
        if steps.start:
            accelerator.load_state(folder)
            load_rank_files(rounds, f"{folder}/rounds")
        for index in range(MICRO_BATCHES * steps.start, MICRO_BATCHES * steps.stop):
            inputs, targets = batch(index, dist.get_rank())
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
                optimizer.step()
                if accelerator.sync_gradients:
                    scheduler.step()
                optimizer.zero_grad()
        accelerator.save_state(folder)
        save_rank_file(rounds, f"{folder}/rounds")
        return report(net, rounds)


def with_fabric(folder: str, steps: range) -> tuple[Weights, dict[str, float]]:
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import TorchElasticEnvironment
    from lightning.fabric.strategies import DDPStrategy

    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="1",  # not used: the process group is there
        RANK=rank,
        LOCAL_RANK=rank,
        WORLD_SIZE=world,
        LOCAL_WORLD_SIZE=world,
        TORCHELASTIC_RUN_ID="none",
    )
    fabric = Fabric(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=DDPStrategy(cluster_environment=TorchElasticEnvironment()),
    )
    torch.manual_seed(0)
    net = Net()
    fabric.launch()
    rounds, scheduler = rounds_of(net)
    model, optimizer = fabric.setup(net, rounds)
    model._forward_module.register_comm_hook(None, skip_hook)
    if steps.start:
        state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        fabric.load(f"{folder}/fabric.ckpt", state)
        load_rank_files(rounds, f"{folder}/rounds")
    for index in range(MICRO_BATCHES * steps.start, MICRO_BATCHES * steps.stop):
        inputs, targets = batch(index, dist.get_rank())
        is_last = index % MICRO_BATCHES == MICRO_BATCHES - 1
        with fabric.no_backward_sync(model, enabled=not is_last):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            fabric.backward(loss / MICRO_BATCHES)
        if is_last:
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    fabric.save(f"{folder}/fabric.ckpt", state)
    save_rank_file(rounds, f"{folder}/rounds")
    return report(net, rounds)


def with_lightning(folder: str, steps: range) -> tuple[Weights, dict[str, float]]:
    import lightning.pytorch as pl

    from tests.frameworks.test_lightning import trainer_of

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = Net()

        def training_step(self, index: torch.Tensor, batch_idx: int) -> torch.Tensor:
            inputs, targets = batch(int(index), self.global_rank)
            return nn.functional.cross_entropy(self.net(inputs), targets)

        def configure_optimizers(self) -> Any:
            self.rounds, scheduler = rounds_of(self.net)
            return [self.rounds], [{"scheduler": scheduler, "interval": "step"}]

        def on_fit_start(self) -> None:
            self.trainer.model.register_comm_hook(None, skip_hook)

        def on_train_start(self) -> None:
            if steps.start:
                load_rank_files(self.rounds, f"{folder}/rounds")

        def train_dataloader(self) -> Any:
            # An epoch is what one process trains.
            return torch.utils.data.DataLoader(
                range(MICRO_BATCHES * steps.start, MICRO_BATCHES * steps.stop)
            )

    module = Module()
    trainer = trainer_of(
        "lightning.pytorch",
        accumulate_grad_batches=MICRO_BATCHES,
        max_epochs=2 if steps.start else 1,
    )
    trainer.fit(module, ckpt_path=f"{folder}/last.ckpt" if steps.start else None)
    trainer.save_checkpoint(f"{folder}/last.ckpt")
    save_rank_file(module.rounds, f"{folder}/rounds")
    return report(module.net, module.rounds)


WAYS: dict[str, tuple[str, Callable[[str, range], Any]]] = {
    "accelerate": ("accelerate", with_accelerate),
    "fabric": ("lightning", with_fabric),
    "lightning": ("lightning", with_lightning),
}


def train(name: str, folder: str, straight: str) -> tuple[Any, Any, Any]:
    """Train five steps, three, and two more in a new start; five by hand."""
    way = WAYS[name][1]
    whole = way(straight, range(5))
    way(folder, range(4))  # in the middle of a round
    dist.barrier()
    resumed = way(folder, range(4, 5))
    return whole, resumed, bare(5)


@pytest.mark.parametrize("name", WAYS)
def test_frameworks_take_the_same_steps_as_a_bare_loop(
    ranks_of: RanksOf, tmp_path: Path, name: str
) -> None:
    pytest.importorskip(WAYS[name][0], reason=f"{name} is not installed")
    folders = [str(tmp_path / part) for part in ("parts", "whole")]
    outcomes = ranks_of(2).run(train, name, *folders)
    for whole, resumed, expected in outcomes:
        assert expected[1]["steps"] == 5
        assert expected[1]["rounds"] == 3
        check(whole, expected)
        for key, value in whole[0].items():
            assert torch.equal(resumed[0][key], value), "a resumed run ends like a whole one"
        assert resumed[1]["steps"] == 5
        assert resumed[1]["rounds"] == 3
    # Replicas differ between exchanges: every rank has been compared with a loop of its own.
    first, second = (whole[0]["a.weight"] for whole, _, _ in outcomes)
    assert not torch.equal(first, second)


def synchronized() -> list[tuple[int, float]]:
    """Count exchanges and bytes as the wrapper that setup() returns synchronizes, twice."""
    from lightning.fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    net = Net()
    rounds, _ = rounds_of(net)
    model, optimizer = fabric.setup(net, rounds)
    counts = []
    for step in range(2):
        inputs, targets = batch(step, dist.get_rank())
        fabric.backward(nn.functional.cross_entropy(model(inputs), targets))
        optimizer.step()
    for _ in range(2):
        optimizer.synchronize()
        rounds.synchronize()
        counts.append((rounds.stats()["rounds"], rounds.stats()["bytes_sent"]))
    return counts


def test_a_wrapper_counts_along(ranks_of: RanksOf) -> None:
    pytest.importorskip("lightning", reason="Lightning is not installed")
    for first, second in ranks_of(2).run(synchronized):
        assert first == second
        # One fragment was exchanged in the second step, the other by the wrapper.
        assert first[0] == 2


class Examples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, 32, (8,), generator=generator)
        # The Trainer divides by the number of labels, of which the first predicts nothing.
        return {"input_ids": tokens, "labels": tokens.clone().index_fill_(0, torch.tensor(0), -100)}


def hugging_face(folder: str) -> list[Any]:
    """Return what a Trainer makes of six steps; of three and three more; and its micro-batches."""
    import transformers

    from tests.frameworks.test_accelerate import launched

    config = transformers.GPT2Config(
        vocab_size=32, n_positions=8, n_embd=32, n_layer=1, n_head=2, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip

    def run(steps: int, resume: bool) -> Any:
        torch.manual_seed(0)
        model = transformers.GPT2LMHeadModel(config)
        rounds, scheduler = rounds_of(model)
        batches: list[Any] = []

        class EveryRank(transformers.TrainerCallback):
            def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                trainer.model_wrapped.register_comm_hook(None, skip_hook)
                if resume:
                    load_rank_files(rounds, f"{folder}/checkpoint-4/rounds")

            def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
                save_rank_file(rounds, f"{folder}/checkpoint-{state.global_step}/rounds")

        class Trainer(transformers.Trainer):
            def training_step(self, model: Any, inputs: Any, *args: Any) -> Any:
                batches.append(inputs["input_ids"])
                return super().training_step(model, inputs, *args)

        with launched():
            arguments = transformers.TrainingArguments(
                folder,
                use_cpu=True,
                ddp_backend="gloo",
                max_steps=steps,
                per_device_train_batch_size=2,
                gradient_accumulation_steps=2,
                max_grad_norm=0.0,
                save_steps=4,
                report_to=[],
                disable_tqdm=True,
                dataloader_pin_memory=False,
            )
            trainer = Trainer(
                model,
                arguments,
                train_dataset=Examples(),
                optimizers=(rounds, scheduler),
                callbacks=[EveryRank()],
            )
            trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-4" if resume else None)
        dist.barrier()
        return report(model, rounds), batches

    whole, batches = run(6, resume=False)
    resumed, _ = run(6, resume=True)

    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    rounds, scheduler = rounds_of(model)
    for step in range(6):
        rounds.zero_grad()
        for tokens in batches[2 * step : 2 * step + 2]:
            (model(input_ids=tokens, labels=tokens).loss / 2).backward()
        rounds.step()
        scheduler.step()
    return [whole, resumed, report(model, rounds)]


def test_the_trainer_of_transformers_takes_rounds_for_an_optimizer(
    ranks_of: RanksOf, tmp_path: Path
) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    for whole, resumed, expected in ranks_of(2).run(hugging_face, str(tmp_path)):
        assert expected[1]["steps"] == 6
        check(whole, expected)
        for name, value in whole[0].items():
            assert torch.equal(resumed[0][name], value)
        assert resumed[1]["rounds"] == whole[1]["rounds"]


def scaled(folder: str) -> tuple[Any, Any]:
    """Accelerate's own scaler, by which it finds out whether a step was taken."""
    import accelerate

    from tests.frameworks.test_accelerate import launched

    with launched():
        accelerator = accelerate.Accelerator(cpu=True)
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        torch.manual_seed(0)
        net = Net()
        rounds, _ = rounds_of(net)
        model, optimizer = accelerator.prepare(net, rounds)
        model.register_comm_hook(None, skip_hook)
        for step in range(4):
            inputs, targets = batch(step, dist.get_rank())
            accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
            assert not optimizer.step_was_skipped
    torch.manual_seed(0)
    twin = Net()
    expected, _ = rounds_of(twin)
    ddp = DistributedDataParallel(twin)
    ddp.register_comm_hook(None, skip_hook)
    for step in range(4):
        expected.zero_grad()
        inputs, targets = batch(step, dist.get_rank())
        nn.functional.cross_entropy(ddp(inputs), targets).backward()
        expected.step()
    return report(net, rounds), report(twin, expected)


def test_accelerates_scaler_steps_rounds(ranks_of: RanksOf, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate is not installed")
    for run, expected in ranks_of(2).run(scaled, str(tmp_path)):
        check(run, expected)

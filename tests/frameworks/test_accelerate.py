"""Accelerate and the Trainer of transformers: one line each, checkpoints of all ranks."""

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from comm_hooks import register
from tests.ranks import Ranks
from tests.test_hook import Net, batch

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")

RanksOf = Callable[[int], Ranks]
SETTINGS: dict[str, Any] = {"density": 0.1, "min_numel": 64}


@contextlib.contextmanager
def launched() -> Iterator[None]:
    """Let accelerate believe that a launcher started this rank, whose process group is there."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="1",  # not used
        RANK=rank,
        LOCAL_RANK=rank,
        WORLD_SIZE=world,
        LOCAL_WORLD_SIZE=world,
        ACCELERATE_USE_CPU="true",
    )
    try:
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        PartialState._reset_state()
        GradientState._reset_state()


def ours(caught: list[warnings.WarningMessage]) -> list[str]:
    return [str(w.message) for w in caught if "residuals start" in str(w.message)]


def prepared(compiled: bool = False) -> tuple[Any, Any, Any]:
    plugin = accelerate.utils.TorchDynamoPlugin(backend="aot_eager") if compiled else None
    accelerator = accelerate.Accelerator(
        cpu=True, gradient_accumulation_steps=2, dynamo_plugin=plugin
    )
    torch.manual_seed(0)
    net = Net()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.05))
    return accelerator, model, optimizer


def train(accelerator: Any, model: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        for micro in range(2):
            inputs, targets = batch(10 * step + micro, dist.get_rank())
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()


def weights(accelerator: Any, model: Any) -> dict[str, torch.Tensor]:
    inner = accelerator.unwrap_model(model, keep_torch_compile=False)
    return {name: p.detach().clone() for name, p in inner.named_parameters()}


def accelerated(compiled: bool) -> dict[str, Any]:
    with launched():
        accelerator, model, optimizer = prepared(compiled)
        state = register(model, "topk", **SETTINGS)
        train(accelerator, model, optimizer, range(4))
        after = weights(accelerator, model)
    torch.manual_seed(0)
    twin = Net()
    ddp = DistributedDataParallel(twin)
    register(ddp, "topk", **SETTINGS)
    for step in range(4):
        twin.zero_grad()
        for micro in range(2):
            inputs, targets = batch(10 * step + micro, dist.get_rank())
            ddp.require_backward_grad_sync = micro == 1
            (nn.functional.cross_entropy(ddp(inputs), targets) / 2).backward()
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter -= 0.05 * parameter.grad
    return {
        "error": max(float((p - after[n]).abs().max()) for n, p in twin.named_parameters()),
        "names": sorted(state.state_dict()["memory"]),
        "steps": state.stats()["steps"],
    }


@pytest.mark.parametrize(
    "compiled",
    [
        pytest.param(False, id="plain"),
        pytest.param(True, id="torch.compile", marks=pytest.mark.slow),
    ],
)
def test_a_prepared_model_does_what_ddp_does(ranks_of: RanksOf, compiled: bool) -> None:
    for report in ranks_of(2).run(accelerated, compiled):
        assert report["error"] < 1e-6
        assert report["names"] == [
            "a.weight",
            "b.weight",
            "c.weight",
            "head.weight",
            "unused.weight",
        ]
        assert report["steps"] == 4


def save_and_load(folder: str, lost: bool) -> dict[str, Any]:
    from comm_hooks.frameworks.accelerate import register as register_accelerated

    with launched():
        accelerator, model, optimizer = prepared()
        register_accelerated(accelerator, model, "topk", **SETTINGS)
        # A second model, whose files must not replace the first one's.
        other = accelerator.prepare(Net())
        register_accelerated(accelerator, other, "sign", min_numel=64)
        train(accelerator, model, optimizer, range(3))
        accelerator.save_state(folder)
        accelerator.wait_for_everyone()
        train(accelerator, model, optimizer, range(3, 6))
        uninterrupted = weights(accelerator, model)
    if lost and dist.get_rank() == 0:
        for path in Path(folder, "comm_hooks").iterdir():
            path.unlink()
    dist.barrier()
    with launched(), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accelerator, model, optimizer = prepared()
        state = register_accelerated(accelerator, model, "topk", **SETTINGS)
        accelerator.prepare(Net())
        accelerator.load_state(folder)
        steps = state.stats()["steps"]
        train(accelerator, model, optimizer, range(3, 6))
        after = weights(accelerator, model)
    return {
        "identical": all(torch.equal(p, after[n]) for n, p in uninterrupted.items()),
        "steps": steps,
        "warned": len(ours(caught)),
    }


@pytest.mark.parametrize("lost", [False, True], ids=["with files", "without"])
def test_save_state_and_load_state_keep_every_ranks_residuals(
    ranks_of: RanksOf, tmp_path: Path, lost: bool
) -> None:
    for report in ranks_of(2).run(save_and_load, str(tmp_path), lost):
        assert report["identical"] != lost
        assert report["steps"] == (0 if lost else 3)
        assert report["warned"] == lost
    assert len(list((tmp_path / "comm_hooks_1").iterdir())) == 2


def accelerate_refusals() -> list[Any]:
    from comm_hooks.frameworks.accelerate import register as register_accelerated

    messages: list[Any] = []
    with launched():
        kwargs = accelerate.DistributedDataParallelKwargs(
            comm_hook=accelerate.utils.DDPCommunicationHookType.FP16
        )
        accelerator = accelerate.Accelerator(cpu=True, kwargs_handlers=[kwargs])
        for model in (accelerator.prepare(Net()), Net()):
            try:
                register_accelerated(accelerator, model, "topk")
            except ValueError as error:
                messages.append(str(error))

        class Scaled:
            scaler = torch.amp.GradScaler("cpu")

            def register_save_state_pre_hook(self, hook: object) -> None: ...
            def register_load_state_pre_hook(self, hook: object) -> None: ...
            def load_state(self) -> None: ...

        state = register_accelerated(Scaled(), DistributedDataParallel(Net()), "topk")
        messages.append(state.loss_scale == Scaled.scaler.get_scale)
    return messages


def test_accelerates_own_hook_is_refused_and_its_scaler_found(ranks_of: RanksOf) -> None:
    for taken, unprepared, found in ranks_of(2).run(accelerate_refusals):
        assert taken.startswith("this model has a communication hook already, fp16_compress_hook")
        assert "got Net: wrap the model first (Accelerate," in unprepared
        assert found


class Examples(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, 32, (8,), generator=generator)
        return {"input_ids": tokens, "labels": tokens}


def trainer_of(folder: str, steps: int, **options: Any) -> Any:
    import transformers

    config = transformers.GPT2Config(
        vocab_size=32, n_positions=8, n_embd=32, n_layer=2, n_head=2, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    arguments = transformers.TrainingArguments(
        folder,
        use_cpu=True,
        ddp_backend="gloo",
        max_steps=steps,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        save_steps=3,
        logging_steps=2,
        report_to=[],
        disable_tqdm=True,
        save_strategy="steps",
        dataloader_pin_memory=False,
        **options,
    )
    model = transformers.GPT2LMHeadModel(config)
    return transformers.Trainer(model, arguments, train_dataset=Examples())


def hugging_face(folder: str) -> dict[str, Any]:
    """Train 5 steps; then again from the checkpoint after 3, found by itself and by its path."""
    import transformers

    from comm_hooks.frameworks.transformers import register as register_trainer

    logs: list[dict[str, float]] = []

    class Logs(transformers.TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            collected.append(dict(logs))

    def run(steps: int, **how: Any) -> Any:
        with launched():
            trainer = trainer_of(folder, steps)
            trainer.add_callback(Logs())
            callback = register_trainer(trainer, "topk", density=0.1, block_size=64)
            trainer.train(**how)
            after = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
        dist.barrier()
        return after, callback

    collected = logs
    straight, callback = run(5)
    reports = {
        "steps": callback.state.stats()["steps"],
        "logged": [entry for entry in logs if "loss" in entry],
        "memory": len(callback.state.state_dict()["memory"]),
    }
    collected = []
    for name, how in {
        "last": {"resume_from_checkpoint": True},
        "path": {"resume_from_checkpoint": f"{folder}/checkpoint-3"},
    }.items():
        if name == "last" and dist.get_rank() == 0:
            os.rename(f"{folder}/checkpoint-5", f"{folder}/finished")
        dist.barrier()
        after, callback = run(5, **how)
        reports[name] = all(torch.equal(p, after[n]) for n, p in straight.items())
        reports[f"{name} steps"] = callback.state.stats()["steps"]
        if dist.get_rank() == 0:
            import shutil

            shutil.rmtree(f"{folder}/checkpoint-5")
        dist.barrier()
    return reports


@pytest.mark.slow
def test_the_trainer_of_transformers(ranks_of: RanksOf, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    for report in ranks_of(2).run(hugging_face, str(tmp_path)):
        assert report["steps"] == 5
        assert report["memory"] > 4
        assert report["last"], "a resumed run must end bit for bit like an uninterrupted one"
        assert report["path"]
        assert report["last steps"] == report["path steps"] == 5
        assert len(report["logged"]) == 2
        for entry in report["logged"]:
            assert entry["comm_hooks/sent_per_step"] > 0
    assert len(list((tmp_path / "checkpoint-3" / "comm_hooks").iterdir())) == 2


def trainer_refusals() -> list[str]:
    from comm_hooks.frameworks.transformers import register as register_trainer

    class Other:
        is_fsdp_enabled = is_deepspeed_enabled = False

    messages = []
    for engine in ("fsdp", "deepspeed"):
        trainer = Other()
        setattr(trainer, f"is_{engine}_enabled", True)
        try:
            register_trainer(trainer, "topk")
        except ValueError as error:
            messages.append(str(error))
    return messages


def test_other_engines_of_the_trainer_are_refused() -> None:
    pytest.importorskip("transformers", reason="transformers is not installed")
    fsdp, deepspeed = trainer_refusals()
    assert fsdp == "this Trainer uses FSDP: see comm_hooks.frameworks.fsdp"
    assert deepspeed == "this Trainer uses DeepSpeed: see comm_hooks.frameworks.deepspeed"

"""Accelerate and the Trainer of transformers: one line each, checkpoints of all ranks."""

import contextlib
import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from tests.frameworks.launching import launch
from tests.ranks import RanksOf
from tests.test_hook import Net

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")


@contextlib.contextmanager
def launched() -> Iterator[None]:
    """Let accelerate believe that a launcher started this rank, whose process group is there."""
    from accelerate.state import AcceleratorState, GradientState, PartialState

    launch()
    os.environ["ACCELERATE_USE_CPU"] = "true"
    try:
        yield
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        PartialState._reset_state()
        GradientState._reset_state()


def save_two_models_and_lose_files(folder: str) -> list[str]:
    """Return the warnings of a load without the files of the first model."""
    from comm_hooks.frameworks.accelerate import register as register_accelerated

    with launched(), warnings.catch_warnings(record=True) as caught:
        accelerator = accelerate.Accelerator(cpu=True)
        for compressor in ("topk", "sign"):
            register_accelerated(accelerator, accelerator.prepare(Net()), compressor)
        accelerator.save_state(folder)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(f"{folder}/comm_hooks")
        dist.barrier()
        warnings.simplefilter("always")
        accelerator.load_state(folder)
    return [str(w.message) for w in caught if "residuals start" in str(w.message)]


@pytest.mark.slow
def test_every_model_has_files_and_lost_ones_are_warned_of(
    ranks_of: RanksOf, tmp_path: Path
) -> None:
    for (message,) in ranks_of(2).run(save_two_models_and_lose_files, str(tmp_path)):
        assert message.startswith(f"{tmp_path}/comm_hooks has no files")
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
    assert fsdp == "register() does not support FSDP: use comm_hooks.frameworks.fsdp"
    assert deepspeed == "register() does not support DeepSpeed: use comm_hooks.frameworks.deepspeed"

"""A tiny model and its data, trained by DeepSpeed in a rank process without compiling anything."""

import copy
import hashlib
import logging
import os
import warnings
from argparse import Namespace
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

INPUTS, HIDDEN, OUTPUTS, BATCH = 20, 48, 6, 4

TOPK = {"compressor": "topk", "density": 0.1, "memory": "error_feedback", "min_numel": 64}
IDENTITY = {"compressor": "identity", "memory": "none", "collective": "all_reduce"}


def import_deepspeed() -> ModuleType:
    """Return DeepSpeed, ready for a rank process of the tests on a machine without a compiler."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    os.environ["LOCAL_RANK"] = os.environ["LOCAL_SIZE"] = str(dist.get_rank())
    warnings.simplefilter("ignore", FutureWarning)
    import deepspeed
    import deepspeed.ops
    from deepspeed.accelerator import get_accelerator
    from deepspeed.utils import logger

    # DeepSpeed lets no CPU train in float16, though torch does.
    get_accelerator().is_fp16_supported = lambda: True
    logger.setLevel(logging.ERROR)
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return deepspeed


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(INPUTS, HIDDEN)
        self.b = nn.Linear(HIDDEN, HIDDEN)
        self.c = nn.Linear(HIDDEN, OUTPUTS)
        self.scale = nn.Parameter(torch.ones(3, OUTPUTS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.b(torch.relu(self.a(x))))
        return self.c(hidden) * self.scale.mean(0)


def net(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(1)
    return Net().to(dtype)


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(BATCH, INPUTS, generator=generator) + 0.3 * rank
    return inputs, torch.randint(0, OUTPUTS, (BATCH,), generator=generator)


def loss_of(model: Any, step: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    inputs, targets = batch(step, dist.get_rank())
    return nn.functional.cross_entropy(model(inputs.to(dtype)).float(), targets)


def config(
    stage: int = 0,
    block: Mapping[str, Any] | None = None,
    *,
    dtype: str = "fp32",
    accumulation: int = 1,
    **more: Any,
) -> dict[str, Any]:
    """Return a DeepSpeed configuration with torch's AdamW and buckets of two or three tensors."""
    zero = {"stage": stage, "reduce_bucket_size": 2500, **more.pop("zero_optimization", {})}
    settings: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": BATCH,
        "gradient_accumulation_steps": accumulation,
        # DeepSpeed would clip at 1 without being told to.
        "gradient_clipping": 0.0,
        "steps_per_print": 10**9,
        "optimizer": {
            "type": "AdamW",
            "params": {"lr": 0.01, "weight_decay": 0.01, "torch_adam": True},
        },
        "zero_optimization": zero,
    }
    if dtype != "fp32":
        settings[dtype] = {"enabled": True}
    if block is not None:
        settings["comm_hooks"] = dict(block)
    return {**settings, **more}


def engine_of(settings: dict[str, Any], model: nn.Module | None = None, **more: Any) -> Any:
    """Return an engine made by our initialize, or by DeepSpeed's own without a block.

    DeepSpeed before 0.19 takes settings out of what it is given, hence the copy.
    """
    deepspeed = import_deepspeed()
    from comm_hooks.frameworks.deepspeed import initialize

    make = initialize if "comm_hooks" in settings else deepspeed.initialize
    return make(model=model or net(), config=copy.deepcopy(settings), **more)[0]


def train(
    engine: Any,
    steps: int,
    *,
    first: int = 0,
    loss: Callable[..., torch.Tensor] = loss_of,
) -> None:
    """Take optimizer steps on this rank's own data."""
    accumulation = engine.gradient_accumulation_steps()
    dtype = next(engine.module.parameters()).dtype
    for step in range(first * accumulation, (first + steps) * accumulation):
        engine.backward(loss(engine, step, dtype))
        engine.step()


def train_ddp(ddp: Any, optimizer: torch.optim.Optimizer, steps: int, accumulation: int) -> None:
    """Take the steps of :func:`train` on a DDP model."""
    for step in range(steps):
        optimizer.zero_grad()
        for micro in range(accumulation):
            is_last = micro == accumulation - 1
            with torch.enable_grad() if is_last else ddp.no_sync():
                (loss_of(ddp, step * accumulation + micro) / accumulation).backward()
        optimizer.step()


def parameters(engine: Any) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in engine.module.named_parameters()}


def digest(engine: Any) -> str:
    """Return a hash of all parameters, in which any bit counts."""
    content = hashlib.sha256()
    for name, value in parameters(engine).items():
        content.update(name.encode())
        content.update(value.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return content.hexdigest()


def to_universal(folder: str) -> None:
    """Write the checkpoint ``tag`` of a folder again as ``tag_universal``."""
    import_deepspeed()
    if dist.get_rank() == 0:
        from deepspeed.checkpoint import ds_to_universal

        ds_to_universal.main(
            Namespace(
                input_folder=f"{folder}/tag",
                output_folder=f"{folder}/tag_universal",
                num_extract_workers=1,
                num_merge_workers=1,
                keep_temp_folder=False,
                strict=True,
                inject_missing_state=True,
            )
        )
    dist.barrier()

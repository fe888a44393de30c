"""What tests of optimizers under DeepSpeed share: a small model, runs in an engine and without."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from comm_hooks import skip_hook
from comm_hooks.exchange import Exchange, ExchangeSettings
from comm_hooks.frameworks.deepspeed import initialize
from comm_hooks.optim.registry import find
from tests.frameworks.deepspeed.common import import_deepspeed

Step = list[tuple[torch.Tensor, torch.Tensor]]
STEPS, ACCUMULATION = 10, 2
# Parameters without which a run of STEPS would not see all that the optimizer does.
PARAMS: dict[str, dict[str, Any]] = {
    "OneBitAdam": {"freeze_step": 4, "weight_decay": 0.1},
    "OneBitLamb": {"freeze_step": 4, "weight_decay": 0.1},
    "ZeroOneAdam": {
        "var_freeze_step": 4,
        "var_update_scaler": 2,
        "local_step_scaler": 2,
        "local_step_clipper": 3,
    },
    "CocktailSGD": {"lr": 0.1, "momentum": 0.5},
    "EF21": {"lr": 0.1, "momentum": 0.5},
    "DGC": {"lr": 0.1, "warmup_steps": 4, "clip_norm": 1.0},
    "FetchSGD": {"lr": 0.05, "density": 0.01, "masking": True},
}


def new_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 10)
    )


def minibatches(steps: int = STEPS, accumulation: int = ACCUMULATION) -> list[Step]:
    """Return for each step the minibatches of this rank."""
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    return [
        [
            (
                torch.randn(8, 40, generator=generator),
                torch.randint(10, (8,), generator=generator),
            )
            for _ in range(accumulation)
        ]
        for _ in range(steps)
    ]


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    dtype = next(model.parameters()).dtype
    return nn.functional.cross_entropy(model(inputs.to(dtype)).float(), targets)


def settings(
    name: str,
    params: Mapping[str, Any] | None = None,
    accumulation: int = ACCUMULATION,
    **more: Any,
) -> dict[str, Any]:
    """Return a DeepSpeed configuration; ``comm_hooks`` and all else in ``more``."""
    return {
        "train_micro_batch_size_per_gpu": 8,
        "gradient_accumulation_steps": accumulation,
        "steps_per_print": 10**9,
        "gradient_clipping": 0.0,  # DeepSpeed's default is 1
        "optimizer": {"type": name, "params": dict(params or {})},
        **more,
    }


def new_engine(config: Mapping[str, Any], model: nn.Module | None = None, **given: Any) -> Any:
    import_deepspeed()
    return initialize(model=model or new_model(), config=dict(config), **given)[0]


def train(engine: Any, steps: list[Step]) -> None:
    for step in steps:
        for inputs, targets in step:
            engine.backward(loss_of(engine, inputs, targets))
            engine.step()


def train_alone(
    name: str,
    params: Mapping[str, Any],
    on_step: Callable[[torch.optim.Optimizer, nn.Module, int], None] | None = None,
) -> nn.Module:
    """Train under DDP with the same optimizer of the library, which knows nothing of DeepSpeed."""
    model = new_model()
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, skip_hook)
    entry = find(name)
    exchange = Exchange(ExchangeSettings.from_dict(entry.published or {}))
    optimizer = entry.build(model.named_parameters(), exchange, **params)
    for index, step in enumerate(minibatches()):
        for inputs, targets in step:
            (loss_of(ddp, inputs, targets) / len(step)).backward()
        if on_step:
            on_step(optimizer, model, index)
        optimizer.step()
        optimizer.zero_grad()
    return model


def distance(model: nn.Module, other: nn.Module) -> float:
    """Return the largest difference between two models' parameters."""
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return max(float((a.float() - b.float()).detach().abs().max()) for a, b in pairs)


def values(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in model.parameters()]

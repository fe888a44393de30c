"""The time of clipped sums of per-sample gradients, ours and those of Opacus.

One step: forward pass, backward pass, clipping, sum.  "Plain" is one ordinary backward pass.
Opacus does everything with its own code, clipping included.
"""

import copy
import warnings
from collections.abc import Callable
from functools import partial

import torch
from opacus import GradSampleModule
from opacus.grad_sample import GradSampleModuleFastGradientClipping
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping
from torch import nn
from torch.nn import functional as F

from benchmarks.lab.model import Block
from benchmarks.micro.timing import medians, print_head, times_in_turns
from comm_hooks.optim.private.gradients.per_sample import PerSampleGradients

BATCH_SIZE = 64
MAX_GRAD_NORM = 1.0
PRIVACY = {
    "noise_multiplier": 1.0,
    "max_grad_norm": MAX_GRAD_NORM,
    "expected_batch_size": BATCH_SIZE,
}
_STEPS, _WARM_UP = 60, 5


Batch = tuple[torch.Tensor, torch.Tensor]
Step = Callable[[Batch], object]


class Classifier(nn.Module):
    """A transformer block and a linear layer: what ghost clipping knows."""

    def __init__(self, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.block = Block(width, heads, bias=True)
        self.classify = nn.Linear(width, 10)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.classify(self.block(inputs).mean(1))


MODELS: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "MLP 64-256-256-10": (
        nn.Sequential(
            *(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
        ),
        (64,),
    ),
    "CNN 3-16-32, 32x32": (
        nn.Sequential(
            *(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Flatten(), nn.Linear(32 * 64, 10)),
        ),
        (3, 32, 32),
    ),
    "transformer block, width 64, length 32": (Classifier(), (32, 64)),
}


def loss_function(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def plain(model: nn.Module) -> Step:
    def step(batch: Batch) -> None:
        loss_function(model, batch).backward()
        model.zero_grad()

    return step


def ours(model: nn.Module) -> Step:
    gradients = PerSampleGradients(model, loss_function, MAX_GRAD_NORM)

    def step(batch: Batch) -> None:
        gradients.backward(batch)
        gradients.take()

    return step


def opacus(model: nn.Module, *, force_functorch: bool = False) -> Step:
    module = GradSampleModule(model, force_functorch=force_functorch)
    optimizer = DPOptimizer(torch.optim.SGD(module.parameters()), **PRIVACY)

    def step(batch: Batch) -> None:
        loss_function(module, batch).backward()
        optimizer.clip_and_accumulate()
        optimizer.zero_grad()

    return step


def ghost(model: nn.Module) -> Step:
    module = GradSampleModuleFastGradientClipping(model, max_grad_norm=MAX_GRAD_NORM)
    optimizer = DPOptimizerFastGradientClipping(torch.optim.SGD(module.parameters()), **PRIVACY)
    criterion = DPLossFastGradientClipping(module, optimizer, nn.CrossEntropyLoss())

    def step(batch: Batch) -> None:
        criterion(module(batch[0]), batch[1]).backward()
        optimizer.accumulate()
        optimizer.zero_grad()

    return step


METHODS: dict[str, Callable[[nn.Module], Step]] = {
    "plain": plain,
    "ours": ours,
    "Opacus, hooks": opacus,
    "Opacus, ghost": ghost,
    "Opacus, functorch": partial(opacus, force_functorch=True),
}


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    warnings.filterwarnings("ignore", message="Optimal order is the largest alpha")
    print(
        f"Milliseconds per step of {BATCH_SIZE} samples, median of {_STEPS}, one thread; ", end=""
    )
    print("in brackets, ours over it.\n")
    print_head("model", *METHODS)
    for name, (model, shape) in MODELS.items():
        batch = (torch.randn(BATCH_SIZE, *shape), torch.randint(10, (BATCH_SIZE,)))
        steps = {m: partial(make(copy.deepcopy(model)), batch) for m, make in METHODS.items()}
        found = medians(times_in_turns(steps, _STEPS, warm_up=_WARM_UP))
        cells = [f"{value:.1f} ({found['ours'] / value:.2f})" for value in found.values()]
        print(f"| {name} | {' | '.join(cells)} |")

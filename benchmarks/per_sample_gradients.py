"""How long clipped sums of per-sample gradients take, ours and those of Opacus, as a table.

    python benchmarks/per_sample_gradients.py               # a minute on one core; needs Opacus
    python benchmarks/per_sample_gradients.py --threads 2
    python benchmarks/per_sample_gradients.py --clock cpu   # where others use the machine, too

One step: forward pass, backward pass, clipping, sum.  The methods take turns, step by step, so that
whatever else happens on the machine happens to all of them.  "Plain" is one ordinary backward pass.
Opacus does everything with its own code, clipping included.
"""

import argparse
import copy
import statistics
import time
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
from comm_hooks.optim.private.gradients.per_sample import PerSampleGradients

BATCH_SIZE = 64
MAX_GRAD_NORM = 1.0
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


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
    optimizer = DPOptimizer(
        torch.optim.SGD(module.parameters(), lr=0.1),
        noise_multiplier=1.0,
        max_grad_norm=MAX_GRAD_NORM,
        expected_batch_size=BATCH_SIZE,
    )

    def step(batch: Batch) -> None:
        loss_function(module, batch).backward()
        optimizer.clip_and_accumulate()
        optimizer.zero_grad()

    return step


def ghost(model: nn.Module) -> Step:
    module = GradSampleModuleFastGradientClipping(model, max_grad_norm=MAX_GRAD_NORM)
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.SGD(module.parameters(), lr=0.1),
        noise_multiplier=1.0,
        max_grad_norm=MAX_GRAD_NORM,
        expected_batch_size=BATCH_SIZE,
    )
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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--clock", choices=sorted(CLOCKS), default="wall")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = CLOCKS[options.clock]
    warnings.filterwarnings("ignore", message="Full backward hook is firing")
    warnings.filterwarnings("ignore", message="Optimal order is the largest alpha")

    print(f"Milliseconds per step of {BATCH_SIZE} samples, median of {options.steps}, ", end="")
    print(f"{options.clock} clock, {options.threads} thread(s); in brackets, ours over it.\n")
    print(f"| model | {' | '.join(METHODS)} |")
    print(f"|---|{'---|' * len(METHODS)}")
    for name, (model, shape) in MODELS.items():
        batch = (torch.randn(BATCH_SIZE, *shape), torch.randint(10, (BATCH_SIZE,)))
        steps = {method: make(copy.deepcopy(model)) for method, make in METHODS.items()}
        times: dict[str, list[float]] = {method: [] for method in METHODS}
        for turn in range(-5, options.steps):
            for method, step in steps.items():
                start = clock()
                step(batch)
                if turn >= 0:
                    times[method].append((clock() - start) * 1e3)
        medians = {method: statistics.median(values) for method, values in times.items()}
        cells = [f"{value:.1f} ({medians['ours'] / value:.2f})" for value in medians.values()]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()

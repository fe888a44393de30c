"""What ranks do on a GPU, and then on the CPU: they train a model of two buckets."""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from comm_hooks import PayloadError, register

# The same process can train on either.
BACKEND = "cpu:gloo,cuda:nccl"
WIDTH = 384
# Two buckets, since a GPU's queue holds a thousand kernels: the CPU waits when it is full.
BUCKET_MB = 1.3

# Returns what takes the steps, when it has registered what exchanges.
Setup = Callable[[DistributedDataParallel], Optimizer]


def fresh(device: str) -> DistributedDataParallel:
    torch.manual_seed(0)
    layers = [layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(WIDTH, 10)).to(device)
    return DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB)


def batch(step: int, device: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    inputs = torch.randn(32, WIDTH, generator=generator)
    return inputs.to(device), torch.randint(0, 10, (32,), generator=generator).to(device)


def backward(model: nn.Module, step: int, device: str) -> None:
    inputs, targets = batch(step, device)
    nn.functional.cross_entropy(model(inputs), targets).backward()


def weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).cpu()


def train(setup: Setup, device: str, steps: int) -> Tensor:
    """Return all weights after some steps."""
    model = fresh(device)
    optimizer = setup(model)
    for step in range(steps):
        optimizer.zero_grad()
        backward(model, step, device)
        optimizer.step()
    return weights(model)


def train_on_both(setup: Setup, steps: int = 4) -> dict[str, Any]:
    """Return what a GPU and the CPU came to, and from where."""
    return {
        "start": weights(fresh("cpu")),
        "cuda": train(setup, "cuda", steps),
        "cpu": train(setup, "cpu", steps),
    }


def time_behind_a_busy_gpu(setup: Setup, seconds: float) -> tuple[float, bool]:
    """Let a backward pass follow on much that a GPU has yet to do.

    Returns how long the CPU took for it, in seconds, and whether the GPU was still at that when the
    CPU had queued all of the pass.
    """
    model = fresh("cuda")
    setup(model)
    for step in range(4):  # the first ones agree on settings, and load kernels
        backward(model, step, "cuda")
    inputs, targets = batch(0, "cuda")
    loss = nn.functional.cross_entropy(model(inputs), targets)
    cycles = int(seconds * 1000 * torch.cuda.get_device_properties(0).clock_rate)
    for _ in range(3):  # in the first, more memory is taken than where nobody is behind
        torch.cuda.synchronize()
        dist.barrier(device_ids=[0])
        torch.cuda.synchronize()
        torch.cuda._sleep(cycles)
        done = torch.cuda.Event()
        done.record()
        begin = time.perf_counter()
        loss.backward()
        took, is_busy = time.perf_counter() - begin, not done.query()
        loss = nn.functional.cross_entropy(model(inputs), targets)
    torch.cuda.synchronize()
    return took, is_busy


def resumed(setup: Setup, hook_options: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the weights of one run, and of one that goes on from what was saved half-way."""
    ends = []
    for is_interrupted in (False, True):
        model = fresh("cuda")
        state, optimizer = register(model, **hook_options), setup(model)
        for step in range(6):
            if is_interrupted and step == 3:
                saved = model.state_dict(), state.state_dict(), optimizer.state_dict()
                model = fresh("cuda")
                state, optimizer = register(model, **hook_options), setup(model)
                for holder, values in zip((model, state, optimizer), saved, strict=True):
                    holder.load_state_dict(values)
            optimizer.zero_grad()
            backward(model, step, "cuda")
            optimizer.step()
        ends.append(weights(model))
    return ends[0], ends[1]


def half_precision(hook_options: dict[str, Any]) -> tuple[Tensor, float]:
    """Train with a loss scale that overflows at first; return the weights, and where it ended."""
    model = fresh("cuda")
    register(model, **hook_options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**24)
    for step in range(12):
        optimizer.zero_grad()
        inputs, targets = batch(step, "cuda")
        with torch.autocast("cuda", torch.float16):
            loss = nn.functional.cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    return weights(model), scaler.get_scale()


def one_rank_starts_again(hook_options: dict[str, Any]) -> str:
    """Return what rank 1's loading a state by itself is answered with."""
    model = fresh("cuda")
    state = register(model, **hook_options)
    for step in range(6):
        if step == 3 and dist.get_rank() == 1:
            state.load_state_dict(state.state_dict())
        try:
            backward(model, step, "cuda")
        except PayloadError as error:
            return f"step {step}: {error}"
    return "nothing"

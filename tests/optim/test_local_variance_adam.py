"""LocalVarianceAdam against an independent NumPy reference, and the property that it is for."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from comm_hooks import ErrorFeedback, Exchange, Identity, Sign, TopK
from comm_hooks.collectives import Simulated
from comm_hooks.compressors import Compressor
from comm_hooks.optim.local_variance_adam import LocalVarianceAdam
from tests.optim.references import check
from tests.optim.rounds.problem import SHAPES, largest, signs
from tests.optim.scenarios import RanksOf, rarely

STEPS = 30
# With a small eps all normalized gradients of the first step are 1: top-k would be a draw.
HYPER = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 0.1, "weight_decay": 0.1}


def start(name: str) -> np.ndarray:
    return np.random.default_rng(len(name)).normal(size=SHAPES[name])


def gradient(name: str, step: int, rank: int) -> np.ndarray:
    """A signal that all ranks share, noise of their own, and a size that decays."""
    signal = np.random.default_rng(len(name) + 77).normal(size=SHAPES[name])
    noise = np.random.default_rng([len(name), step, rank]).normal(size=SHAPES[name])
    return (signal + noise) * 0.97**step


def train(compressor: Compressor) -> dict[str, np.ndarray]:
    parameters = {n: nn.Parameter(torch.from_numpy(start(n)).float()) for n in SHAPES}
    memory = None if isinstance(compressor, Identity) else ErrorFeedback()
    exchange = Exchange(compressor, memory, "all_gather", min_numel=16)
    optimizer = LocalVarianceAdam(parameters.items(), exchange, **HYPER)
    for step in range(STEPS):
        for name, parameter in parameters.items():
            parameter.grad = torch.from_numpy(gradient(name, step, dist.get_rank())).float()
        if step == 7 and dist.get_rank() == 0:
            before = parameters["bias"].detach().clone()
            second = optimizer.state[parameters["weight"]]["exp_avg_sq"].clone()
        if step == 7:
            # An overflow on one rank: all ranks skip, nothing is remembered, and try again.
            good = parameters["weight"].grad
            assert good is not None
            if dist.get_rank() == dist.get_world_size() - 1:
                parameters["weight"].grad = good * float("inf")
            optimizer.step()
            parameters["weight"].grad = good
        if step == 7 and dist.get_rank() == 0:
            assert torch.equal(before, parameters["bias"])
            assert torch.equal(second, optimizer.state[parameters["weight"]]["exp_avg_sq"])
        optimizer.step()
    return {name: p.detach().numpy() for name, p in parameters.items()}


def reference(compress: Callable[[np.ndarray], np.ndarray], ranks: int) -> dict[str, np.ndarray]:
    beta1, beta2 = HYPER["betas"]
    c = (1 - beta1) / (1 + beta1)
    x = {name: start(name) for name in SHAPES}
    n = {name: np.zeros(shape) for name, shape in SHAPES.items()}
    v = {name: [np.zeros(shape) for _ in range(ranks)] for name, shape in SHAPES.items()}
    errors = {name: [np.zeros(shape) for _ in range(ranks)] for name, shape in SHAPES.items()}
    q = 0.0
    for t in range(1, STEPS + 1):
        for name in SHAPES:
            sent = []
            for rank in range(ranks):
                g = gradient(name, t - 1, rank)
                v[name][rank] = beta2 * v[name][rank] + (1 - beta2) * g**2
                u = g / (np.sqrt(v[name][rank] / (1 - beta2**t)) + HYPER["eps"])
                own = beta1 * n[name] + (1 - beta1) * u
                if name == "weight":
                    own = own + errors[name][rank]
                    errors[name][rank] = own - compress(own)
                    own = compress(own)
                sent.append(own)
            n[name] = np.mean(sent, axis=0)
        every = np.concatenate([n[name].ravel() for name in SHAPES]) / (1 - beta1**t)
        q = beta2 * q + (1 - beta2) * np.square(every).mean()
        length_sq = (ranks - c) / (1 - c + (ranks - 1) * q / (1 - beta2**t))
        length = np.sqrt(np.clip(length_sq, 1, ranks))
        for name in SHAPES:
            x[name] = x[name] * (1 - HYPER["lr"] * HYPER["weight_decay"])
            x[name] = x[name] - HYPER["lr"] * length * n[name] / (1 - beta1**t)
    return x


@pytest.mark.parametrize("ranks", [2, *rarely(1, 4)])
@pytest.mark.parametrize(
    ("compressor", "compress"),
    [
        (Identity(), lambda x: x),
        (Sign(block_size=64), signs),
        (TopK(density=0.05, value_bits=32), largest),
    ],
    ids=["identity", "sign", "topk"],
)
@pytest.mark.filterwarnings("ignore:world size is 1")
def test_matches_the_reference(
    ranks_of: RanksOf,
    compressor: Compressor,
    compress: Callable[[np.ndarray], np.ndarray],
    ranks: int,
) -> None:
    replicas = ranks_of(ranks).run(train, compressor)
    expected = reference(compress, ranks)
    # Squared norms are rounded to 8 bits.
    check(replicas, expected, atol=1e-4)


@pytest.mark.filterwarnings("ignore:world size is 1")
def test_parameters_gradients_and_state_may_lie_in_memory_as_they_like() -> None:
    results = _in_other_orders()
    for result in results[1:]:
        np.testing.assert_array_equal(result, results[0])


def _in_other_orders() -> list[np.ndarray]:
    generator = torch.Generator().manual_seed(0)
    start, *gradients = torch.randn(4, 8, 4, 3, 3, generator=generator)
    results = []
    for of_parameter, of_gradient, of_state in (
        (torch.contiguous_format, torch.contiguous_format, torch.contiguous_format),
        (torch.channels_last, torch.channels_last, torch.channels_last),
        (torch.channels_last, torch.contiguous_format, torch.channels_last),
        (torch.contiguous_format, torch.channels_last, torch.channels_last),
    ):
        parameter = nn.Parameter(start.clone().contiguous(memory_format=of_parameter))
        exchange = Exchange(Identity(), transport=Simulated(1)[0])
        optimizer = LocalVarianceAdam([parameter], exchange, weight_decay=0.1)
        for own in gradients:
            parameter.grad = own.clone().contiguous(memory_format=of_gradient)
            optimizer.step()
            # torch.equal() compares elements, wherever they are.
            assert torch.equal(parameter.grad, own), "gradients stay as they are"
            state = optimizer.state[parameter]
            state["exp_avg_sq"] = state["exp_avg_sq"].contiguous(memory_format=of_state)
        results.append(parameter.detach().contiguous().numpy().copy())
    return results


@pytest.mark.filterwarnings("ignore:world size is 1")
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_narrow_parameters_take_the_same_steps(weight_decay: float) -> None:
    ends = []
    for dtype in (torch.float32, torch.bfloat16):
        parameter = nn.Parameter(torch.full((8, 8), 2.0, dtype=dtype))
        exchange = Exchange(Identity(), transport=Simulated(1)[0])
        optimizer = LocalVarianceAdam([parameter], exchange, lr=0.1, weight_decay=weight_decay)
        for _ in range(3):
            parameter.grad = torch.full_like(parameter, 0.5)
            optimizer.step()
        ends.append(parameter.detach().float())
    torch.testing.assert_close(ends[0], ends[1], rtol=0.02, atol=0)
    assert (ends[0] < 1.8).all()


def lengths(signal: float) -> float:
    """Return the length of steps late in a run over that of Adam's on the mean gradient."""
    world, generator = dist.get_world_size(), torch.Generator().manual_seed(0)
    mine, theirs = (nn.Parameter(torch.zeros(64, 64)) for _ in range(2))
    optimizer = LocalVarianceAdam([mine], Exchange(Identity()), lr=1.0, betas=(0.8, 0.95))
    adam = torch.optim.AdamW([theirs], lr=1.0, betas=(0.8, 0.95), weight_decay=0.0)
    moved = torch.zeros(2)
    for step in range(100):
        before = mine.detach().clone(), theirs.detach().clone()
        gradients = signal + torch.randn(world, 64, 64, generator=generator)
        mine.grad, theirs.grad = gradients[dist.get_rank()], gradients.mean(0)
        optimizer.step()
        adam.step()
        if step >= 40:
            moved += torch.stack([(mine - before[0]).norm(), (theirs - before[1]).norm()]).detach()
    return float(moved[0] / moved[1])


@pytest.mark.slow
@pytest.mark.parametrize("signal", [0.0, 0.3, 3.0])
def test_steps_are_as_long_as_those_of_adam_on_the_mean_gradient(
    ranks_of: RanksOf, signal: float
) -> None:
    """With noise of its own on each rank, whatever the noise is beside the signal."""
    for ratio in ranks_of(4).run(lengths, signal):
        assert ratio == pytest.approx(1, abs=0.06)

"""DPMicroAdam against NumPy and AdamW, alike on all ranks, and what it keeps, in bytes."""

import hashlib
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from comm_hooks import TopK
from comm_hooks.compressors import Quantize
from comm_hooks.optim.private.optimizers import dp_micro_adam
from comm_hooks.optim.private.optimizers.dp_micro_adam import DPMicroAdam
from comm_hooks.optim.published.sparse_window import SparseWindow
from comm_hooks.randomness import fork
from tests.optim.replicas import LR_DECAY, SHAPES, draw, fresh, largest_of_blocks, start

# All of these parameters are of two dimensions but the bias; "third" has several blocks for Q.
STEPS, WINDOW, DENSITY, BLOCK, MIN_NUMEL = 36, 4, 0.05, 64, 16
HYPER: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
SPARSE: dict[str, Any] = {"density": DENSITY, "block_size": BLOCK, "min_numel": MIN_NUMEL}
RESIDUAL = Quantize(bits=4)


def make(params: Any, **options: Any) -> DPMicroAdam:
    return DPMicroAdam(params, **{**HYPER, **SPARSE, "window": WINDOW, **options})


def noised(name: str, step: int) -> np.ndarray:
    """A signal, and noise that is much larger."""
    return 0.3 * draw(name, 0) + draw(name, 1, step)


def advance(
    parameters: dict[str, nn.Parameter], optimizer: torch.optim.Optimizer, steps: Sequence[int]
) -> None:
    for step in steps:
        for name, parameter in parameters.items():
            parameter.grad = torch.from_numpy(noised(name, step)).to(parameter.dtype)
        optimizer.step()


# Algorithm 1, in float64 and without any of the library.


def key_of(step: int, place: int) -> int:
    return step * len(SHAPES) + place


def quantize(x: np.ndarray, step: int, place: int) -> np.ndarray:
    """Q^-1(Q(x)), in blocks of 256, rounded by draws of this parameter and step."""
    (seed,) = fork([key_of(step, place)], 0)
    xi = torch.rand(x.size, generator=torch.Generator().manual_seed(int(seed))).double().numpy()
    rounded = np.empty_like(x)
    for first in range(0, x.size, 256):
        block = slice(first, first + 256)
        low, high = x[block].min(), x[block].max()
        unit = (high - low) / 15
        rounded[block] = np.floor((x[block] - low) / unit + xi[block]) * unit + low
    return rounded


def algorithm_1(window: int, bias_correction: str) -> dict[str, np.ndarray]:
    results = {}
    for place, name in enumerate(SHAPES):
        theta = start(name).ravel()
        is_dense = len(SHAPES[name]) == 1
        e = np.zeros_like(theta)
        rows: deque[np.ndarray] = deque(maxlen=None if is_dense else window)
        for step in range(STEPS):
            a = noised(name, step).ravel() + e
            kept = a if is_dense else largest_of_blocks(a, DENSITY, BLOCK)
            e = 0 * a if is_dense else quantize(a - kept, step, place)
            rows.appendleft(kept)
            averages = []
            for beta, power in zip(HYPER["betas"], (1, 2), strict=True):
                weights = [beta**age for age in range(len(rows))]
                total = sum(w * row**power for w, row in zip(weights, rows, strict=True))
                # Algorithm 2, AdamStats: (1 - beta) z / (1 - beta^t)
                published = (1 - beta) * total / (1 - beta ** (step + 1))
                averages.append(total / sum(weights) if bias_correction == "window" else published)
            m, v = averages
            lr = HYPER["lr"] * LR_DECAY**step
            theta = theta * (1 - lr * HYPER["weight_decay"])
            theta = theta - lr * m / (np.sqrt(v) + HYPER["eps"])
        results[name] = theta.reshape(SHAPES[name])
    return results


@pytest.mark.parametrize("bias_correction", ["window", "published"])
@pytest.mark.parametrize("window", [1, WINDOW])
def test_matches_algorithm_1(
    monkeypatch: pytest.MonkeyPatch, window: int, bias_correction: str
) -> None:
    monkeypatch.setattr(
        dp_micro_adam,
        "derive_keys",
        lambda _, step, places: [key_of(step, int(place)) for place in places],
    )
    parameters = fresh()
    optimizer = make(
        parameters.items(), window=window, value_bits=32, bias_correction=bias_correction
    )
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, LR_DECAY)
    for step in range(STEPS):
        advance(parameters, optimizer, [step])
        schedule.step()
    for name, expected in algorithm_1(window, bias_correction).items():
        # 36 float32 steps of size 0.01
        np.testing.assert_allclose(parameters[name].detach().numpy(), expected, atol=2e-5)


def test_a_dense_and_endless_window_is_adamw() -> None:
    ours, theirs = fresh(), fresh()
    optimizer = make(ours.items(), density=1.0, window=STEPS, value_bits=32)
    adamw = torch.optim.AdamW(theirs.values(), **HYPER)
    for each, parameters in ((optimizer, ours), (adamw, theirs)):
        advance(parameters, each, range(STEPS))
    for name in SHAPES:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=2e-6)


def step_lengths(count: int, **options: Any) -> list[float]:
    """How far each step goes with a gradient that stays the same, in learning rates."""
    x = nn.Parameter(torch.zeros(2, 2))
    optimizer = DPMicroAdam([x], lr=1.0, density=1.0, min_numel=1, value_bits=32, **options)
    lengths = []
    for _ in range(count):
        before = x.detach().clone()
        x.grad = torch.full_like(x, 3.0)
        optimizer.step()
        lengths.append(float((before - x.detach()).mean()))
        x.data.zero_()
    return lengths


@pytest.mark.slow  # 8,000 steps
def test_published_steps_outgrow_ours() -> None:
    """What a learning rate of the authors must be multiplied by depends on the step."""
    ratios = step_lengths(8000, bias_correction="published")
    beta1, beta2 = 0.9, 0.999
    full = (1 - beta1**10) / (1 - beta2**10) ** 0.5
    t = np.arange(1, 8001)
    expected = np.where(t <= 10, 1, full * (1 - beta2**t) ** 0.5 / (1 - beta1**t))
    np.testing.assert_allclose(ratios, expected, rtol=1e-4)
    # The figures of the docstring.
    figures = [round(ratios[step - 1], 2) for step in (10, 100, 400, 1000, 8000)]
    assert figures == [1.0, 2.01, 3.75, 5.19, 6.53]


# The residual.


def decode_residual(optimizer: DPMicroAdam, x: nn.Parameter) -> torch.Tensor:
    return RESIDUAL.decompress(optimizer.state[x]["residual"], x.numel(), key=0)


@pytest.mark.parametrize("value_bits", [4, 16, 32])
def test_the_residual_is_what_was_left_rounded_without_bias(value_bits: int) -> None:
    torch.manual_seed(0)
    x = nn.Parameter(torch.zeros(256, 256))
    options = {"density": 0.01, "block_size": 4096, "min_numel": 1, "window": 3}
    optimizer = make([x], **{**options, "value_bits": value_bits})
    code = SparseWindow.of(TopK(0.01, 4096, value_bits), x.numel(), 1)
    fractions, errors = [], []
    for step in range(4):
        x.grad = torch.randn(256, 256)
        a = x.grad.flatten()
        if step:
            a = a + decode_residual(optimizer, x)
        optimizer.step()
        places, values = code.decode(optimizer.state[x]["window"][step % 3][None])
        kept = torch.zeros_like(a).scatter_add_(0, places[0], values[0])
        assert int(kept.count_nonzero()) == 16 * 41
        for block, chosen in zip(a.view(16, -1), kept.view(16, -1), strict=True):
            largest = set(block.abs().topk(41).indices.tolist())
            assert set(chosen.nonzero().flatten().tolist()) == largest
        left = (a - kept).view(-1, 256)
        low, high = left.aminmax(dim=1, keepdim=True)
        level = (left - low) / ((high - low) / 15)
        error = (decode_residual(optimizer, x).view(-1, 256) - low) / ((high - low) / 15) - level
        assert float(error.abs().max()) < 1 + 1e-4
        fractions.append((level % 1).flatten())
        errors.append(error.flatten())
    fraction, error = torch.cat(fractions), torch.cat(errors)
    # To the nearest, the error in each of these would be -1/8, -3/8, 3/8, 1/8.
    for first in (0.0, 0.25, 0.5, 0.75):
        own = error[(fraction >= first) & (fraction < first + 0.25)]
        assert abs(float(own.mean())) < 5 * 0.5 / len(own) ** 0.5


# Memory, ranks, checkpoints.


def nbytes(state: Any) -> int:
    if isinstance(state, torch.Tensor):
        return state.nbytes
    return sum(map(nbytes, state.values())) if isinstance(state, dict) else 0


@pytest.mark.parametrize(("value_bits", "most"), [(4, 0.73), (16, 0.87)])
def test_takes_less_than_a_byte_per_parameter(value_bits: int, most: float) -> None:
    model = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(256, 4, 1024), 4, enable_nested_tensor=False
    )
    optimizer = DPMicroAdam(model.named_parameters(), value_bits=value_bits)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    # As long as min_numel, but of one dimension.
    assert "exp_avg" in optimizer.state[model.layers[0].linear1.bias]
    kept = nbytes(optimizer.state_dict()["state"])
    count = sum(p.numel() for p in model.parameters())
    # Every tensor that the optimizer reaches is in there: nothing stays behind.
    hidden = [v for v in vars(optimizer).values() if isinstance(v, torch.Tensor)]
    assert not hidden
    assert 0.6 < kept / count <= most


def digest_after_training(rank: int) -> str:
    """Return a digest of parameters and state, from gradients that all ranks share."""
    torch.manual_seed(rank)
    np.random.seed(rank)
    parameters = fresh()
    optimizer = make(parameters.items(), value_bits=4)
    advance(parameters, optimizer, range(8))
    everything = hashlib.sha256()
    for parameter in parameters.values():
        everything.update(parameter.detach().numpy().tobytes())
        for key, value in sorted(optimizer.state[parameter].items()):
            everything.update(key.encode() + value.numpy().tobytes())
    return everything.hexdigest()


def test_ranks_keep_the_same_bit_for_bit() -> None:
    assert digest_after_training(0) == digest_after_training(1)


def test_a_checkpoint_brings_its_window_along() -> None:
    parameters = fresh()
    optimizer = make(parameters.items())
    advance(parameters, optimizer, range(3))
    other = make(parameters.items(), window=WINDOW + 1, density=0.5)
    other.load_state_dict(optimizer.state_dict())
    advance(parameters, other, range(3, 6))
    assert other.param_groups[0]["window"] == WINDOW


def test_states_of_others_are_refused() -> None:
    parameters = fresh()
    adam = torch.optim.AdamW(parameters.values())
    advance(parameters, adam, range(1))
    optimizer = make(parameters.values())
    with pytest.raises(ValueError, match=r"^DPMicroAdam: the state has no density, window, .* by"):
        optimizer.load_state_dict(adam.state_dict())
    assert not optimizer.state
    assert optimizer.param_groups[0]["density"] == DENSITY


# Everything else.


def test_groups_have_their_own_hyperparameters() -> None:
    parameters = fresh()
    (first, one), *rest = parameters.items()
    groups = [
        {"params": [(first, one)], "lr": 0.0, "weight_decay": 0.0},
        {"params": rest[:-1], "density": 1.0, "window": 2},
        {"params": rest[-1:], "min_numel": 10_000},
    ]
    optimizer = make(groups)
    before = one.detach().clone()
    advance(parameters, optimizer, range(3))
    assert torch.equal(before, one)
    assert len(optimizer.state[parameters["other"]]["window"]) == 2
    assert set(optimizer.state[parameters["third"]]) == {"step", "exp_avg", "exp_avg_sq"}


def test_parameters_may_be_left_out_of_steps() -> None:
    """Each counts its own steps, also where others of its length are ahead."""
    shape = (8, 16)
    xs = [nn.Parameter(torch.zeros(shape)) for _ in range(2)]
    optimizer = make(xs, weight_decay=0.0, density=1.0, value_bits=32)
    gradients = torch.randn(6, *shape, generator=torch.Generator().manual_seed(0))
    for t in range(7):
        xs[0].grad = gradients[t] if t < 6 else None
        xs[1].grad = gradients[t - 1] if t else None
        optimizer.step()
    assert float(xs[0].detach().abs().min()) > 0
    torch.testing.assert_close(xs[0], xs[1])


def test_batches_do_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    for batch in (1, 1 << 24):
        monkeypatch.setattr(dp_micro_adam, "BATCH", batch)
        xs = [nn.Parameter(torch.zeros(16, 20)) for _ in range(5)]
        optimizer = make(xs)
        generator = torch.Generator().manual_seed(0)
        for _ in range(6):
            for x in xs:
                x.grad = torch.randn(16, 20, generator=generator)
            optimizer.step()
        results.append(xs)
    for one, other in zip(*results, strict=True):
        assert torch.equal(one, other)

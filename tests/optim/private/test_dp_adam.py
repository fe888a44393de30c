"""DPAdam and DPAdamBC against NumPy and torch, and what the noise does to their moments."""

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from comm_hooks.optim.private.optimizers.dp_adam import DPAdam, DPAdamBC, suggested_gamma
from comm_hooks.optim.private.optimizers.dp_sgd import DPSGD
from tests.optim.gradients import HYPER, SHAPES, STEPS, gradient, parameters_of, run, start

COORDINATES = 20_000
COMMON = {key: HYPER[key] for key in ("lr", "betas")}


def variance(step: int) -> float:
    """Of noise that is switched and fades."""
    return (0.3 if step % 7 < 4 else 0.05) * 0.97**step


def noised_with(variance: float | None, params: Any) -> DPAdamBC:
    optimizer = DPAdamBC(params)
    optimizer.noise_variance = variance
    return optimizer


def run_noised(parameters: dict[str, nn.Parameter], optimizer: Any) -> dict[str, torch.Tensor]:
    for t in range(STEPS):
        optimizer.noise_variance = variance(t)
        run(parameters, optimizer, steps=[t])
    return {name: p.detach() for name, p in parameters.items()}


def reference(
    corrected: bool, weight_decay: float, gamma: float | None = None
) -> dict[str, np.ndarray]:
    """The docstrings' algorithms, without any of the library."""
    lr, (beta1, beta2), eps = HYPER["lr"], HYPER["betas"], HYPER["eps"]
    results = {}
    for name in SHAPES:
        x = start(name)
        gradients, variances = [], []
        for step in range(STEPS):
            g = gradient(name, step)
            if g is None:
                continue
            gradients.append(g)
            variances.append(variance(step))
            t = len(gradients)
            ages = np.arange(t)[::-1].reshape(-1, *[1] * x.ndim)

            def average(values: Any, beta: float, ages: np.ndarray = ages) -> Any:
                weights = beta**ages
                return (weights * np.stack(values)).sum(axis=0) / weights.sum()

            m = average(gradients, beta1)
            v = average([g**2 for g in gradients], beta2)
            if corrected:
                noise = np.average(variances, weights=beta2 ** np.arange(t)[::-1])
                floor = suggested_gamma(noise, beta2) if gamma is None else gamma
                divisor = np.sqrt(np.maximum(v - noise, floor))
            else:
                divisor = np.sqrt(v) + eps
            x = (1 - lr * weight_decay) * x - lr * m / divisor
        results[name] = x
    return results


@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
def test_dp_adam_matches_the_reference_and_torch(weight_decay: float) -> None:
    results = []
    for adam in (DPAdam, torch.optim.AdamW):
        parameters = parameters_of()
        optimizer = adam(parameters.values(), **HYPER, weight_decay=weight_decay)
        results.append(run(parameters, optimizer))
    expected = reference(False, weight_decay)
    for name in SHAPES:
        np.testing.assert_allclose(results[0][name].numpy(), expected[name], rtol=1e-11, atol=1e-13)
        torch.testing.assert_close(results[0][name], results[1][name], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(("gamma", "weight_decay"), [(None, 0.0), (None, 0.3), (1e-3, 0.3)])
def test_dp_adam_bc_matches_the_reference(gamma: float | None, weight_decay: float) -> None:
    parameters = parameters_of()
    optimizer = DPAdamBC(parameters.values(), **COMMON, gamma=gamma, weight_decay=weight_decay)
    actual = run_noised(parameters, optimizer)
    expected = reference(True, weight_decay, gamma)
    for name in SHAPES:
        np.testing.assert_allclose(actual[name].numpy(), expected[name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("optimizer_class", [DPAdam, DPAdamBC])
def test_moments_of_noised_gradients_are_all_that_is_kept(optimizer_class: type) -> None:
    """No weight decay, nor the moments without noise of the authors' code, which would leak."""
    states = []
    for weight_decay in (0.0, 0.5):
        parameters = parameters_of()
        optimizer = optimizer_class(parameters.values(), weight_decay=weight_decay)
        optimizer.noise_variance = 0.01
        run(parameters, optimizer)
        states.append(optimizer.state[parameters["weight"]])
    own = {"noise_avg"} if optimizer_class is DPAdamBC else set()
    assert set(states[0]) == set(states[1]) == {"step", "exp_avg", "exp_avg_sq", *own}
    for key in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(states[0][key], states[1][key])


# What the noise does.


def second_moments(
    gradients: Iterator[tuple[torch.Tensor, float]], beta2: float, optimizer_class: type = DPAdamBC
) -> torch.Tensor:
    """Return what is under the root in the last step, seen from how far the parameters moved."""
    x = nn.Parameter(torch.zeros(COORDINATES, dtype=torch.float64))
    options = {"gamma": 1e-30} if optimizer_class is DPAdamBC else {"eps": 0.0}
    optimizer = optimizer_class([x], lr=1.0, betas=(0.0, beta2), **options)
    before = x.detach().clone()
    for g, phi in gradients:
        before.copy_(x.detach())
        x.grad = g
        optimizer.noise_variance = phi
        optimizer.step()
    return (g / (before - x.detach())) ** 2


def noised(signal: float, phis: list[float]) -> Iterator[tuple[torch.Tensor, float]]:
    generator = torch.Generator().manual_seed(0)
    for phi in phis:
        noise = torch.randn(COORDINATES, generator=generator, dtype=torch.float64)
        yield signal + math.sqrt(phi) * noise, phi


@pytest.mark.parametrize(
    ("beta2", "steps", "schedule"),
    [(0.99, 40, "falling"), (0.99, 40, "constant"), (0.999, 300, "switched")],
)
def test_the_correction_is_unbiased_also_when_the_noise_changes(
    beta2: float, steps: int, schedule: str
) -> None:
    phis = {
        "constant": [0.04] * steps,
        "falling": [0.04 * 0.5 ** (4 * t / steps) for t in range(steps)],
        "switched": [0.04 if t < steps // 2 else 0.01 for t in range(steps)],
    }[schedule]
    signal = 1.0
    weights = np.array([beta2 ** (steps - 1 - t) for t in range(steps)])
    weights /= weights.sum()
    # Of g^2 = (signal + z)^2: 4 signal^2 phi + 2 phi^2.
    spread = np.sqrt(np.sum(weights**2 * [4 * signal**2 * phi + 2 * phi**2 for phi in phis]))
    corrected = second_moments(noised(signal, phis), beta2)
    error = float(corrected.mean()) - signal**2
    assert abs(error) < 5 * spread / math.sqrt(COORDINATES)
    # What one might subtract instead is further off than that.
    wrong = 0.0 if schedule == "constant" else phis[-1]
    assert abs(np.dot(weights, phis) - wrong) > 6 * spread / math.sqrt(COORDINATES)


def test_with_much_noise_dp_adam_is_dp_sgd_with_momentum() -> None:
    """In the words of the paper, equation 3; and DP-AdamBC is not."""
    phi, lr, beta1, beta2 = 4.0, 0.01, 0.9, 0.9999
    signals = torch.logspace(-2, -1, 2000)
    generator = torch.Generator().manual_seed(1)
    moved = {}
    optimizers: dict[str, tuple[nn.Parameter, Any]] = {}
    for name in ("adam", "sgd", "corrected"):
        x = nn.Parameter(torch.zeros(2000))
        optimizers[name] = (
            x,
            {
                "adam": lambda x: DPAdam([x], lr, betas=(beta1, beta2)),
                "sgd": lambda x: DPSGD([x], lr, momentum=beta1),
                "corrected": lambda x: DPAdamBC([x], lr, betas=(beta1, beta2)),
            }[name](x),
        )
    for t in range(1, 1001):
        g = signals + math.sqrt(phi) * torch.randn(2000, generator=generator)
        for name, (x, optimizer) in optimizers.items():
            x.grad = g
            optimizer.noise_variance = phi
            if name == "sgd":
                optimizer.param_groups[0]["lr"] = (
                    lr * (1 - beta1) / ((1 - beta1**t) * math.sqrt(phi))
                )
            optimizer.step()
            if t == 500:
                moved[name] = -x.detach().clone()
    moved = {name: moved[name] + x.detach() for name, (x, _) in optimizers.items()}
    length = float(moved["sgd"].norm())
    assert float((moved["adam"] - moved["sgd"]).norm()) < 0.04 * length
    assert float((moved["corrected"] - moved["sgd"]).norm()) > 0.5 * length


# The floor.


def test_the_papers_example() -> None:
    phi = (0.4 * 0.1 / 256) ** 2
    assert phi == pytest.approx(2.441e-8, rel=2e-4)
    # Table 3, as printed; at t = 10 and alpha = .01 it has the formula of the other case.
    printed = {
        (100, 0.01): 3.180e-8,
        (1000, 0.01): 1.046e-8,
        (10000, 0.01): 7.110e-9,
        (10, 0.05): 8.388e-8,
        (100, 0.05): 2.654e-8,
        (1000, 0.05): 8.725e-9,
        (10000, 0.05): 5.933e-9,
        (10, 0.10): 7.559e-8,
        (100, 0.10): 2.391e-8,
        (1000, 0.10): 7.863e-9,
        (10000, 0.10): 5.347e-9,
    }
    for (steps, alpha), bound in printed.items():
        assert suggested_gamma(phi, steps=steps, alpha=alpha) == pytest.approx(bound, rel=5e-4)
    assert suggested_gamma(phi) == pytest.approx(suggested_gamma(phi, steps=10**6))
    assert suggested_gamma(phi) / phi == pytest.approx(0.243, abs=5e-4)


@pytest.mark.slow  # 3,000 steps for a figure of a page
@pytest.mark.parametrize(("phi", "limit"), [(2.4e-8, 0.645), (1.5e-5, 0.026)])
def test_the_papers_learning_rates_of_dp_sgd(phi: float, limit: float) -> None:
    """Figure 2, left: what Adam's learning rate of 0.001 is worth in the end, by equation 3."""
    parameter = nn.Parameter(torch.zeros(4_000))
    optimizer = DPAdam([("weight", parameter)], lr=0.001)
    generator = torch.Generator().manual_seed(0)
    noise = torch.empty_like(parameter)
    for _ in range(3000):
        noise.normal_(std=phi**0.5, generator=generator)
        parameter.grad = noise.clone()
        before = parameter.detach().clone()
        optimizer.step()
    moment = optimizer.state[parameter]["exp_avg"] / (1 - 0.9)  # momentum as DP-SGD has it
    rates = (before - parameter.detach()) / moment
    assert float(rates.median()) == pytest.approx(limit, rel=0.01)


# Bad input, dtypes, checkpoints.


@pytest.mark.parametrize(
    ("phi", "error", "message"),
    [
        (None, RuntimeError, "noise_variance is not known, .* of p.grad"),
        (-1.0, ValueError, r"noise_variance must lie in \[0, inf\), got -1.0"),
        (float("nan"), ValueError, r"noise_variance must lie in \[0, inf\), got nan"),
        (float("inf"), ValueError, r"noise_variance must lie in \[0, inf\), got inf"),
    ],
    ids=str,
)
def test_a_step_without_the_variance_changes_nothing(
    phi: float | None, error: type[Exception], message: str
) -> None:
    x = nn.Parameter(torch.ones(100))
    x.grad = torch.randn(100)
    assert DPAdamBC.needs_noise_variance
    assert DPAdamBC([x]).noise_variance is None
    optimizer = noised_with(phi, [x])
    with pytest.raises(error, match=f"^DPAdamBC: {message}$"):
        optimizer.step()
    assert torch.equal(x, torch.ones(100))
    assert not optimizer.state


def test_states_of_others_are_refused() -> None:
    parameters = parameters_of()
    adam = torch.optim.AdamW(parameters.values())
    run(parameters, adam)
    optimizer = noised_with(0.01, parameters.values())
    with pytest.raises(ValueError, match=r"^DPAdamBC: the state has no gamma: .* by another"):
        optimizer.load_state_dict(adam.state_dict())
    assert not optimizer.state


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"noise_variance": float("nan")}, r"noise_variance must lie in \[0, inf\), got nan"),
        ({"beta2": 1.0}, r"beta2 must lie in \[0, 1\), got 1.0"),
        ({"alpha": 0.0}, r"alpha must lie in \(0, 1\), got 0.0"),
        ({"steps": 0}, r"steps must lie in \[1, inf\), got 0"),
    ],
    ids=str,
)
def test_bad_arguments_of_the_floor_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=f"^suggested_gamma: {message}$"):
        suggested_gamma(**{"noise_variance": 1.0, **arguments})

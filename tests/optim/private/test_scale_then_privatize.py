"""Scale-then-privatize against an independent NumPy reference, and where it clips."""

import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from comm_hooks.optim.private.gradients.clipping import SampleClipper
from comm_hooks.optim.private.optimizers.scale_then_privatize import ScaleThenPrivatize
from tests.optim.private.releases import (
    SHAPES,
    STEPS,
    Values,
    assert_close,
    fresh,
    privatized,
    start,
    trained,
)
from tests.optim.private.saving import equal

LR, EPS, SCALE_EPS, BETAS, DECAY = 0.05, 1e-3, 0.3, (0.7, 0.9), 0.1


def make(parameters: dict[str, nn.Parameter]) -> ScaleThenPrivatize:
    hyper: dict[str, Any] = {"betas": BETAS, "eps": EPS, "weight_decay": DECAY}
    return ScaleThenPrivatize(parameters.items(), LR, scale_eps=SCALE_EPS, **hyper)


def reference() -> Values:
    """The docstring's algorithm, in float64."""
    theta = {n: start(n) for n in SHAPES}
    m, v, v_hat = ({n: np.zeros(SHAPES[n]) for n in SHAPES} for _ in range(3))
    for step in range(STEPS):
        s = {n: 1 / (np.sqrt(v_hat[n]) + SCALE_EPS) for n in SHAPES}
        h = privatized(step, theta, lambda n, g, s=s: s[n] * g)
        for n in SHAPES:
            g = h[n] / s[n]
            m[n] = BETAS[0] * m[n] + (1 - BETAS[0]) * g
            v[n] = BETAS[1] * v[n] + (1 - BETAS[1]) * g**2
            m_hat = m[n] / (1 - BETAS[0] ** (step + 1))
            v_hat[n] = v[n] / (1 - BETAS[1] ** (step + 1))
            theta[n] = (1 - LR * DECAY) * theta[n] - LR * m_hat / (np.sqrt(v_hat[n]) + EPS)
    return theta


def test_matches_the_reference() -> None:
    assert_close(trained(make), reference())


def test_clips_in_the_scaled_space() -> None:
    """A huge gradient where s is small takes nothing from the other coordinates."""
    weight = nn.Parameter(torch.zeros(3))
    optimizer = ScaleThenPrivatize([weight], LR, scale_eps=1e-3)
    optimizer.transform()
    weight.grad = torch.tensor([1e5, 10.0, 10.0])  # times 1e-3: 100, 0.01, 0.01
    optimizer.step()

    class Rows(SampleClipper):
        def backward(self, batch: torch.Tensor) -> torch.Tensor:
            self._add_samples([batch])
            return batch.mean()

    gradients = Rows([weight], 2.0)
    gradients.transform = optimizer.transform()
    assert gradients.transform is not None
    gradients.backward(torch.tensor([[100.0, 0.01, 0.005]]))
    (total,) = gradients.take().tensors
    unscaled = total / gradients.transform.scale[0]
    # In the scaled space about (1, 0.9, 0.45), shorter than 2: it arrives whole.
    torch.testing.assert_close(unscaled, torch.tensor([100.0, 0.01, 0.005]), rtol=1e-4, atol=0)


def test_the_transform_follows_from_releases_alone() -> None:
    """The same noised gradients give the same transforms, other ones give others."""
    runs = []
    for shift in (0.0, 0.0, 0.1):
        parameters = fresh()
        optimizer = make(parameters)
        transforms = []
        for step in range(5):
            transforms.append(vars(optimizer.transform()))
            generator = torch.Generator().manual_seed(step)
            for p in parameters.values():
                p.grad = torch.randn(p.shape, generator=generator) + shift
            optimizer.step()
        runs.append(transforms)
    assert equal(runs[0], runs[1])
    assert equal(runs[0][0], runs[2][0]), "nothing has been released before the first step"
    assert float(runs[0][0]["scale"][0].max()) == pytest.approx(1 / SCALE_EPS)
    assert not any(equal(a, b) for a, b in zip(runs[0][1:], runs[2][1:], strict=True))


def second_moment(std: float) -> float:
    """Return sqrt(v) after 500 steps of noise of this standard deviation, in the scaled space."""
    weight = nn.Parameter(torch.zeros(200))
    optimizer = ScaleThenPrivatize([weight], 0.0, scale_eps=1.0, betas=(0.9, 0.9))
    optimizer.noise_variance = std**2
    generator = torch.Generator().manual_seed(0)
    for _ in range(500):
        optimizer.transform()
        weight.grad = std * torch.randn(200, generator=generator)
        optimizer.step()
    return float(optimizer.state[weight]["exp_avg_sq"].mean().sqrt())


def test_noise_that_feeds_itself_is_warned_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        # The fixed point of v = (std (v + 1))^2 in the mean, a little above it by fluctuations.
        assert second_moment(0.5) < 1.5
    with pytest.warns(UserWarning, match="deviation of 1.3: from 1 on the second moment") as said:
        assert second_moment(1.3) > 1e4
    assert len(said) == 1


def test_a_step_without_transform_is_refused() -> None:
    parameters = fresh()
    optimizer = make(parameters)
    with pytest.raises(RuntimeError, match="ScaleThenPrivatize: transform"):
        optimizer.step()


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"scale_eps": 0.0}, "ScaleThenPrivatize: scale_eps must be positive"),
        ({"scale_eps": float("inf")}, "scale_eps must be finite"),
        ({"eps": 0.0}, "eps must be positive"),
        ({"betas": (1.0, 0.9)}, "betas must lie in"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ScaleThenPrivatize(fresh().items(), LR, **bad)

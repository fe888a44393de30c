"""AdaDPS and AdaS against an independent NumPy reference, and what they may depend on."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from comm_hooks.optim.private.optimizers.ada_dps import AdaDPS, AdaS
from tests.optim.private.releases import (
    SHAPES,
    STEPS,
    Public,
    Values,
    advance,
    assert_close,
    fresh,
    privatized,
    public_gradient,
    samples,
    start,
    trained,
)
from tests.optim.private.saving import equal

LR, EPS, BETAS, DECAY = 0.05, 0.02, (0.7, 0.9), 0.1
SCALES = {"weight": torch.linspace(0.1, 2.0, 5, dtype=torch.float64)}
KINDS = ("rmsprop", "adam", "adagrad", "side_information")


def options(kind: str, parameters: dict[str, nn.Parameter]) -> dict[str, Any]:
    if kind == "side_information":
        return {"side_information": SCALES}
    return {
        "public_gradients": Public(parameters),
        "preconditioner": kind,
        "betas": BETAS,
        "eps": EPS,
    }


def make(
    parameters: dict[str, nn.Parameter], kind: str, momentum: float = 0.0, cls: type = AdaDPS
) -> Any:
    more = {"momentum": momentum, "weight_decay": DECAY}
    return cls(parameters.items(), LR, **options(kind, parameters), **more)


def mean(name: str, step: int, theta: np.ndarray) -> np.ndarray:
    return samples(name, step, theta, data=1).mean(0)


def reference(kind: str, momentum: float, private: bool) -> Values:
    """The docstring's algorithm, in float64."""
    theta = {n: start(n) for n in SHAPES}
    v, m, b = ({n: np.zeros(SHAPES[n]) for n in SHAPES} for _ in range(3))
    side = {"weight": np.linspace(0.1, 2.0, 5), "bias": 1.0}
    for step in range(STEPS):
        divisor = {}
        for n in SHAPES:
            if kind == "side_information":
                divisor[n] = side[n]
                continue
            public = public_gradient(n, step, theta[n])
            if kind == "adagrad":
                v[n] = v[n] + public**2
            else:
                v[n] = BETAS[1] * v[n] + (1 - BETAS[1]) * public**2
            m[n] = BETAS[0] * m[n] + (1 - BETAS[0]) * public
            divisor[n] = np.sqrt(v[n]) + EPS

        def transform(name: str, g: np.ndarray, divisor: dict[str, Any] = divisor) -> np.ndarray:
            if kind == "adam":
                g = BETAS[0] * g + (1 - BETAS[0]) * m[name]
            return g / divisor[name]

        if private:
            direction = privatized(step, theta, transform)
        else:
            direction = {n: transform(n, mean(n, step, theta[n])) for n in SHAPES}
        for n in SHAPES:
            b[n] = momentum * b[n] + direction[n]
            theta[n] = (1 - LR * DECAY) * theta[n] - LR * b[n]
    return theta


@pytest.mark.parametrize("kind", KINDS)
def test_matches_the_reference_through_clipping_and_noise(kind: str) -> None:
    assert_close(trained(lambda p: make(p, kind, 0.6)), reference(kind, 0.6, True))


@pytest.mark.parametrize("kind", KINDS)
def test_without_privacy_it_is_adas(kind: str) -> None:
    parameters = fresh(torch.float64)
    optimizer = make(parameters, kind, 0.6, AdaS)
    for step in range(STEPS):
        for name, p in parameters.items():
            p.grad = torch.tensor(mean(name, step, p.detach().numpy()))
        optimizer.step()
    expected = reference(kind, 0.6, False)
    for name, p in parameters.items():
        np.testing.assert_allclose(p.detach().numpy(), expected[name], rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("kind", KINDS)
def test_the_transform_depends_on_nothing_private(kind: str) -> None:
    """With parameters that stay, whatever is released, transforms are the same bit by bit."""
    runs = []
    for data in (0, 5):
        parameters = fresh()
        optimizer = AdaDPS(parameters.items(), 0.0, **options(kind, parameters))
        runs.append([vars(t) for t in advance(parameters, optimizer, data=data)])
    assert equal(*runs)
    changes = [not equal(runs[0][0], later) for later in runs[0][1:]]
    assert all(changes) if kind != "side_information" else not any(changes)


def test_public_gradients_are_computed_once_per_step() -> None:
    parameters = fresh()
    optimizer = make(parameters, "adam")
    first, second = optimizer.transform(), optimizer.transform()
    assert equal(vars(first), vars(second))
    assert optimizer._public_gradients.calls == 1
    for p in parameters.values():
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.transform()
    assert optimizer._public_gradients.calls == 2


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({}, "AdaDPS: pass either public_gradients or side_information"),
        (
            {"side_information": SCALES, "public_gradients": dict},
            "AdaDPS: pass either public_gradients or side_information",
        ),
        ({"public_gradients": [torch.ones(6, 5)]}, "AdaDPS: public_gradients must be callable"),
        (
            {"public_gradients": dict, "preconditioner": "adm"},
            "AdaDPS: preconditioner must be one of rmsprop, adam",
        ),
        ({"side_information": {"wight": torch.ones(5)}}, "side_information: .*wight.*weight"),
        ({"side_information": {"weight": torch.ones(4)}}, r"weight has shape \(4,\).*\(6, 5\)"),
        ({"side_information": {"weight": torch.zeros(5)}}, "side_information must be positive"),
        ({"side_information": {"weight": torch.full((5,), float("nan"))}}, "not finite in weight"),
        ({"side_information": [torch.ones(5)]}, "AdaDPS: side_information must be a Mapping"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AdaDPS(fresh().items(), **{"lr": LR, **bad})


def test_bad_public_gradients_are_refused() -> None:
    gradients = {"weight": torch.ones(6, 5)}
    optimizer = AdaDPS(fresh().items(), LR, public_gradients=lambda: gradients)
    with pytest.raises(ValueError, match="AdaDPS: public_gradients has no tensor for bias"):
        optimizer.transform()
    gradients["bias"] = torch.full((7,), torch.inf)
    with pytest.raises(ValueError, match="AdaDPS: public_gradients: not finite in bias"):
        optimizer.transform()


def test_names_need_names() -> None:
    with pytest.raises(ValueError, match=r"goes by names: pass model.named_parameters\(\)"):
        AdaDPS(fresh().values(), LR, side_information=SCALES)
    tensors = {"weight": torch.full((6, 1), 0.5), "bias": torch.tensor(0.25)}
    transform = AdaDPS(fresh().items(), LR, side_information=tensors).transform()
    assert transform is not None
    assert torch.equal(transform.scale[0], torch.full((6, 5), 2.0))
    assert torch.equal(transform.scale[1], torch.full((7,), 4.0))

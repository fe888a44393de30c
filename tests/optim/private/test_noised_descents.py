"""Preconditioned descents and their baselines against independent NumPy references."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from benchmarks.studies.private_optimizers.baselines import PDADPMD, DPAdamPub, DPRPub
from comm_hooks.optim.private import (
    DP2,
    DPRMSProp,
    ScaleThenPrivatize,
)
from tests.optim.private.releases import (
    NORM,
    SHAPES,
    STEPS,
    Public,
    Values,
    advance,
    assert_close,
    fresh,
    privatized,
    public_gradient,
    start,
    trained,
    unchanged,
)
from tests.optim.private.saving import equal

LR, DECAY = 0.05, 0.1
LR_RATIO, CLIP_RATIO, BETA, DP2_EPS = 0.3, 4.0, 0.8, 0.1
PHASES = (4, 3)


def make_dp2(parameters: dict[str, nn.Parameter], preconditioner: Any = "rmsprop") -> DP2:
    return DP2(
        parameters.items(),
        LR,
        lr_ratio=LR_RATIO,
        clip_ratio=CLIP_RATIO,
        sgd_steps=PHASES[0],
        preconditioned_steps=PHASES[1],
        preconditioner=preconditioner,
        betas=(BETA,),
        eps=DP2_EPS,
        weight_decay=DECAY,
    )


def dp2_reference(preconditioner: str) -> Values:
    """The docstring's algorithm, in float64; the second phase clips to another norm."""
    theta = {n: start(n) for n in SHAPES}
    v, total = ({n: np.zeros(SHAPES[n]) for n in SHAPES} for _ in range(2))
    for step in range(STEPS):
        place = step % sum(PHASES)
        if place < PHASES[0]:
            g, lr = privatized(step, theta, unchanged), LR
        else:
            divisor = {n: np.sqrt(v[n]) + DP2_EPS for n in SHAPES}
            norm = CLIP_RATIO * NORM
            g = privatized(step, theta, lambda n, g, d=divisor: g / d[n], norm)
            lr = LR * LR_RATIO
        for n in SHAPES:
            if place < PHASES[0]:
                total[n] = total[n] + g[n]
            if place == PHASES[0] - 1:
                square = (total[n] / PHASES[0]) ** 2
                v[n] = v[n] + square
                if preconditioner == "rmsprop":
                    v[n] = BETA * (v[n] - square) + (1 - BETA) * square
                total[n] = np.zeros(SHAPES[n])
            theta[n] = (1 - LR * DECAY) * theta[n] - lr * g[n]
    return theta


@pytest.mark.parametrize("preconditioner", ["rmsprop", "adagrad"])
def test_dp2_matches_the_reference(preconditioner: str) -> None:
    assert_close(trained(lambda p: make_dp2(p, preconditioner)), dp2_reference(preconditioner))


def test_the_phases_of_dp2_take_turns() -> None:
    parameters = fresh()
    transforms = advance(parameters, make_dp2(parameters), range(2 * sum(PHASES)))
    assert [transform is not None for transform in transforms] == (
        [False] * PHASES[0] + [True] * PHASES[1]
    ) * 2
    scales = [transform.scale[0] for transform in transforms if transform is not None]
    assert torch.equal(scales[0], scales[2]), "it changes between phases only"
    assert not torch.equal(scales[2], scales[3])


SCALE_EPS, STP_EPS, STP_BETAS = 0.3, 1e-3, (0.7, 0.9)


def make_stp(parameters: dict[str, nn.Parameter]) -> ScaleThenPrivatize:
    hyper: dict[str, Any] = {"betas": STP_BETAS, "eps": STP_EPS, "weight_decay": DECAY}
    return ScaleThenPrivatize(parameters.items(), LR, scale_eps=SCALE_EPS, **hyper)


def stp_reference() -> Values:
    """The docstring's algorithm, in float64."""
    theta = {n: start(n) for n in SHAPES}
    m, v, v_hat = ({n: np.zeros(SHAPES[n]) for n in SHAPES} for _ in range(3))
    for step in range(STEPS):
        s = {n: 1 / (np.sqrt(v_hat[n]) + SCALE_EPS) for n in SHAPES}
        h = privatized(step, theta, lambda n, g, s=s: s[n] * g)
        for n in SHAPES:
            g = h[n] / s[n]
            m[n] = STP_BETAS[0] * m[n] + (1 - STP_BETAS[0]) * g
            v[n] = STP_BETAS[1] * v[n] + (1 - STP_BETAS[1]) * g**2
            m_hat = m[n] / (1 - STP_BETAS[0] ** (step + 1))
            v_hat[n] = v[n] / (1 - STP_BETAS[1] ** (step + 1))
            theta[n] = (1 - LR * DECAY) * theta[n] - LR * m_hat / (np.sqrt(v_hat[n]) + STP_EPS)
    return theta


def test_scale_then_privatize_matches_the_reference() -> None:
    assert_close(trained(make_stp), stp_reference())


def test_the_transform_follows_from_releases_alone() -> None:
    """The same noised gradients give the same transforms, other ones give others."""
    runs = []
    for shift in (0.0, 0.0, 0.1):
        parameters = fresh()
        optimizer = make_stp(parameters)
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


EPS, MOMENTUM = 0.05, 0.6
TOTAL = 20
BETAS = (0.8, 0.7, 0.9)
COMMON: dict[str, Any] = {"weight_decay": DECAY}

BASELINES: dict[str, Callable[[dict[str, nn.Parameter]], Any]] = {
    "dp_r_pub": lambda p: DPRPub(
        p.items(), LR, Public(p), beta=BETAS[2], eps=EPS, momentum=MOMENTUM, **COMMON
    ),
    "dp_adam_pub": lambda p: DPAdamPub(p.items(), LR, Public(p), betas=BETAS, eps=EPS, **COMMON),
    "pda_dpmd": lambda p: PDADPMD(
        p.items(), LR, Public(p), total_steps=TOTAL, momentum=MOMENTUM, **COMMON
    ),
    "dp_rmsprop": lambda p: DPRMSProp(
        p.items(), LR, betas=(BETAS[2],), eps=EPS, momentum=MOMENTUM, **COMMON
    ),
}


def reference(kind: str) -> Values:
    """The docstrings' algorithms, in float64."""
    theta = {n: start(n) for n in SHAPES}
    v, m, b = ({n: np.zeros(SHAPES[n]) for n in SHAPES} for _ in range(3))
    beta1, beta2, beta3 = BETAS
    for t in range(STEPS):
        noised = privatized(t, theta, unchanged)
        for n in SHAPES:
            g, public = noised[n], public_gradient(n, t, theta[n])
            if kind == "dp_adam_pub":
                m[n] = beta2 * m[n] + (1 - beta2) * (beta1 * g + (1 - beta1) * public)
                v[n] = beta3 * v[n] + (1 - beta3) * public**2
                v_hat = v[n] / (1 - beta3 ** (t + 1))
                u = m[n] / (1 - beta2 ** (t + 1)) / (np.sqrt(v_hat) + EPS)
            elif kind == "pda_dpmd":
                alpha = math.cos(math.pi * t / (2 * TOTAL)) if t < TOTAL else 0.0
                u = alpha * g + (1 - alpha) * public
            else:
                source = public if kind == "dp_r_pub" else g
                v[n] = beta3 * v[n] + (1 - beta3) * source**2
                u = g / (np.sqrt(v[n]) + EPS)
            b[n] = (0 if kind == "dp_adam_pub" else MOMENTUM) * b[n] + u
            theta[n] = (1 - LR * DECAY) * theta[n] - LR * b[n]
    return theta


@pytest.mark.parametrize("kind", BASELINES)
def test_baselines_match_the_reference(kind: str) -> None:
    assert_close(trained(BASELINES[kind]), reference(kind))


@pytest.mark.parametrize("kind", BASELINES)
def test_nothing_is_done_before_clipping(kind: str) -> None:
    parameters = fresh()
    assert advance(parameters, BASELINES[kind](parameters), range(2)) == [None, None]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: DP2(p, LR, sgd_steps=0), "DP2: sgd_steps must be"),
        (lambda p: DP2(p, LR, preconditioned_steps=1.5), "DP2: preconditioned_steps must be"),
        (lambda p: DP2(p, LR, lr_ratio=0.0), "DP2: lr_ratio must lie in"),
        (lambda p: DP2(p, LR, clip_ratio=-1.0), "DP2: clip_ratio must lie in"),
        (
            lambda p: DP2(p, LR, preconditioner="adam"),
            "DP2: preconditioner must be one of rmsprop, adagrad",
        ),
        (lambda p: ScaleThenPrivatize(p, LR, scale_eps=0.0), "scale_eps must lie in"),
        (lambda p: ScaleThenPrivatize(p, LR, scale_eps=math.inf), "scale_eps must lie in"),
        (lambda p: DPRPub(p, LR, [torch.ones(5)]), "DPRPub: public_gradients must be callable"),
        (lambda p: DPAdamPub(p, LR, None), "DPAdamPub: pass either public_gradients"),
        (lambda p: PDADPMD(p, LR, None, total_steps=5), "PDADPMD: public_gradients must be call"),
        (lambda p: PDADPMD(p, LR, dict, total_steps=0), "total_steps must be"),
    ],
)
def test_bad_arguments_are_refused(make: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(fresh().items())

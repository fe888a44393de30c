"""What AdaDPS is compared with, against independent NumPy references."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from comm_hooks.optim.private.optimizers.dp_sgd import DPRMSProp
from comm_hooks.optim.private.optimizers.public_baselines import PDADPMD, DPAdamPub, DPRPub
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
    start,
    trained,
    unchanged,
)

LR, EPS, DECAY, MOMENTUM = 0.05, 0.05, 0.1, 0.6
TOTAL = 20
BETAS = (0.8, 0.7, 0.9)
COMMON: dict[str, Any] = {"weight_decay": DECAY}

MAKE: dict[str, Callable[[dict[str, nn.Parameter]], Any]] = {
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


@pytest.mark.parametrize("kind", MAKE)
def test_matches_the_reference(kind: str) -> None:
    assert_close(trained(MAKE[kind]), reference(kind))


@pytest.mark.parametrize("kind", MAKE)
def test_nothing_is_done_before_clipping(kind: str) -> None:
    parameters = fresh()
    assert advance(parameters, MAKE[kind](parameters), range(2)) == [None, None]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: DPRPub(p, LR, [torch.ones(5)]), "DPRPub: public_gradients must be callable"),
        (lambda p: DPAdamPub(p, LR, None), "DPAdamPub: pass either public_gradients"),
        (lambda p: PDADPMD(p, LR, None, total_steps=5), "PDADPMD: public_gradients must be call"),
        (lambda p: PDADPMD(p, LR, dict, total_steps=0), "total_steps must be"),
        (lambda p: DPAdamPub(p, LR, dict, betas=(0.9, 0.9, 1.0)), r"betas must lie in \[0, 1\)"),
        (lambda p: DPRMSProp(p, LR, eps=0.0), "DPRMSProp: eps must be positive"),
        (lambda p: DPRMSProp(p, LR, momentum=1.5), r"DPRMSProp: momentum must lie in \[0, 1\)"),
    ],
)
def test_bad_arguments_are_refused(make: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(fresh().items())

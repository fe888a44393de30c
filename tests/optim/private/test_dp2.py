"""DP^2 against an independent NumPy reference with two clipping norms, and its phases."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from comm_hooks.optim.private.optimizers.dp2 import DP2
from comm_hooks.optim.private.optimizers.dp_sgd import DPSGD
from tests.optim.private.releases import (
    NORM,
    SHAPES,
    STEPS,
    Values,
    advance,
    assert_close,
    fresh,
    privatized,
    start,
    trained,
    unchanged,
)
from tests.optim.private.saving import resumes_exactly

LR, LR_RATIO, CLIP_RATIO, BETA, EPS, DECAY = 0.05, 0.3, 4.0, 0.8, 0.1, 0.1
PHASES = (4, 3)


def make(parameters: dict[str, nn.Parameter], preconditioner: Any = "rmsprop") -> DP2:
    return DP2(
        parameters.items(),
        LR,
        lr_ratio=LR_RATIO,
        clip_ratio=CLIP_RATIO,
        sgd_steps=PHASES[0],
        preconditioned_steps=PHASES[1],
        preconditioner=preconditioner,
        betas=(BETA,),
        eps=EPS,
        weight_decay=DECAY,
    )


def reference(preconditioner: str) -> Values:
    """The docstring's algorithm, in float64; the second phase clips to another norm."""
    theta = {n: start(n) for n in SHAPES}
    v, total = ({n: np.zeros(SHAPES[n]) for n in SHAPES} for _ in range(2))
    for step in range(STEPS):
        place = step % sum(PHASES)
        if place < PHASES[0]:
            g, lr = privatized(step, theta, unchanged), LR
        else:
            divisor = {n: np.sqrt(v[n]) + EPS for n in SHAPES}
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
def test_matches_the_reference(preconditioner: str) -> None:
    assert_close(trained(lambda p: make(p, preconditioner)), reference(preconditioner))


def test_the_phases_take_turns() -> None:
    parameters = fresh()
    transforms = advance(parameters, make(parameters), range(2 * sum(PHASES)))
    assert [transform is not None for transform in transforms] == (
        [False] * PHASES[0] + [True] * PHASES[1]
    ) * 2
    scales = [transform.scale[0] for transform in transforms if transform is not None]
    assert torch.equal(scales[0], scales[2]), "it changes between phases only"
    assert not torch.equal(scales[2], scales[3])


def test_the_first_phase_is_dp_sgd() -> None:
    ours, theirs = fresh(), fresh()
    advance(ours, make(ours), range(PHASES[0]))
    advance(theirs, DPSGD(theirs.items(), LR, weight_decay=DECAY), range(PHASES[0]))
    assert all(torch.equal(ours[n], theirs[n]) for n in SHAPES)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_resumed_run_goes_on_as_it_was(dtype: torch.dtype) -> None:
    """It is saved after 5 steps, in the middle of the second phase."""
    assert resumes_exactly(lambda items: make(dict(items)), dtype, fresh, advance)


def test_a_run_resumed_in_the_first_phase_goes_on_as_it_was() -> None:
    def longer(parameters: dict[str, nn.Parameter], optimizer: Any, steps: range) -> None:
        advance(parameters, optimizer, range(2 * steps.start, 2 * steps.stop - 1))

    # Saved after 9 steps, two steps into a first phase.
    assert resumes_exactly(lambda items: make(dict(items)), torch.float32, fresh, longer)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"sgd_steps": 0}, "DP2: sgd_steps must be"),
        ({"preconditioned_steps": 1.5}, "DP2: preconditioned_steps must be"),
        ({"lr_ratio": 0.0}, "DP2: lr_ratio must be positive"),
        ({"clip_ratio": -1.0}, "DP2: clip_ratio must not be negative"),
        ({"preconditioner": "adam"}, "DP2: unknown preconditioner 'adam'"),
        ({"eps": 0.0}, "DP2: eps must be positive"),
        ({"betas": (1.0,)}, "betas must lie in"),
    ],
    ids=str,
)
def test_bad_arguments_are_refused(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DP2(fresh().items(), LR, **bad)

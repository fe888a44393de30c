"""Moments of coordinates whose gradients are known, step by step."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from comm_hooks.collectives import Simulated
from comm_hooks.compressors import Identity
from comm_hooks.exchange import Exchange
from comm_hooks.optim.private import DPAdamBC, GaussianMechanism, Secret
from comm_hooks.optim.private.optimizers.dp_adam import suggested_gamma

BETA1 = 0.9
ALPHA = 0.05
"""The probability with which a deviation may exceed Proposition 3's bound."""

GAMMAS = (0.004, 0.02, 0.1, 0.243, 0.84)
"""Floors over Phi; the first and the last are the smallest and the largest that the paper tunes."""

PAPERS_GAMMA = 3e-10 / 2.44e-8
"""The floor over Phi of the paper's Table 2."""


@dataclass(frozen=True)
class Setup:
    """What is simulated.

    Args:
        coordinates: with gradients of each strength.
        strengths: the variance of the gradients over Phi; 0 for coordinates of noise alone.
        noise_multiplier, max_grad_norm, batch: sigma, C and B.
        beta2: decay of the second moment.
        seed: of gradients and noise.
    """

    coordinates: int
    strengths: Sequence[float]
    noise_multiplier: float
    max_grad_norm: float
    batch: float
    beta2: float
    seed: int

    @property
    def noise_variance(self) -> float:
        """Phi, by the formula."""
        return (self.noise_multiplier * self.max_grad_norm / self.batch) ** 2


@dataclass(frozen=True)
class Row:
    """What coordinates of one strength look like after some steps; moments in units of Phi.

    Attributes:
        step, strength: when, and of which.
        v_hat, clean: the mean of v_hat, and of the same average of gradients without noise.
        bias: the mean of v_hat - Phi - clean: 0 in theory.
        spread, theory: the relative standard deviation of v_hat, measured and sqrt(2 / n).
        error, error_theory: the standard deviation of v_hat - Phi - clean, measured and
            sqrt((2 + 4 strength) / n).
        bound: Proposition 3's, which is also the floor that the library suggests.
        beyond: the share of coordinates in which the error is larger than that.
        quantile: the error that a share of ALPHA exceeds.
        floored: the share of coordinates with v_hat - Phi below the bound.
    """

    step: int
    strength: float
    v_hat: float
    clean: float
    bias: float
    spread: float
    theory: float
    error: float
    error_theory: float
    bound: float
    beyond: float
    quantile: float
    floored: float


@dataclass(frozen=True)
class Moments:
    """The bias-corrected moments of all coordinates, shape (strengths, coordinates), float64.

    Second moments are in units of Phi, first moments in units of its root.
    """

    step: int
    m_hat: torch.Tensor
    v_hat: torch.Tensor
    clean_m: torch.Tensor
    clean_v: torch.Tensor


@dataclass(frozen=True)
class Steps:
    """How far coordinates go, in learning rates: root mean squares, one number per strength."""

    gamma: float | None  # over Phi; None for Adam without noise
    lengths: list[float]


@dataclass(frozen=True)
class Quartiles:
    """How a quantity of Table 2 is spread over the coordinates of one strength, in its own unit."""

    strength: float
    quantity: str
    mean: float
    lower: float
    median: float
    upper: float


def effective_steps(beta2: float, step: int) -> float:
    """Return n, the number of steps whose plain mean would vary as v_hat does."""
    gone = 1 - beta2**step
    return gone**2 * (1 + beta2) / ((1 - beta2) * (1 - beta2 ** (2 * step)))


def simulate(
    setup: Setup, due: Sequence[int], advance: Callable[[], None]
) -> tuple[list[Row], Moments]:
    """Take the last of the steps in ``due``, with a row for each of them and each strength.

    The mean gradient of a step is drawn from N(0, strength Phi); the sum over the batch goes
    through :class:`~comm_hooks.optim.private.GaussianMechanism`, and what it releases into
    :class:`~comm_hooks.optim.private.DPAdamBC`, whose state is read.  Its learning rate is 0.

    Args:
        setup: what is simulated.
        due: when to measure, in increasing order.
        advance: called after each step.

    Returns:
        The rows, and the moments after the last step.
    """
    phi = setup.noise_variance
    shape = (len(setup.strengths), setup.coordinates)
    parameter = nn.Parameter(torch.zeros(shape))
    optimizer = DPAdamBC([("weight", parameter)], lr=0.0, betas=(BETA1, setup.beta2))
    # Known to all, so that the study can be repeated: there is nobody to protect.
    secret = Secret(setup.seed.to_bytes(32, "big"))
    mechanism = GaussianMechanism(
        Exchange(Identity(), transport=Simulated(1)[0]),
        noise_multiplier=setup.noise_multiplier,
        max_grad_norm=setup.max_grad_norm,
        expected_batch_size=setup.batch,
        secret=secret,
    )
    scales = (torch.tensor(setup.strengths).sqrt() * math.sqrt(phi))[:, None]
    gradients = torch.Generator().manual_seed(setup.seed)
    clean_m, clean_v = torch.zeros(2, *shape)
    rows: list[Row] = []
    for step in range(1, due[-1] + 1):
        clean = scales * torch.randn(shape, generator=gradients)
        clean_m.lerp_(clean, 1 - BETA1)
        clean_v.mul_(setup.beta2).addcmul_(clean, clean, value=1 - setup.beta2)
        released = mechanism.release({"weight": setup.batch * clean})
        parameter.grad = released.tensors["weight"]
        optimizer.noise_variance = released.noise_variance
        optimizer.step()
        advance()
        if step in due:
            state = optimizer.state[parameter]
            first = math.sqrt(phi) * (1 - BETA1**step)
            second = phi * (1 - setup.beta2**step)
            moments = Moments(
                step,
                state["exp_avg"].double() / first,
                state["exp_avg_sq"].double() / second,
                clean_m.double() / first,
                clean_v.double() / second,
            )
            rows += _rows(setup, moments)
    return rows, moments


def _rows(setup: Setup, moments: Moments) -> list[Row]:
    step = moments.step
    n = effective_steps(setup.beta2, step)
    bound = suggested_gamma(1.0, setup.beta2, steps=step, alpha=ALPHA)
    rows = []
    for strength, v, clean in zip(setup.strengths, moments.v_hat, moments.clean_v, strict=True):
        errors = v - 1 - clean
        rows.append(
            Row(
                step,
                strength,
                v_hat=float(v.mean()),
                clean=float(clean.mean()),
                bias=float(errors.mean()),
                spread=float(v.std() / v.mean()),
                theory=math.sqrt(2 / n),
                error=float(errors.std()),
                error_theory=math.sqrt((2 + 4 * strength) / n),
                bound=bound,
                beyond=float((errors.abs() > bound).double().mean()),
                quantile=float(errors.abs().quantile(1 - ALPHA)),
                floored=float((v - 1 < bound).double().mean()),
            )
        )
    return rows


def step_lengths(moments: Moments) -> dict[str, torch.Tensor]:
    """Return each coordinate's step in learning rates: without noise, DP-Adam's, DP-AdamBC's."""
    floored = (moments.v_hat - 1).clamp_min(PAPERS_GAMMA)
    return {
        # Coordinates without gradients have 0 / 0, and Adam does not move them.
        "without noise": (moments.clean_m / moments.clean_v.sqrt()).nan_to_num(0),
        "DP-Adam": moments.m_hat / moments.v_hat.sqrt(),
        "DP-AdamBC": moments.m_hat / floored.sqrt(),
    }


def quartiles(setup: Setup, moments: Moments) -> list[Quartiles]:
    """Return the paper's Table 2, for coordinates of each strength."""
    phi = setup.noise_variance
    lengths = step_lengths(moments)
    quantities = {
        "m, noised": moments.m_hat * math.sqrt(phi),
        "m, clean": moments.clean_m * math.sqrt(phi),
        "v, noised": moments.v_hat * phi,
        "v, clean": moments.clean_v * phi,
        "v, corrected": (moments.v_hat - 1).clamp_min(PAPERS_GAMMA) * phi,
        "step, DP-Adam": lengths["DP-Adam"],
        "step, DP-AdamBC": lengths["DP-AdamBC"],
    }
    places = torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    return [
        Quartiles(strength, name, float(own.mean()), *own.quantile(places).tolist())
        for index, strength in enumerate(setup.strengths)
        for name, own in ((name, values[index]) for name, values in quantities.items())
    ]


def steps_by_floor(moments: Moments) -> list[Steps]:
    """Return how long steps are with each floor, DP-Adam's (no correction), and Adam's."""
    corrected = moments.v_hat - 1
    found = [Steps(gamma, _lengths(moments.m_hat, corrected.clamp_min(gamma))) for gamma in GAMMAS]
    return [*found, Steps(None, _lengths(moments.clean_m, moments.clean_v))]


def _lengths(first: torch.Tensor, second: torch.Tensor) -> list[float]:
    # Coordinates without gradients have 0 / 0, and Adam does not move them.
    return ((first.square() / second).nan_to_num(0).mean(1).sqrt()).tolist()

"""Moments of coordinates whose gradients are known, step by step."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from comm_hooks.collectives import Simulated
from comm_hooks.compressors import Identity
from comm_hooks.exchange import Exchange
from comm_hooks.optim.private import DPAdamBC, GaussianMechanism, Secret
from comm_hooks.optim.private.optimizers.dp_adam import suggested_gamma

ALPHA = 0.05
"""The probability with which a deviation may exceed Proposition 3's bound."""


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


def effective_steps(beta2: float, step: int) -> float:
    """Return n, the number of steps whose plain mean would vary as v_hat does."""
    gone = 1 - beta2**step
    return gone**2 * (1 + beta2) / ((1 - beta2) * (1 - beta2 ** (2 * step)))


def simulate(setup: Setup, due: Sequence[int], advance: Callable[[], None]) -> Iterator[Row]:
    """Take the last of the steps in ``due``; yield a row for each of them and each strength.

    The mean gradient of a step is drawn from N(0, strength Phi); the sum over the batch goes
    through :class:`~comm_hooks.optim.private.GaussianMechanism`, and its release into
    :class:`~comm_hooks.optim.private.DPAdamBC`, whose second moment is read.  Its learning rate
    is 0.

    Args:
        setup: the setting.
        due: when to measure, in increasing order.
        advance: called after each step.
    """
    phi = setup.noise_variance
    shape = (len(setup.strengths), setup.coordinates)
    parameter = nn.Parameter(torch.zeros(shape))
    optimizer = DPAdamBC([("weight", parameter)], lr=0.0, betas=(0.9, setup.beta2))
    # A fixed secret: the study can be repeated, and there are no data to protect.
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
    clean_v = torch.zeros(shape)
    for step in range(1, due[-1] + 1):
        clean = scales * torch.randn(shape, generator=gradients)
        clean_v.mul_(setup.beta2).addcmul_(clean, clean, value=1 - setup.beta2)
        released = mechanism.release({"weight": setup.batch * clean})
        parameter.grad = released.tensors["weight"]
        optimizer.noise_variance = released.noise_variance
        optimizer.step()
        advance()
        if step in due:
            scale = phi * (1 - setup.beta2**step)
            v_hat = optimizer.state[parameter]["exp_avg_sq"].double() / scale
            yield from _rows(setup, step, v_hat, clean_v.double() / scale)


def _rows(setup: Setup, step: int, v_hat: torch.Tensor, clean_v: torch.Tensor) -> Iterator[Row]:
    """Yield the rows of a step, given moments in units of Phi, (strengths, coordinates)."""
    n = effective_steps(setup.beta2, step)
    bound = suggested_gamma(1.0, setup.beta2, steps=step, alpha=ALPHA)
    for strength, v, clean in zip(setup.strengths, v_hat, clean_v, strict=True):
        errors = v - 1 - clean
        yield Row(
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

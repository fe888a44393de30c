"""The regression of Section 4.1 of AdaDPS.

n = 1,000 samples of d = 500 features that are 0 or 1: the first 50 are one in 90 % of the samples
and carry a weight of 0.01, the others in 1 % and carry a weight of 1; labels have noise.  The loss
is half the mean squared error over the samples.  Side information: A = 1 for the first 50 features,
0.01 for the others.

What the paper leaves open, and what is done here:

* the labels' noise, written N(0, 0.01): its variance is 0.01, as the second argument is a variance
  wherever else the paper writes a normal distribution (the published code has a standard deviation
  of 0.01, with which AdaS ends at 0.002 instead of 0.005);
* "averaged over five runs": every seed draws its own data, batches and noise (the published code
  draws the data once);
* the start: zeros (there: normal, of standard deviation 0.1);
* the clipping norm: 0.5 as in the published code's command; it could as well be 0.1 or 10, because
  almost all gradients are longer, and then only its product with the learning rate matters;
* mini-batches "uniformly" of 8: under privacy each sample is drawn with probability 8 / 1,000 and
  the sum is divided by 8, which is what the accountant's epsilon is about (there: 8 neighbours in
  the data's order); without privacy 8 different samples;
* the run without privacy: as many steps (there: 40,000 in the plot).

The paper's epsilon, 4.13 at delta 1e-3, is that of 2,250 steps with sigma = 0.7 and sample rate
0.008 by RDP, with the conversion of Balle et al.: 4.126.

The gradient of a sample is (w x - y) x: it is computed in this form, and everything after that is
the library's: clipping, the mechanism, the optimizers.

How rare the rare features are and how large batches are can be changed, for what the theorems say
of both.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from comm_hooks.optim.private.gradients.clipping import SampleClipper

SAMPLES = 1000
FEATURES = 500
FREQUENT = 50
RARE = 0.01
BATCH = 8
LABEL_VARIANCE = 0.01


@dataclass(frozen=True)
class Problem:
    """The data of one seed: ``inputs`` of shape (1000, 500), ``labels`` of shape (1000,)."""

    inputs: torch.Tensor
    labels: torch.Tensor

    def loss(self, weight: torch.Tensor) -> float:
        """Return half the mean squared error over all samples."""
        return float((self.inputs @ weight.detach() - self.labels).square().mean() / 2)

    def gradients(self, weight: torch.Tensor, samples: torch.Tensor) -> torch.Tensor:
        """Return each sample's gradient, shape (samples, 500)."""
        x = self.inputs[samples]
        return (x @ weight.detach() - self.labels[samples])[:, None] * x


def draw(seed: int, rare: float = RARE) -> Problem:
    """Return the problem that a seed makes; ``rare`` is the rare features' share of the samples."""
    generator = torch.Generator().manual_seed(seed)
    probability = torch.full((FEATURES,), rare)
    weight = torch.ones(FEATURES)
    probability[:FREQUENT], weight[:FREQUENT] = 0.9, 0.01
    inputs = (torch.rand(SAMPLES, FEATURES, generator=generator) < probability).float()
    noise = LABEL_VARIANCE**0.5 * torch.randn(SAMPLES, generator=generator)
    return Problem(inputs, inputs @ weight + noise)


def side_information(rare: float = RARE) -> torch.Tensor:
    """Return A: what engineers know who know how frequent features are."""
    scales = torch.full((FEATURES,), rare)
    scales[:FREQUENT] = 1.0
    return scales


class ClippedRegression(SampleClipper):
    """Clipped sums of the regression's gradients.

    Args:
        problem: the data.
        weight: the parameter, shape (500,).
        max_grad_norm: C.
    """

    def __init__(self, problem: Problem, weight: nn.Parameter, max_grad_norm: float) -> None:
        super().__init__([weight], max_grad_norm)
        self._problem = problem

    def backward(self, samples: torch.Tensor, read: Any = None) -> torch.Tensor:
        """Add the clipped gradients of samples, given by their numbers; return NaN for a loss."""
        self._add_samples([self._problem.gradients(self.parameters[0], samples)])
        return torch.tensor(torch.nan)

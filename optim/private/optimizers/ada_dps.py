"""AdaDPS: gradients are preconditioned by side information before they are clipped."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch.optim.optimizer import ParamsT

from comm_hooks.config import unknown
from comm_hooks.optim.base import Group, Tensors
from comm_hooks.optim.moments import average_, average_squares_, roots
from comm_hooks.optim.private.optimizers.descent import Descent, PublicTensors, TransformedDescent
from comm_hooks.requirements import require_callable

Preconditioner = Literal["rmsprop", "adam", "adagrad"]
PRECONDITIONERS = ("rmsprop", "adam", "adagrad")


def require_gradients(owner: object, public_gradients: object) -> None:
    """Raise ``ValueError`` for gradients that are given once and for all."""
    why = ": gradients change with the parameters"
    require_callable(owner, "public_gradients", public_gradients, why)


class Preconditioned(Descent):
    """What AdaDPS and its relatives know about gradients from public sources: A and M.

    A subclass calls :meth:`_observe` once per step and :meth:`_transform` for the factors.

    Args:
        params: parameters, named parameters or parameter groups.
        defaults: of the groups; ``betas`` and ``eps`` among them.
        public_gradients: returns gradients of public data at the present parameters.
        side_information: A, the same for all steps.
        preconditioner: how A and M follow from public gradients.
    """

    def __init__(
        self,
        params: ParamsT,
        defaults: dict[str, Any],
        public_gradients: Callable[[], PublicTensors] | None,
        side_information: PublicTensors | None,
        preconditioner: Preconditioner,
    ) -> None:
        owner = type(self).__name__
        if not isinstance(preconditioner, str) or preconditioner not in PRECONDITIONERS:
            raise ValueError(
                f"{owner}: {unknown('preconditioner', preconditioner, PRECONDITIONERS)}"
            )
        if (public_gradients is None) == (side_information is None):
            raise ValueError(f"{owner}: pass either public_gradients or side_information")
        if public_gradients is not None:
            require_gradients(self, public_gradients)
        super().__init__(params, defaults)
        self.preconditioner = preconditioner
        self._public_gradients = public_gradients
        self._fixed: dict[torch.Tensor, torch.Tensor] | None = None
        if side_information is not None:
            values = self._in_order("side_information", side_information, default=1.0)
            if not all(bool((value > 0).all()) for value in values):
                raise ValueError(
                    f"{owner}: side_information must be positive: it divides gradients"
                )
            self._fixed = dict(zip(self._parameters(), values, strict=True))

    def _observe(self) -> dict[torch.Tensor, torch.Tensor]:
        """Let public gradients at the present parameters into A and M, and return them."""
        if self._public_gradients is None:
            return {}
        observed = self._in_order("public_gradients", self._public_gradients())
        public = dict(zip(self._parameters(), observed, strict=True))
        for group in self.param_groups:
            parameters, (beta1, *_, beta2) = group["params"], group["betas"]
            gradients = [public[p] for p in parameters]
            squares = self._buffers(parameters, "public_exp_avg_sq")
            if self.preconditioner == "adagrad":
                torch._foreach_addcmul_(squares, gradients, gradients)
                continue
            average_squares_(squares, gradients, beta2)
            if self.preconditioner == "adam":
                average_(self._buffers(parameters, "public_exp_avg"), gradients, beta1)
        return public

    def _transform(self, parameters: Tensors, group: Group) -> tuple[Tensors, Tensors | None]:
        """Return scale and shift for parameters of one group."""
        if self._fixed is not None:
            return [1 / self._fixed[p] for p in parameters], None
        divisors = roots(self._buffers(parameters, "public_exp_avg_sq"), group["eps"])
        scales = list(torch._foreach_reciprocal(divisors))
        if self.preconditioner != "adam":
            return scales, None
        beta1 = group["betas"][0]
        shifts = torch._foreach_mul(self._buffers(parameters, "public_exp_avg"), scales)
        torch._foreach_mul_(shifts, 1 - beta1)
        torch._foreach_mul_(scales, beta1)
        return scales, list(shifts)


class SideInformed(Preconditioned):
    """What :class:`AdaDPS` and :class:`AdaS` are made with; see there."""

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        *,
        public_gradients: Callable[[], PublicTensors] | None = None,
        side_information: PublicTensors | None = None,
        preconditioner: Preconditioner = "rmsprop",
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-3,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "momentum": momentum}
        defaults["weight_decay"] = weight_decay
        super().__init__(params, defaults, public_gradients, side_information, preconditioner)


class AdaDPS(SideInformed, TransformedDescent):
    r"""AdaDPS: each sample's gradient is divided by public side information, then clipped.

    Noise of one size in every coordinate drowns the coordinates with small gradients, and a
    preconditioner that is estimated from noised gradients shows the noise.  Here the gradients are
    preconditioned before noise comes: in the original space coordinates with larger gradients get
    more of it.  A step, g_i being the gradient of sample i, ghat that of a batch of public data,
    C the clipping norm, sigma the noise multiplier and B the public divisor:

    1. with ``public_gradients``, v = beta2 v + (1 - beta2) ghat^2 (AdaGrad: v = v + ghat^2),
       m = beta1 m + (1 - beta1) ghat, both zero at first, and A = sqrt(v) + eps; with
       ``side_information``, A is that;
    2. g_i = g_i / A ("rmsprop", "adagrad", and side information), or
       g_i = (beta1 g_i + (1 - beta1) m) / A ("adam");
    3. g = (sum_i clip(g_i, C) + N(0, sigma^2 C^2)) / B;
    4. theta = (1 - lr weight_decay) theta - lr b, with b = momentum b + g.

    Steps 2 and 3 are done by the clipper of per-sample gradients and by the mechanism: they call
    :meth:`transform` and leave g in ``p.grad``.  The update stays in the scaled space, to which C
    belongs, too: tune it anew.  The guarantee is that of DP-SGD with the same C and sigma,
    **if A and m are public**: made without private data, and the same on all ranks.

    Source: Li, Zaheer, Reddi & Smith, "Private Adaptive Optimization with Side Information", ICML
    2022, Algorithm 1.

    Differences of the published code to the paper, which is followed here: there v is estimated
    once per epoch, from the mean of squared gradients of public mini-batches, without beta2; eps
    stands under the root; gradients of 4 samples are averaged before they are clipped, which makes
    the sensitivity 2 C and the printed epsilons optimistic; token frequencies are counted in the
    training data.  The paper leaves open whether beta1 of m is that of step 2: it is here.

    Args:
        params, lr, momentum, weight_decay: see :class:`~comm_hooks.optim.private.NoisedOptimizer`.
        public_gradients: called once per step, in :meth:`transform`; returns the mean gradient of a
            batch of public data at the present parameters, by parameter name or in the order of the
            groups; see :class:`~comm_hooks.optim.private.PublicGradients`.
        side_information: A for all steps, in place of public gradients: positive tensors that
            broadcast to the parameters' shapes, by name (A = 1 for the others) or in order; see
            :func:`~comm_hooks.optim.private.token_frequency`.
        preconditioner: what is made of public gradients: "rmsprop", "adam" or "adagrad".
        betas: beta1, for "adam" only, and beta2, for "rmsprop" and "adam"; each in [0, 1).
        eps: added to sqrt(v); positive.  Where public gradients are zero, 1 / eps is the factor of
            the private ones, so one that is too small lets these coordinates take all of C.

    State per parameter: ``public_exp_avg_sq`` (v), ``public_exp_avg`` (m) for "adam",
    ``momentum_buffer`` (b) with momentum.  Side information is no state: pass it again.

    Raises:
        ValueError: for side information or public gradients that do not fit the parameters or are
            not finite.
        RuntimeError: from :meth:`step` if :meth:`transform` was not called since the last one.

    Example::

        >>> from comm_hooks.optim.private.optimizers.ada_dps import AdaDPS
        >>> from comm_hooks.optim.private.optimizers.public_knowledge import token_frequency
        >>> counts = torch.tensor([900, 500, 80, 40, 20, 3, 2, 1])  # public
        >>> scales = {"weight": token_frequency(counts)}
        >>> optimizer = AdaDPS(model.named_parameters(), lr=0.5, side_information=scales)
        >>> transform = optimizer.transform()  # the engine does this
        >>> transform.scale[0][0]
        tensor([  1.0000,   1.8000,  11.2500,  22.5000,  45.0000, 100.0000, 100.0000,
                100.0000])
    """

    def _prepare(self) -> bool:
        self._observe()
        return True


class AdaS(SideInformed):
    """AdaDPS without privacy: SGD on gradients that side information preconditions.

    As :class:`AdaDPS`, without clipping, noise and per-sample gradients: step 2 is done to the mean
    gradient in ``p.grad``.  A cheap alternative to adaptive methods where side information is at
    hand, the upper bound of what AdaDPS can reach, and the clients' optimizer in federated AdaDPS
    (Algorithm 3), where deltas are clipped and noised instead of gradients.

    Not for private training: under a :class:`~comm_hooks.optim.private.PrivacyEngine` it would
    precondition what is noised already, as :class:`~comm_hooks.optim.private.DPRPub` does.

    Source: Li et al., ICML 2022, Figures 1 and 3, Table 9.

    Arguments, state and errors are those of :class:`AdaDPS`.

    Example::

        >>> from comm_hooks.optim.private.optimizers.ada_dps import AdaS
        >>> scales = {"weight": torch.linspace(0.01, 1.0, 8)}
        >>> optimizer = AdaS(model.named_parameters(), lr=0.01, side_information=scales)
        >>> model(torch.ones(1, 8)).square().sum().backward()
        >>> optimizer.step()
    """

    def _begin_step(self) -> None:
        self._observe()

    def _directions(self, parameters: Tensors, gradients: Tensors, group: Group) -> Tensors:
        scales, shifts = self._transform(parameters, group)
        directions = list(torch._foreach_mul(gradients, scales))
        if shifts is not None:
            torch._foreach_add_(directions, shifts)
        return directions

"""AdaDPS: per-sample gradients are divided by public side information before clipping."""

from collections.abc import Callable
from typing import ClassVar

from torch.optim.optimizer import ParamsT

from comm_hooks.optim.private.optimizers.descent import Accumulator, PublicDescent, PublicTensors


class AdaDPS(PublicDescent):
    r"""AdaDPS: divides each sample's gradient by public side information, before it is clipped.

    Noise of one size in every coordinate drowns the coordinates with small gradients, and a
    preconditioner that is estimated from noised gradients shows the noise.  Here the gradients are
    preconditioned before the noise is added: in the original space coordinates with larger
    gradients get more noise.  With g_i the gradient of sample i, ghat that of a batch of public
    data, C the clipping norm, sigma the noise multiplier and B the public divisor, a step is

    1. with ``public_gradients``, v = beta2 v + (1 - beta2) ghat^2 (AdaGrad: v = v + ghat^2),
       m = beta1 m + (1 - beta1) ghat, both zero at first, and A = sqrt(v) + eps; with
       ``side_information``, A is the side information;
    2. g_i = g_i / A ("rmsprop", "adagrad", and side information), or
       g_i = (beta1 g_i + (1 - beta1) m) / A ("adam");
    3. g = (sum_i clip(g_i, C) + N(0, sigma^2 C^2)) / B;
    4. theta = (1 - lr weight_decay) theta - lr b, with b = momentum b + g.

    The clipper of per-sample gradients and the mechanism do steps 2 and 3: they call
    :meth:`transform` and leave g in ``p.grad``.  The update stays in the scaled space, to which C
    belongs, too: tune it anew.  The guarantee is that of DP-SGD with the same C and sigma,
    **if A and m are public**: made without private data, and the same on all ranks.

    Source: Li, Zaheer, Reddi & Smith, "Private Adaptive Optimization with Side Information", ICML
    2022, Algorithm 1.

    This class follows the paper.  The published code differs: v is estimated once per epoch, from
    the mean of squared gradients of public mini-batches, without beta2; eps stands under the root;
    gradients of 4 samples are averaged before they are clipped, which makes the sensitivity 2 C
    and the printed epsilons optimistic; token frequencies are counted in the training data.  The
    paper does not define beta1 of m; here it is that of step 2.

    Args:
        params, lr, momentum, weight_decay: see :class:`~comm_hooks.optim.private.NoisedOptimizer`.
        public_gradients: a function, called once per step by :meth:`transform`, that returns the
            mean gradient of a batch of public data, by parameter name; see
            :class:`~comm_hooks.optim.private.PublicGradients`.
        side_information: A for all steps, in place of public gradients: positive tensors that
            broadcast to the parameters' shapes, by name (A = 1 for the others); see
            :func:`~comm_hooks.optim.private.token_frequency`.
        preconditioner: how A follows from public gradients: "rmsprop", "adam" or "adagrad".
        betas: beta1, for "adam" only, and beta2, for "rmsprop" and "adam"; each in [0, 1).
        eps: added to sqrt(v); positive.  Where public gradients are zero, private ones are
            multiplied by 1 / eps, so a small eps lets these coordinates take all of C.

    State per parameter: ``public_exp_avg_sq`` (v), ``public_exp_avg`` (m) for "adam",
    ``momentum_buffer`` (b) with momentum.  Side information is no state: pass it again.

    Raises:
        ValueError: for side information or public gradients that do not fit or are not finite.

    Example::

        >>> import torch
        >>> from comm_hooks.optim.private import AdaDPS, token_frequency
        >>> counts = torch.tensor([900, 500, 80, 40, 20, 3, 2, 1])  # public
        >>> scales = {"weight": token_frequency(counts)}
        >>> optimizer = AdaDPS(model.named_parameters(), lr=0.5, side_information=scales)
        >>> transform = optimizer.transform()  # the engine does this
        >>> transform.scale[0][0]
        tensor([  1.0000,   1.8000,  11.2500,  22.5000,  45.0000, 100.0000, 100.0000,
                100.0000])
    """

    _scales_before_clipping: ClassVar[bool] = True

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        *,
        public_gradients: Callable[[], PublicTensors] | None = None,
        side_information: PublicTensors | None = None,
        preconditioner: Accumulator = "rmsprop",
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-3,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(
            params,
            public_gradients,
            side_information,
            preconditioner,
            lr=lr,
            betas=betas,
            eps=eps,
            momentum=momentum,
            weight_decay=weight_decay,
        )


class AdaS(AdaDPS):
    """AdaDPS without privacy: SGD on gradients divided by public side information.

    As :class:`AdaDPS`, without clipping, noise and per-sample gradients: step 2 is applied to the
    mean gradient in ``p.grad``.  A cheap alternative to adaptive methods where side information is
    at hand, the upper bound for AdaDPS, and the clients' optimizer in federated AdaDPS
    (Algorithm 3), where clients' parameter changes are clipped and noised instead of gradients.

    Not for private training: under a :class:`~comm_hooks.optim.private.PrivacyEngine` it would
    precondition noised gradients.

    Source: Li et al., ICML 2022, Figures 1 and 3, Table 9.

    Arguments, state and errors are those of :class:`AdaDPS`.

    Example::

        >>> import torch
        >>> from comm_hooks.optim.private import AdaS
        >>> scales = {"weight": torch.linspace(0.01, 1.0, 8)}
        >>> optimizer = AdaS(model.named_parameters(), lr=0.01, side_information=scales)
        >>> model(torch.ones(1, 8)).square().sum().backward()
        >>> optimizer.step()
    """

    _scales_before_clipping: ClassVar[bool] = False

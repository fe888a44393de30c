"""MARINA: exact gradients at random steps; at all others, compressed differences of gradients."""

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch.optim.optimizer import ParamsT

from comm_hooks.exchange import Exchange
from comm_hooks.optim.base import Tensors, block
from comm_hooks.optim.exchanging import ExchangingOptimizer
from comm_hooks.optim.moments import count_step, values
from comm_hooks.randomness import derive_key, random_unit
from comm_hooks.requirements import require_within

COIN = "<coin>"


class Marina(ExchangingOptimizer):
    r"""SGD along an estimate of the gradient, which is updated by compressed differences.

    MARINA (Gorbunov et al., ICML 2021, algorithm 1; on minibatches: VR-MARINA's online form, except
    that exact steps take the closure's minibatch, not a larger one).  Differences of gradients
    shrink with the steps, and so does the compressor's noise, without error feedback.  With
    :class:`~comm_hooks.PermK` (Szlendak et al., ICLR 2022) it costs 1/N of the elements and no
    indices, and is exact where the ranks' differences agree.

    g is the estimate, the same on all ranks.  The first step sets g = mean_i grad_i(x), exactly,
    and leaves x where it is.  Every later step, on its minibatch:

    1. x' = (1 - lr weight_decay) x - lr g;
    2. all ranks draw the same coin c ~ Bernoulli(p);
    3. if c: g = mean_i grad_i(x'), exactly; else g = g + mean_i Q(grad_i(x') - grad_i(x));
    4. x = x'.

    A step's gradient moves x in the next: with ``p=1`` step t + 1 is step t of gradient descent.

    The closure is called twice where c is 0, at x and then at x', with the same state of torch's
    random number generators, so that dropout drops the same; random numbers from elsewhere it must
    repeat itself.  It sees zeroed gradients.  Side effects (the running statistics of batch
    normalization) happen twice.

    If any rank's gradients are not finite, all ranks return to x and keep g; the next minibatch
    tries the same x' again.

    Args:
        params, weight_decay: see :class:`~comm_hooks.optim.exchanging.ExchangingOptimizer`.
        exchange: an exchange with an unbiased compressor (PermK, RandomK, sketches, Identity,
            Quantize(stochastic=True)), and memory=None.
        lr: learning rate.  Theory: 1 / (L (1 + sqrt((1 - p) omega / (p N)))), with omega the
            compressor's relative mean squared error.
        p: the probability of an exact gradient, in (0, 1].  The traffic of both kinds of steps is
            equal in the mean for p = payload / uncompressed.

    State per parameter: ``estimate`` (g).

    Cost: the exchange and up to two forward and backward passes.  Temporary memory: a copy of
    the parameters and one of the gradients.

    Raises:
        ValueError: in a step without a closure, or with one that returns None; nothing is changed.

    Not supported: ``GradScaler`` (which refuses closures).

    Example::

        >>> from comm_hooks import PermK, skip_hook
        >>> ddp_model.register_comm_hook(None, skip_hook)
        >>> optimizer = Marina(ddp_model.named_parameters(), Exchange(PermK()), lr=0.1, p=0.1)
        >>> minibatch = torch.randn(4, 8)
        >>> def closure():
        ...     optimizer.zero_grad()
        ...     loss = ddp_model(minibatch).square().mean()
        ...     loss.backward()
        ...     return loss
        >>> loss = optimizer.step(closure)
    """

    published = block(compressor="perm_k")

    def __init__(
        self, params: ParamsT, exchange: Exchange, *, lr: float, p: float, weight_decay: float = 0.0
    ) -> None:
        require_within(self, "p", p, "(0, 1]")
        super().__init__(params, exchange, {"lr": lr, "weight_decay": weight_decay}, p=p)
        if not exchange.compressor.unbiased:
            raise ValueError(
                f"Marina: the compressor must be unbiased, because errors of differences add up; "
                f"got {exchange.compressor}"
            )
        if exchange.memory is not None:
            raise ValueError(
                f"Marina: differences need no error feedback; use memory=None, not "
                f"{exchange.memory}"
            )
        self.p = p

    def _step_with(self, closure: Callable[[], float] | None) -> float | None:
        if closure is None:
            raise ValueError(
                "Marina: step() needs a closure that computes the gradients of one minibatch, "
                "because a step may need them at two points"
            )
        states = self._states("estimate")
        is_first = int(states[0]["step"]) == 0
        key = derive_key(self.exchange.settings.seed, self.exchange.step, COIN)
        is_exact = is_first or bool(random_unit([key], 1)[0, 0] < self.p)
        old = None
        if not is_exact:
            with self._random_numbers_kept():
                _, old = self._evaluate(closure)
        parameters = self._parameters()
        before = [p.clone() for p in parameters]
        try:
            if not is_first:
                self._descend(values(states, "estimate"))
            loss, gradients = self._evaluate(closure)
            self._step(gradients, old, before)
        except BaseException:
            torch._foreach_copy_(parameters, before)
            raise
        return loss

    def _step(
        self, gradients: Tensors, old: Tensors | None = None, before: Tensors | None = None
    ) -> None:
        """Update the estimate g from the gradients at x', or return to x if any is not finite.

        ``old`` are the gradients at ``before``, that is x; None for an exact step.
        """
        if old is not None:
            torch._foreach_sub_(gradients, old)
        is_raw = old is None
        if not self._average(self._named(gradients), compress=not is_raw, is_raw=is_raw):
            if before is not None:
                torch._foreach_copy_(self._parameters(), before)
            return
        states = self._states("estimate")
        estimate = values(states, "estimate")
        if old is None:
            torch._foreach_copy_(estimate, gradients)
        else:
            torch._foreach_add_(estimate, gradients)
        count_step(states)

    def _evaluate(self, closure: Callable[[], float]) -> tuple[float, Tensors]:
        self.zero_grad()
        with torch.enable_grad():
            loss = closure()
        if loss is None:
            raise ValueError(
                "Marina: the closure returned None; it must call backward() and return the loss"
            )
        return loss, self._gradients()

    def _random_numbers_kept(self) -> AbstractContextManager[None]:
        """Return a context that restores torch's random number generators at its end."""
        devices = {p.device for p in self._parameters() if p.device.type != "cpu"}
        kinds = {device.type for device in devices}
        return torch.random.fork_rng(
            [device.index for device in devices], device_type=kinds.pop() if kinds else "cuda"
        )

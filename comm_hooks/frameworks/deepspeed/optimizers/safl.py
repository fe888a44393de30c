"""SAFL with one local step per round: an adaptive server on sketched gradients."""

from torch.optim.optimizer import ParamsT

from comm_hooks.optim import AMSGrad
from comm_hooks.requirements import require_positive


class SAFL(AMSGrad):
    """What :class:`comm_hooks.optim.SAFL` does with one local step per round, without a round.

    One local step of size ``local_lr`` moves a client by ``local_lr`` times its gradient, so the
    server sees ``local_lr`` times the mean of the sketched gradients.  AMSGrad's step is the same
    for the gradients themselves with ``eps / local_lr`` for ``eps``: an ordinary optimizer behind
    an exchange that averages gradients, with replicas that never differ.

    Args:
        params: parameters, named parameters or parameter groups.
        lr: the server's learning rate (kappa).
        local_lr: the clients' (eta); it only scales ``eps``.
        local_steps: 1.  More are rounds, see :class:`comm_hooks.optim.SAFL`.
        betas, eps, weight_decay: the server's.
        amsgrad: False for Adam on the server.

    State, cost and what is not supported: see :class:`~comm_hooks.optim.AMSGrad`.

    Raises:
        ValueError: for hyperparameters out of range, and for ``local_steps`` other than 1.

    Example::

        >>> optimizer = SAFL(model.parameters(), lr=1e-3, local_lr=0.1)
        >>> optimizer.param_groups[0]["eps"]
        1e-07
    """

    def __init__(
        self,
        params: ParamsT,
        *,
        lr: float = 1e-3,
        local_lr: float = 0.1,
        local_steps: int = 1,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = True,
    ) -> None:
        require_positive(self, "local_steps", local_steps)
        if local_steps > 1:
            raise ValueError(
                f"SAFL: local_steps must be 1, got {local_steps}: more are rounds, between which "
                "replicas differ and the engine would evaluate and save rank 0's; use "
                "comm_hooks.optim.SAFL without DeepSpeed"
            )
        if isinstance(local_lr, bool) or not isinstance(local_lr, int | float) or not local_lr > 0:
            raise ValueError(f"SAFL: local_lr must be positive, got {local_lr!r}")
        if not isinstance(amsgrad, bool):
            raise ValueError(f"SAFL: amsgrad must be true or false, got {amsgrad!r}")
        self._amsgrad = amsgrad
        super().__init__(params, lr, betas=betas, eps=eps / local_lr, weight_decay=weight_decay)

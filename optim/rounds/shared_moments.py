"""The local optimizers of Fed-AMS and FED-LAMB: own moments, and a shared maximum of v."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim.optimizer import ParamsT

from comm_hooks.optim.base import BatchedOptimizer, Group, Tensors, widened
from comm_hooks.optim.hyperparameters import check_hyperparameters
from comm_hooks.optim.moments import averages_, corrected, count_step, prepared, values
from comm_hooks.requirements import require_choice


def check_clients(owner: object, *, bound: str = "server", **hyperparameters: Any) -> None:
    """Raise ``ValueError`` for invalid hyperparameters of LocalAMSGrad or LocalLAMB."""
    check_hyperparameters(owner, **hyperparameters)
    if not hyperparameters["eps"] > 0:
        raise ValueError(f"{type(owner).__name__}: eps must be positive: v_hat starts at eps")
    require_choice(owner, "bound", bound, ("server", "client"))


class LocalAMSGrad(BatchedOptimizer):
    """AMSGrad on one client, with step lengths bounded by a v_hat that all clients share.

    Chen, Li & Li, "Toward communication efficient adaptive gradient method" (FODS 2020), where it
    is called local AMSGrad.  v_hat is a maximum of second moments, constant during a round.  In
    this client's local step t, with gradient g:

    1. m = beta1 m + (1 - beta1) g;  m' = m, or m / (1 - beta1^t) with ``bias_correction``;
    2. v = beta2 v + (1 - beta2) g^2;  v' = v, or v / (1 - beta2^t);
    3. p = m' / sqrt(v_hat + eps), or m' / sqrt(max(v_hat, v') + eps) with ``bound="client"``;
    4. theta = theta - lr (p + weight_decay theta).

    At the end of a round v_hat = max(v_hat, mean of the clients' v'); v_hat and v start at eps.

    So v_hat is eps in the first round, and steps as published are those of SGD with momentum and a
    learning rate of lr / sqrt(2 eps), 7071 lr by default.  With ``bound="client"`` a first step has
    the length (1 - beta1) / sqrt(1 - beta2) lr = 3.16 lr; with ``bias_correction``, too, it has the
    length lr, as in Adam.

    Args:
        params: parameters, better named.
        lr: learning rate.
        betas: decay rates of the first and the second moment, each in [0, 1).
        eps: added *under* the root, where v starts too.
        weight_decay: decoupled weight decay, as in AdamW.
        bias_correction: see steps 1 and 2.
        bound: ``"server"`` or ``"client"``, see step 3.

    Raises:
        ValueError: for hyperparameters out of range.

    State per parameter: ``step``, ``exp_avg``, ``exp_avg_sq``, this client's own m and v, not
    corrected; and v_hat, which :class:`~comm_hooks.optim.LocalRounds` keeps equal on all clients.

    Not supported: sparse gradients; exchanging v compressed.

    Example::

        >>> from comm_hooks.optim.rounds.shared_moments import LocalAMSGrad
        >>> optimizer = LocalAMSGrad(model.named_parameters(), lr=1e-3)
    """

    def __init__(
        self,
        params: ParamsT,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        bias_correction: bool = False,
        bound: str = "server",
    ) -> None:
        check_clients(self, bound=bound, eps=eps, bias_correction=bias_correction)
        self.bias_correction = bias_correction
        self.bound = bound
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        )
        self._v_hat: dict[torch.Tensor, torch.Tensor] = {
            p: torch.full_like(p, group["eps"], dtype=torch.float32)
            for group in self.param_groups
            for p in group["params"]
        }

    @property
    def _maxima(self) -> dict[torch.Tensor, torch.Tensor]:
        """The shared v_hat by parameter, on the parameter's device, which frameworks may change."""
        self._v_hat = {p: v.to(p.device) for p, v in self._v_hat.items()}
        return self._v_hat

    def _check_group(self, settings: Group) -> None:
        check_clients(self, **settings)

    def _update(self, parameters: Tensors, group: Group) -> None:
        directions = self._directions(parameters, group)
        torch._foreach_add_(directions, parameters, alpha=group["weight_decay"])
        self._move(parameters, directions, group)

    def statistics(self) -> dict[str, torch.Tensor]:
        """Return this client's second moments v', as ``{"v.0": ..., ...}`` by parameter index."""
        own = [v for g in self.param_groups for v in self._second_moments(g["params"], g)]
        return {f"v.{place}": v.clone() for place, v in enumerate(own)}

    def set_statistics(self, mean: Mapping[str, torch.Tensor]) -> None:
        """Set v_hat to the maximum of v_hat and ``mean``, the mean of the clients' v'."""
        means = [mean[f"v.{place}"] for place in range(len(self._v_hat))]
        torch._foreach_maximum_(list(self._maxima.values()), means)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as torch's optimizers do, with v_hat as a list of tensors."""
        return {**super().state_dict(), "v_hat": [v.clone() for v in self._v_hat.values()]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the result of :meth:`state_dict`."""
        state_dict = dict(state_dict)
        v_hat = zip(self._v_hat, state_dict.pop("v_hat"), strict=True)
        self._v_hat = {p: v.to(p.device, torch.float32, copy=True) for p, v in v_hat}
        super().load_state_dict(state_dict)

    def _states(self, parameters: Tensors, group: Group) -> list[dict[str, Any]]:
        states = [self.state[p] for p in parameters]
        prepared(states, parameters, torch.float32, "exp_avg")
        for parameter, state in zip(parameters, states, strict=True):
            if "exp_avg_sq" not in state:
                eps = group["eps"]
                state["exp_avg_sq"] = torch.full_like(parameter, eps, dtype=torch.float32)
        return states

    def _directions(self, parameters: Tensors, group: Group) -> Tensors:
        states = self._states(parameters, group)
        count_step(states)
        gradients = widened([p.grad for p in parameters], torch.float32)
        m, _ = averages_(states, gradients, group["betas"])
        v_hat = self._maxima
        bounds = list(torch._foreach_add([v_hat[p] for p in parameters], group["eps"]))
        if self.bound == "client":
            own = self._second_moments(parameters, group)
            torch._foreach_maximum_(bounds, torch._foreach_add(own, group["eps"]))
        directions = list(torch._foreach_div(m, torch._foreach_sqrt(bounds)))
        if self.bias_correction:
            steps = [int(s["step"]) for s in states]
            directions = corrected(directions, group["betas"][0], steps)
        return directions

    def _second_moments(self, parameters: Tensors, group: Group) -> Tensors:
        """Return this client's second moments v' (step 2 of the class), eps before any step."""
        states = self._states(parameters, group)
        v = values(states, "exp_avg_sq")
        if not self.bias_correction:
            return v
        beta2 = group["betas"][1]
        corrections = [1 - beta2 ** int(s["step"]) if s["step"] else 1.0 for s in states]
        return list(torch._foreach_div(v, corrections))

    def _move(self, parameters: Tensors, directions: Tensors, group: Group) -> None:
        torch._foreach_add_(parameters, directions, alpha=-group["lr"])


class LocalLAMB(LocalAMSGrad):
    """LAMB on one client, with a maximum v_hat that all clients share: FED-LAMB's local step.

    Karimi, Li & Li, UAI 2023, Algorithm 2, lines 6 to 13.  Steps 1 to 3 are those of
    :class:`LocalAMSGrad` with ``bias_correction``; then per layer, which is a parameter tensor:

    4. ``theta = theta - lr phi(|theta|) (p + weight_decay theta) / |p + weight_decay theta|``.

    A layer with a norm or direction of zero takes the step of :class:`LocalAMSGrad` instead (as in
    LAMB): with phi(0) = 0 a bias that starts at zero would otherwise never move.

    Args:
        phi: a function from the layers' norms to the positive lengths of their steps, (layers,) to
            (layers,); by default the identity.
        params, lr, betas, eps, weight_decay, bound: see :class:`LocalAMSGrad`.

    Raises:
        ValueError: for hyperparameters out of range, and if phi is not positive for the layers'
            norms at the start.

    Not supported: see :class:`LocalAMSGrad`.

    Example::

        >>> from comm_hooks.optim.rounds.shared_moments import LocalLAMB
        >>> optimizer = LocalLAMB(model.named_parameters(), phi=lambda norm: norm.clamp(0.01, 10))
    """

    def __init__(
        self,
        params: ParamsT,
        *,
        phi: Callable[[torch.Tensor], torch.Tensor] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(params, bias_correction=True, **settings)
        self.phi = (lambda norms: norms) if phi is None else phi
        norms = torch.stack([torch.linalg.vector_norm(p.detach().float()) for p in self._v_hat])
        scales = self.phi(norms)
        if not bool((scales[norms > 0] > 0).all()) or bool((scales < 0).any()):
            raise ValueError(
                f"LocalLAMB: phi must be positive, but for layers of norms {norms.tolist()} it is "
                f"{scales.tolist()}"
            )

    def _move(self, parameters: Tensors, directions: Tensors, group: Group) -> None:
        scales = self.phi(torch.stack(torch._foreach_norm(parameters)))
        norms = torch.stack(torch._foreach_norm(directions))
        ratios = torch.where((scales > 0) & (norms > 0), scales / norms, 1.0)
        torch._foreach_mul_(directions, list(ratios.unbind()))
        super()._move(parameters, directions, group)

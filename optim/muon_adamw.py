"""Muon for hidden matrices and an optimizer of the Adam family for the rest, as one optimizer."""

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from comm_hooks.optim.base import ExactStateOptimizer
from comm_hooks.optim.hyperparameters import check_hyperparameters
from comm_hooks.optim.muon import Muon
from comm_hooks.requirements import require_callable

# Embeddings and output layers by the names that libraries give them, between dots and underscores.
_NOT_HIDDEN = re.compile(
    r"(^|[._])(\w*emb\w*|wte|wpe|tokens?|positions?|(lm_)?head|classif\w*|logits|vocab\w*|unembed)"
    r"([._]|$)",
    re.IGNORECASE,
)


def is_hidden_matrix(name: str, parameter: torch.Tensor) -> bool:
    """Return whether a parameter is a matrix between hidden states, by its shape and name.

    Example::

        >>> matrix = torch.ones(4, 8)
        >>> names = ["blocks.0.mlp_in.weight", "lm_head.weight", "tokens.weight", "heads.0.weight"]
        >>> [is_hidden_matrix(name, matrix) for name in names]
        [True, False, False, True]
    """
    return parameter.ndim == 2 and not _NOT_HIDDEN.search(name)


class MuonAdamW(ExactStateOptimizer):
    """Muon for hidden matrices; AdamW for embeddings, the output layer, norms and biases.

    Muon (Jordan et al., 2024) orthogonalizes the momentum of a matrix, by Newton and Schulz's
    iteration, here of all matrices of one shape together: in bfloat16 on accelerators, in float32
    on CPUs.  Its steps are scaled to the root mean square of AdamW's (Liu et al., "Muon is Scalable
    for LLM Training", 2025, section 2.2), so that both share a learning rate and a weight decay.

    Args:
        named_parameters: ``model.named_parameters()``.
        lr: the learning rate of both optimizers.
        betas, eps: AdamW's settings.
        momentum: the decay rate of Muon's momentum, of Nesterov's kind.
        weight_decay: the decoupled weight decay of both optimizers.
        hidden: a function of name and tensor: whether Muon takes a parameter, a matrix.
        rest: the class of the other optimizer, which must take the arguments of AdamW.

    State: Muon's ``momentum_buffer`` in float32, and the state of the other optimizer.  Muon has
    the first parameter group.

    Raises:
        ValueError: for hyperparameters out of range, if one of the two would have no parameters,
            and for hidden parameters that are no matrices.

    Not supported: anything that one of the two does not support; groups added later.

    Example::

        >>> from comm_hooks.optim import MuonAdamW
        >>> optimizer = MuonAdamW(model.named_parameters(), lr=1e-3)
        >>> model(torch.ones(1, 8)).square().sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        hidden: Callable[[str, torch.Tensor], bool] = is_hidden_matrix,
        rest: Callable[..., Optimizer] = AdamW,
    ) -> None:
        settings: Any = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        check_hyperparameters(self, **settings, momentum=momentum)
        require_callable(self, "hidden", hidden)
        require_callable(self, "rest", rest)
        named = list(named_parameters)
        matrices = [(name, p) for name, p in named if hidden(name, p)]
        others = [(name, p) for name, p in named if not hidden(name, p)]
        for kind, members in {"hidden matrix": matrices, "other parameter": others}.items():
            if not members:
                raise ValueError(f"MuonAdamW: there is no {kind}: use AdamW or Muon alone")
        self._muon = Muon(matrices, lr=lr, momentum=momentum, weight_decay=weight_decay)
        self._rest = rest(others, **settings)
        super().__init__([*self._muon.param_groups, *self._rest.param_groups], {"lr": lr})
        self._share()

    def _share(self) -> None:
        """Let the two inner optimizers use the groups and the state of this optimizer."""
        self._muon.param_groups = self.param_groups[:1]
        self._rest.param_groups = self.param_groups[1:]
        self._muon.state = self._rest.state = self.state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the result of ``state_dict()``, in the dtypes in which it was saved."""
        super().load_state_dict(state_dict)
        self._share()

    def _take_step(self) -> None:
        self._muon.step()
        self._rest.step()

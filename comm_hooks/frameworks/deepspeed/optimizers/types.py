"""The names that ``optimizer.type`` may have, and what each of them stands for."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from comm_hooks.frameworks.deepspeed.optimizers.safl import SAFL
from comm_hooks.optim import (
    DGC,
    EF21,
    AMSGrad,
    CDAdam,
    CocktailSGD,
    CompressedAdam,
    DeMo,
    FetchSGD,
    FrozenVarianceAdam,
    LocalVarianceAdam,
    MicroAdam,
    OneBitAdam,
    OneBitLamb,
    ZeroOneAdam,
)

# Names that DeepSpeed's own optimizers took, and that decide nothing here; read and not used there
# already, but for the two of the communication backend.
_DEEPSPEED_ONLY = (
    "cuda_aware",
    "comm_backend_name",
    "bias_correction",
    "eps_inside_sqrt",
)


@dataclass(frozen=True)
class OptimizerType:
    """One name.

    Attributes:
        optimizer: the class whose keyword arguments are the ``params``.
        needed: the keys of the published exchange that a user's block gets where it says nothing,
            because the optimizer works with nothing else.
        defaults: of ``params``, where they differ from the class's.
        ignored: ``params`` that are accepted and change nothing.
        refused: ``params`` that must not be true, and why.
        needs_block: whether a configuration without a ``comm_hooks`` block is a mistake.
        in_parts: what takes the optimizer's place where ZeRO keeps its state in parts (stages 1 and
            2).  The engine averages its gradients through the published exchange, exactly until
            ``freeze_step``.  None if there is nothing.
    """

    optimizer: type[torch.optim.Optimizer]
    needed: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    needs_block: bool = False
    in_parts: type[torch.optim.Optimizer] | None = None

    @property
    def exchange(self) -> Mapping[str, Any] | None:
        """The ``comm_hooks`` block of an optimizer that owns its exchange, as published.

        None for one that works on gradients which were averaged before.
        """
        return getattr(self.optimizer, "published", None)

    @property
    def needs(self) -> Mapping[str, Any]:
        """What a user's block gets in addition."""
        return {key: (self.exchange or {})[key] for key in self.needed}


_DEEPSPEED_REFUSED = {
    "amsgrad": "there is no AMSGrad variant, as in DeepSpeed: use CDAdam, which is AMSGrad",
    "max_grad_norm": "use gradient_clipping at the top level, as in DeepSpeed",
}
TYPES: Mapping[str, OptimizerType] = {
    "OneBitAdam": OptimizerType(
        OneBitAdam,
        defaults={"freeze_step": 100_000},
        ignored=_DEEPSPEED_ONLY,
        refused=_DEEPSPEED_REFUSED,
        in_parts=FrozenVarianceAdam,
    ),
    "OneBitLamb": OptimizerType(
        OneBitLamb,
        defaults={"freeze_step": 100_000},
        ignored=_DEEPSPEED_ONLY,
        refused={**_DEEPSPEED_REFUSED, "amsgrad": "there is no AMSGrad variant, as in DeepSpeed"},
    ),
    "ZeroOneAdam": OptimizerType(
        ZeroOneAdam,
        defaults={"var_freeze_step": 100_000},
        ignored=_DEEPSPEED_ONLY,
        refused=_DEEPSPEED_REFUSED,
    ),
    "CompressedAdam": OptimizerType(CompressedAdam),
    "LocalVarianceAdam": OptimizerType(LocalVarianceAdam),
    "CDAdam": OptimizerType(CDAdam, needed=("memory",)),
    "EF21": OptimizerType(EF21, needed=("memory",)),
    "MicroAdam": OptimizerType(MicroAdam, needed=("memory", "collective")),
    "CocktailSGD": OptimizerType(CocktailSGD),
    "DGC": OptimizerType(DGC, needed=("memory",)),
    "DeMo": OptimizerType(DeMo, needed=("memory",)),
    "FetchSGD": OptimizerType(FetchSGD),
    "SAFL": OptimizerType(SAFL, needs_block=True),
    "AMSGrad": OptimizerType(AMSGrad),
    "FrozenVarianceAdam": OptimizerType(FrozenVarianceAdam, needs_block=True),
    # AdamW under a name that DeepSpeed refuses where comm-hooks was forgotten.
    "CommHooksAdamW": OptimizerType(torch.optim.AdamW, needs_block=True),
}

_ROUND_TYPES = ("LocalRounds", "DiLoCo", "MuLoCo", "SparseLoCo", "FedAvg", "FedAMS", "FedLAMB")
_ROUNDS = (
    "it works in rounds of local steps, which the comm_hooks block asks for: "
    '{{"method": "low_communication"}} beside "type": "CommHooksAdamW"; or pass '
    "comm_hooks.optim.{name} to initialize(optimizer=...)"
)
REFUSED: Mapping[str, str] = {
    "Marina": "it needs the gradients of a minibatch at two points, for which the engine calls "
    "backward() once: use EF21, or comm_hooks.optim.Marina without DeepSpeed",
    "LocalAdamW": _ROUNDS.format(name="LocalRounds"),
    **{name: _ROUNDS.format(name=name) for name in _ROUND_TYPES},
}

"""What happens to the aggregate.

Server optimizers work on ``p.grad`` after any hook (:class:`Adam`, :class:`AMSGrad`); others own
the exchange and send something else than gradients; :class:`LocalRounds` and its kinds work for
several steps before they exchange.
"""

from comm_hooks.optim.adam import Adam, AMSGrad
from comm_hooks.optim.cocktail_sgd import CocktailSGD
from comm_hooks.optim.compressed_adam import CompressedAdam
from comm_hooks.optim.demo import DeMo
from comm_hooks.optim.dgc import DGC
from comm_hooks.optim.ef21 import EF21, CDAdam
from comm_hooks.optim.fetch_sgd import FetchSGD
from comm_hooks.optim.frozen_variance_adam import FrozenVarianceAdam
from comm_hooks.optim.laprop import LaProp
from comm_hooks.optim.local_variance_adam import LocalVarianceAdam
from comm_hooks.optim.low_communication import low_communication
from comm_hooks.optim.marina import Marina
from comm_hooks.optim.micro_adam import MicroAdam
from comm_hooks.optim.muon_adamw import MuonAdamW
from comm_hooks.optim.one_bit_adam import OneBitAdam
from comm_hooks.optim.one_bit_lamb import OneBitLamb
from comm_hooks.optim.rounds import (
    SAFL,
    DiLoCo,
    FedAMS,
    FedAvg,
    FedLAMB,
    LocalRounds,
    MuLoCo,
    Participation,
    SparseLoCo,
)
from comm_hooks.optim.zero_one_adam import ZeroOneAdam

__all__ = [
    "AMSGrad",
    "Adam",
    "CDAdam",
    "CocktailSGD",
    "CompressedAdam",
    "DGC",
    "DeMo",
    "DiLoCo",
    "EF21",
    "FedAMS",
    "FedAvg",
    "FedLAMB",
    "FetchSGD",
    "FrozenVarianceAdam",
    "LaProp",
    "LocalRounds",
    "LocalVarianceAdam",
    "Marina",
    "MicroAdam",
    "MuLoCo",
    "MuonAdamW",
    "OneBitAdam",
    "OneBitLamb",
    "Participation",
    "SAFL",
    "SparseLoCo",
    "ZeroOneAdam",
    "low_communication",
]

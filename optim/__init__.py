"""Optimizers: the way from the average over ranks to the next parameters.

Server optimizers work on ``p.grad`` after any hook (:class:`Adam`, :class:`AMSGrad`); others own
their exchange and send momenta, differences or sketches in place of gradients; :class:`LocalRounds`
and its subclasses take several local steps before they exchange.
"""

from comm_hooks.optim.adam import Adam, AMSGrad
from comm_hooks.optim.laprop import LaProp
from comm_hooks.optim.local_variance_adam import LocalVarianceAdam
from comm_hooks.optim.low_communication import low_communication
from comm_hooks.optim.muon_adamw import MuonAdamW
from comm_hooks.optim.published.cocktail_sgd import CocktailSGD
from comm_hooks.optim.published.demo import DeMo
from comm_hooks.optim.published.dgc import DGC
from comm_hooks.optim.published.ef21 import EF21, CDAdam
from comm_hooks.optim.published.fetch_sgd import FetchSGD
from comm_hooks.optim.published.marina import Marina
from comm_hooks.optim.published.micro_adam import MicroAdam
from comm_hooks.optim.published.one_bit_adam import OneBitAdam
from comm_hooks.optim.published.one_bit_lamb import OneBitLamb
from comm_hooks.optim.published.zero_one_adam import ZeroOneAdam
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

__all__ = [
    "AMSGrad",
    "Adam",
    "CDAdam",
    "CocktailSGD",
    "DGC",
    "DeMo",
    "DiLoCo",
    "EF21",
    "FedAMS",
    "FedAvg",
    "FedLAMB",
    "FetchSGD",
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

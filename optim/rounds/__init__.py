"""Optimizers that take several local steps between two exchanges."""

from comm_hooks.optim.rounds.algorithms import (
    SAFL,
    DiLoCo,
    FedAMS,
    FedAvg,
    FedLAMB,
    MuLoCo,
    SparseLoCo,
)
from comm_hooks.optim.rounds.local_rounds import LocalRounds
from comm_hooks.optim.rounds.participation import Participation

__all__ = [
    "DiLoCo",
    "FedAMS",
    "FedAvg",
    "FedLAMB",
    "LocalRounds",
    "MuLoCo",
    "Participation",
    "SAFL",
    "SparseLoCo",
]

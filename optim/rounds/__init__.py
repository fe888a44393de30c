"""Rounds of local work, and the algorithms that are made of them."""

from comm_hooks.optim.rounds.diloco import DiLoCo, SparseLoCo
from comm_hooks.optim.rounds.fed_avg import FedAvg
from comm_hooks.optim.rounds.fed_lamb import FedAMS, FedLAMB
from comm_hooks.optim.rounds.local_rounds import LocalRounds
from comm_hooks.optim.rounds.participation import Participation
from comm_hooks.optim.rounds.safl import SAFL

__all__ = [
    "DiLoCo",
    "FedAMS",
    "FedAvg",
    "FedLAMB",
    "LocalRounds",
    "Participation",
    "SAFL",
    "SparseLoCo",
]

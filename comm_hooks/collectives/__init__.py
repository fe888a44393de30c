"""How payloads move between ranks.

``requests`` says what a round may ask for, ``comm_hooks.exchange.routes`` in which order it asks,
and the transports (``torch_distributed``, ``mpi``, ``simulated``, ``threads``) carry it out.
``worker`` lets rounds of several collectives go on beside the caller, over the connections of
``gloo``.
"""

from comm_hooks.collectives.base import Transport
from comm_hooks.collectives.mpi import MPITransport
from comm_hooks.collectives.simulated import Simulated
from comm_hooks.collectives.threads import run_ranks
from comm_hooks.collectives.torch_distributed import TorchDistributed

__all__ = ["MPITransport", "Simulated", "TorchDistributed", "Transport", "run_ranks"]

"""Transports, which move payloads between ranks.

``requests`` defines the collectives of a round, ``comm_hooks.exchange.routes`` their order, and the
transports (``torch_distributed``, ``mpi``, ``simulated``, ``threads``) carry them out.  ``worker``
runs rounds concurrently with the caller, over the connections of ``gloo``.
``failure_detection`` names the ranks that made a collective fail.
"""

from comm_hooks.collectives.base import Transport
from comm_hooks.collectives.mpi import MPITransport
from comm_hooks.collectives.simulated import Simulated
from comm_hooks.collectives.threads import run_ranks
from comm_hooks.collectives.torch_distributed import TorchDistributed

__all__ = ["MPITransport", "Simulated", "TorchDistributed", "Transport", "run_ranks"]

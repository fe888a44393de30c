"""A transport over an MPI communicator, for training loops without torch.distributed."""

import sys
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from comm_hooks.collectives.base import Transport
from comm_hooks.collectives.requests import (
    AllGather,
    AllGatherObject,
    AllReduce,
    AllToAll,
    Group,
    Request,
    encoded,
    gather_objects,
)

if TYPE_CHECKING:
    from mpi4py import MPI


class MPITransport(Transport):
    """A transport over an mpi4py communicator.

    Payloads are sent as buffers, without pickling and without a copy, by ``MPI_Allreduce``,
    ``MPI_Allgather`` and ``MPI_Alltoall``.  The aggregate is bit-identical on all ranks: MPI
    requires identical results of an all-reduce, and gathered payloads are decoded in rank order.
    Payloads may be larger than 2 GiB.

    Start the program with ``mpiexec -n 4 python -m mpi4py train.py``.  MPI has no timeout: if one
    rank raises an exception, the others wait for it forever, unless mpi4py's runner ends all of
    them (``MPI_Abort``).  Without it a warning says so.

    Args:
        comm: an intracommunicator; ``MPI.COMM_WORLD`` if None.  It is duplicated, which is
            collective and never undone: make one transport and share it among exchanges.

    Raises:
        ImportError: without mpi4py or an MPI library.
        ValueError: if ``comm`` is not an intracommunicator; in a round, before the payload is sent,
            for tensors on an accelerator.

    Not supported: tensors on accelerators.

    Example::

        >>> from comm_hooks import Exchange, TopK
        >>> from comm_hooks.collectives import MPITransport
        >>> transport = MPITransport()
        >>> exchange = Exchange(TopK(density=0.5), transport=transport)
        >>> exchange.average_({"weight": torch.ones(64, 64)})
        >>> transport.rank, transport.world_size
        (0, 1)
    """

    def __init__(self, comm: "MPI.Intracomm | None" = None) -> None:
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise ImportError(
                "MPITransport needs mpi4py and an MPI library: "
                f'pip install "comm-hooks[mpi]" ({error})'
            ) from error
        comm = MPI.COMM_WORLD if comm is None else comm
        if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
            raise ValueError(
                f"MPITransport: comm must be an mpi4py intracommunicator that this process belongs "
                f"to, such as MPI.COMM_WORLD, got {comm!r}"
            )
        self._mpi = MPI
        # Its own, so that no message of the program can meet one of ours.
        self._comm = comm.Dup()
        self.rank, self.world_size = comm.Get_rank(), comm.Get_size()
        self._parts: dict[Group, MPI.Intracomm] = {}
        if self.world_size > 1 and "mpi4py.run" not in sys.modules:
            warnings.warn(
                "MPITransport: an exception on one rank would leave the others waiting forever: "
                "start with mpiexec -n N python -m mpi4py SCRIPT, which ends all ranks",
                stacklevel=2,
            )

    def perform(self, request: Request) -> Any:
        if isinstance(request, AllGatherObject):
            own = encoded(request.payload)
            return gather_objects(lambda r: self.perform(replace(r, group=request.group)), own)
        if request.payload.device.type != "cpu":
            raise ValueError(
                "MPITransport reads tensors on the CPU only, got one on "
                f"{request.payload.device}: use an exchange over torch.distributed"
            )
        comm, payload = self._part(request.group), request.payload.contiguous()
        sent, reply = payload, payload
        if isinstance(request, AllReduce):
            name, sent = "Allreduce", self._mpi.IN_PLACE
        elif isinstance(request, AllGather):
            name, reply = "Allgather", payload.new_empty(comm.Get_size(), payload.numel())
        elif isinstance(request, AllToAll):
            name, reply = "Alltoall", torch.empty_like(payload)
        else:
            raise TypeError(f"no such request: {request}")
        getattr(comm, name)(sent, reply)
        return reply

    def _part(self, group: Group | None) -> "MPI.Intracomm":
        """Return the communicator of a subgroup; the first call makes it, collectively."""
        if group is None:
            return self._comm
        if group not in self._parts:
            first = group.members(self.rank, self.world_size)[0]
            part = self._comm.Split(color=first, key=self.rank)
            assert isinstance(part, self._mpi.Intracomm)
            self._parts[group] = part
        return self._parts[group]

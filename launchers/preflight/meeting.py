"""Messages between processes through a key-value store, with time limits for missing processes.

The store is PyTorch's, at the endpoint of the training: to reach it is a check in itself.  All
waits poll, so that at their end they can name the missing processes.
"""

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from comm_hooks.launchers.environment import LauncherEnvironment, detect_environment
from comm_hooks.launchers.network import Endpoint, find_route, port_is_taken, wait_for_port
from comm_hooks.launchers.output import complain

_POLL_SECONDS = 0.05
_PREFIX = "comm-hooks-preflight"


class MeetingError(ValueError):
    """Processes cannot connect, or one does not answer; the message is one line of text."""


@dataclass(frozen=True)
class Party:
    """The processes that run a preflight together, and the rank of this process among them.

    Attributes:
        head: the endpoint of the store; None for a process on its own.
        rank: the rank of this process; None to get the next free rank.
        size: the number of processes.
        node: the number or name of this node, if known.
        processes: the number of processes per node in the training, if known.
        hosts: whether this process hosts the store, and so must leave last.
        speaks: whether this process prints problems even if it is not rank 0.
        process: this process's launcher environment; no launcher if nodes are started by hand.
    """

    head: Endpoint | None = None
    rank: int | None = 0
    size: int = 1
    node: str | None = "0"
    processes: int | None = None
    hosts: bool = True
    speaks: bool = True
    process: LauncherEnvironment = field(default_factory=LauncherEnvironment)

    @property
    def member(self) -> str:
        """The noun for a process in messages: "rank" under a launcher, else "node"."""
        return "rank" if self.process.launcher else "node"


def find_party(
    head: Endpoint | None,
    nnodes: int,
    node_rank: int | None,
    nproc: int | None,
    environment: Mapping[str, str],
) -> Party:
    """Return the processes that run a preflight together, from the options or the launcher.

    Raises:
        ValueError: for several nodes without a head, and for options that the launcher has set.
    """
    process = detect_environment(environment)
    if process.launcher is None or (nnodes > 1 and process.launcher == "srun"):
        if nnodes == 1:
            return Party(processes=nproc)
        if head is None:
            raise ValueError(f"--nnodes {nnodes} needs --head HOST[:PORT], the same on each node")
        node = None if node_rank is None else str(node_rank)
        hosts = node_rank == 0 if node_rank is not None else find_route(head.host).is_head
        # srun brings all output to one terminal.
        return Party(head, node_rank, nnodes, node, nproc, hosts, speaks=not process.launcher)
    if nnodes != 1 or node_rank is not None:
        raise ValueError(
            f"--nnodes and --node-rank are for starting by hand: {process.launcher} started this "
            f"process as rank {process.rank} of {process.world_size}"
        )
    if process.launcher == "torchrun" and "MASTER_ADDR" in environment:
        port = int(environment.get("MASTER_PORT", Endpoint("").port))
        head = Endpoint(environment["MASTER_ADDR"], port)
    agent_hosts = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Party(
        process.meeting_point(head),
        process.rank,
        process.world_size,
        process.node,
        process.local_size if nproc is None else nproc,
        hosts=process.rank == 0 and not agent_hosts,
        # Each node's torchrun has a terminal of its own; others bring all output to one.
        speaks="GROUP_RANK" in environment and process.local_rank == 0,
        process=process,
    )


class Meeting:
    """The exchange of messages between the processes, as JSON in a shared key-value store."""

    def __init__(self, store: Any, party: Party, rank: int) -> None:
        self.store = store
        self.rank = rank
        self.size = party.size
        self.member = party.member
        self._hosts = party.hosts

    def tell(self, what: str, value: Any) -> None:
        """Send a message with the name ``what`` to all processes."""
        self.store.set(f"{what}/{self.rank}", json.dumps(value))

    def hear(
        self, what: str, ranks: Iterable[int], seconds: float
    ) -> tuple[dict[int, Any], list[int]]:
        """Wait for messages named ``what``; return them by rank, and the ranks without one."""
        missing, heard = list(ranks), {}
        deadline = time.monotonic() + seconds
        while True:
            try:
                for rank in list(missing):
                    if self.store.check([f"{what}/{rank}"]):
                        heard[rank] = json.loads(self.store.get(f"{what}/{rank}"))
                        missing.remove(rank)
            except RuntimeError as error:
                raise MeetingError(
                    f"lost the connection to {self.member} 0, which hosts the store: see its output"
                ) from error
            if not missing or time.monotonic() > deadline:
                return heard, missing
            time.sleep(_POLL_SECONDS)

    def hear_rank_0(self, what: str, seconds: float) -> Any:
        """Return the message ``what`` of rank 0; raise ``MeetingError`` after ``seconds``."""
        heard, missing = self.hear(what, [0], seconds)
        if missing:
            raise MeetingError(f"{self.member} 0 has not answered for {seconds:g} s")
        return heard[0]

    def leave(self, seconds: float = 10.0) -> None:
        """Leave the meeting; the process that hosts the store waits until all others have left."""
        self.tell("leaves", True)
        if self._hosts:
            came = [r for r in range(self.size) if self.store.check([f"facts/{r}"])]
            self.hear("leaves", came, seconds)


def meet(party: Party, seconds: float, origin: str) -> Meeting:
    """Connect to the store, or host it, and return the exchange of messages in it.

    Args:
        party: the processes.
        seconds: the longest time to wait for a store on another machine.
        origin: the address of this machine, for messages.

    Raises:
        MeetingError: if the port is in use on this machine, or no store answers at the head.
    """
    head = party.head
    if head is None:
        return Meeting(dist.HashStore(), party, 0)  # type: ignore[attr-defined]
    if party.hosts and port_is_taken(head.host, head.port):
        raise MeetingError(
            f"port {head.port} is in use on this machine: give another one, as in --head "
            f"{head.host}:{head.port + 1}"
        )
    if not party.hosts:
        if wait_for_port(head, 0):
            complain("comm-hooks preflight", f"waiting for {head} ...")
        if reason := wait_for_port(head, seconds):
            raise MeetingError(
                f"cannot reach the head at {head} from {origin}: {reason}, for {seconds:g} s"
            )
    try:
        store: Any = dist.TCPStore(  # type: ignore[attr-defined]
            head.host,
            head.port,
            is_master=party.hosts,
            wait_for_workers=False,
            timeout=timedelta(seconds=max(seconds, 10.0)),
        )
        # The launcher's own store may be the same.
        store = dist.PrefixStore(_PREFIX, store)  # type: ignore[attr-defined]
        rank = party.rank
        if rank is None:
            rank = 0 if party.hosts else store.add("arrivals", 1)
    except RuntimeError as error:
        raise MeetingError(
            f"{head} answers, but not as a PyTorch store: is another program using that port? "
            f"({str(error).splitlines()[0]})"
        ) from None
    return Meeting(store, party, rank)

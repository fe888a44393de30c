"""N ranks in one process: the same rounds without a network.

For tests, studies with very many ranks, and federated runs in which one process plays many clients.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from comm_hooks.collectives.base import Transport
from comm_hooks.collectives.requests import (
    AllGather,
    AllGatherObject,
    AllReduce,
    AllToAll,
    Request,
    Result,
    Round,
    decoded,
    encoded,
)
from comm_hooks.requirements import require_flag, require_positive


class Simulated:
    """A world of ``world_size`` ranks that advance in lockstep.

    Iterating over the world yields one transport per rank; :meth:`run` drives one round of each.

    Args:
        world_size: N, at least 1.
        decode_once: whether one rank decodes for all others.  Without it every rank decodes by
            itself, as in a real world, so that a difference between ranks would show; but decoding
            N payloads N times takes too long for N in the hundreds.

    Raises:
        ValueError: for a ``world_size`` below 1.

    Example::

        >>> from comm_hooks import Exchange, RandomK
        >>> world = Simulated(3)
        >>> exchanges = [Exchange(RandomK(density=1.0), transport=t) for t in world]
        >>> vectors = [torch.full((4, 512), float(rank)) for rank in range(3)]
        >>> _ = world.run([e.round({"w": v}) for e, v in zip(exchanges, vectors)])
        >>> vectors[0][0, 0], vectors[2][3, 9]
        (tensor(1.), tensor(1.))
    """

    def __init__(self, world_size: int, *, decode_once: bool = False) -> None:
        require_positive(self, "world_size", world_size)
        require_flag(self, "decode_once", decode_once)
        self.world_size = world_size
        self.decode_once = decode_once
        self._decoded: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}

    def __iter__(self) -> Iterator["SimulatedRank"]:
        return (self[rank] for rank in range(self.world_size))

    def __getitem__(self, rank: int) -> "SimulatedRank":
        if not 0 <= rank < self.world_size:
            raise IndexError(f"Simulated: there is no rank {rank} among {self.world_size} ranks")
        return SimulatedRank(self, rank)

    def run(self, rounds: Sequence[Round[Result]]) -> list[Result]:
        """Run one round per rank to the end, in lockstep; return the results in rank order.

        Raises:
            ValueError: if there is not one round per rank.
            RuntimeError: if ranks ask for different collectives, where a real world would hang.
        """
        if len(rounds) != self.world_size:
            raise ValueError(f"Simulated.run: pass {self.world_size} rounds, not {len(rounds)}")
        results: dict[int, Result] = {}
        replies: Sequence[Any] = [None] * self.world_size
        while len(results) < self.world_size:
            requests = []
            for rank, (round_, reply) in enumerate(zip(rounds, replies, strict=True)):
                try:
                    requests.append(round_.send(reply))
                except StopIteration as stop:
                    results[rank] = stop.value
            if requests:
                replies = self._perform(requests)
        return [results[rank] for rank in range(self.world_size)]

    def _perform(self, requests: Sequence[Request]) -> Sequence[Any]:
        kinds = {type(request).__name__ for request in requests}
        groups = {request.group for request in requests}
        if len(requests) != self.world_size or len(kinds) > 1 or len(groups) > 1:
            raise RuntimeError(
                f"Simulated: ranks diverged: {len(requests)} of {self.world_size} request "
                f"{', '.join(sorted(kinds))}: make all ranks request the same collectives"
            )
        group = requests[0].group
        if group is None:
            return _reply(requests)
        replies: dict[int, Any] = {}
        for rank in range(self.world_size):
            if rank not in replies:
                members = group.members(rank, self.world_size)
                of_group = _reply([requests[member] for member in members])
                replies.update(zip(members, of_group, strict=True))
        return [replies[rank] for rank in range(self.world_size)]


def _reply(requests: Sequence[Request]) -> Sequence[Any]:
    """Return each rank's reply to a collective, given the requests of its ranks in rank order."""
    payloads = [request.payload for request in requests]
    if isinstance(requests[0], AllGatherObject):
        # As over a real network: no rank gets an object of another rank.
        return [[decoded(encoded(payload)) for payload in payloads] for _ in requests]
    if isinstance(requests[0], AllReduce):
        total = payloads[0].clone()
        for payload in payloads[1:]:
            total += payload
        return [total] * len(requests)
    stacked = torch.stack(payloads)
    if isinstance(requests[0], AllGather):
        return [stacked] * len(requests)
    if isinstance(requests[0], AllToAll):
        return list(stacked.transpose(0, 1).contiguous())
    raise TypeError(f"no such request: {requests[0]}")


class SimulatedRank(Transport):
    """One rank of a :class:`Simulated` world."""

    def __init__(self, world: Simulated, rank: int) -> None:
        self._world = world
        self.rank = rank
        self.world_size = world.world_size

    def compute_once(
        self, what: str, reply: torch.Tensor, compute: Callable[[], torch.Tensor]
    ) -> torch.Tensor:
        if not self._world.decode_once:
            return compute()
        known = self._world._decoded.get(what)
        if known is None or known[0] is not reply:
            # Ranks write to the result later.
            known = self._world._decoded[what] = reply, compute().clone()
        return known[1]

    def perform(self, request: Request) -> Any:
        if self.world_size > 1:
            raise RuntimeError(
                "a simulated rank cannot exchange alone: collect the round of every rank with "
                "Exchange.round() and drive them together with Simulated.run()"
            )
        return self._world._perform([request])[0]

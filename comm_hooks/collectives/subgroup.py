"""A subgroup of the ranks as a transport: one node, or the same place in every node."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from comm_hooks.collectives.base import Transport
from comm_hooks.collectives.requests import Group, Request, Result, Round


class Subgroup(Transport):
    """A transport among a subgroup of another transport's ranks, renumbered from 0.

    Args:
        transport: the transport of all ranks.
        group: the subgroup.
    """

    def __init__(self, transport: Transport, group: Group) -> None:
        self._transport = transport
        self._group = group
        self._members = group.members(transport.rank, transport.world_size)
        self.rank = self._members.index(transport.rank)
        self.world_size = len(self._members)

    @property
    def ranks(self) -> Sequence[int]:
        return [self._transport.ranks[member] for member in self._members]

    def perform(self, request: Request) -> Any:
        return self._transport.perform(replace(request, group=self._group))

    def within(self, round_: Round[Result]) -> Round[Result]:
        """Return a round with its requests restricted to the subgroup, for use in another round."""
        try:
            request = next(round_)
            while True:
                reply = yield replace(request, group=self._group)
                request = round_.send(reply)
        except StopIteration as stop:
            return stop.value

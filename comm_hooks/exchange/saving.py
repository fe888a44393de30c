"""What an exchange is set to, what it remembers, and how that is saved and loaded."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from comm_hooks.collectives.base import Transport
from comm_hooks.collectives.torch_distributed import TorchDistributed
from comm_hooks.compressors.base import Compressor
from comm_hooks.exchange.agreement import Agreement, Owner
from comm_hooks.exchange.bucket import Buckets
from comm_hooks.exchange.resuming import (
    Provenance,
    Remembered,
    check_complete,
    check_memory,
    check_own,
    check_whole,
    seal_own,
)
from comm_hooks.exchange.settings import ExchangeSettings
from comm_hooks.memory.base import Memory
from comm_hooks.wire.header import Judgments

if TYPE_CHECKING:
    from typing_extensions import Self

# Which exchange each memory remembers for.
_exchange_of: weakref.WeakKeyDictionary[Memory, weakref.ref[SavedExchange]]
_exchange_of = weakref.WeakKeyDictionary()


class SavedExchange:
    """The state of an exchange.

    Args:
        settings: what all ranks have in common.
        memory: of what this rank does not send; None if nothing is remembered.
        transport: how ranks reach each other; None for ``torch.distributed``.
        process_group: of that.

    Attributes:
        remembered: by this rank, in the memory and as an owner of shards.
        step: how many steps it has exchanged.
        agreement: what ranks have in common, and whether they have compared it.
        provenance, only_owners_remember, owes_sums: see :class:`~comm_hooks.Exchange`.
        buckets: the workspaces.

    Raises:
        ValueError: if the memory belongs to another exchange.
    """

    def __init__(
        self,
        settings: ExchangeSettings,
        memory: Memory | None,
        transport: Transport | None,
        process_group: dist.ProcessGroup | None,
    ) -> None:
        if memory:
            _take(memory, self)
        self.remembered = Remembered(memory)
        self.step = 0
        self.agreement = Agreement()
        self.provenance: Provenance | None = None
        self.only_owners_remember = self.owes_sums = False
        self._judgments = Judgments()
        self._transport = transport
        self._process_group = process_group
        self.settings = settings

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Return an exchange between the same ranks, with a copy of what is remembered."""
        duplicate = memo[id(self)] = copy.copy(self)
        duplicate.remembered = copy.copy(self.remembered)
        duplicate.agreement = copy.copy(self.agreement)
        duplicate._judgments = Judgments()
        duplicate.settings = self.settings
        return duplicate

    @property
    def settings(self) -> ExchangeSettings:
        """What all ranks have in common."""
        return self._settings

    @settings.setter
    def settings(self, settings: ExchangeSettings) -> None:
        self._settings = settings
        # Workspaces are made when they are needed.
        self.buckets = Buckets(settings, self.remembered.numels)

    @property
    def owner(self) -> Owner | None:
        """The optimizer or hook that exchanges through this, as long as there is one."""
        return self.agreement.owner

    @owner.setter
    def owner(self, owner: Owner | None) -> None:
        self.agreement.owner = owner

    @property
    def compressor(self) -> Compressor:
        return self.settings.compressor

    @property
    def memory(self) -> Memory | None:
        """What this rank remembers of what it did not send."""
        return self.remembered.memory

    @property
    def transport(self) -> Transport:
        if self._transport is None:
            self._transport = TorchDistributed(self._process_group)
        return self._transport

    @property
    def ranks_per_node(self) -> int | None:
        """How many ranks share a node; None if that is not known or does not matter."""
        if self.settings.collective != "hierarchical":
            return None
        return self.settings.ranks_per_node or self.transport.ranks_per_node

    def settle(self) -> None:
        """Wait for what an accelerator has still to find in the headers of payloads.

        The next step's rounds do it by themselves, and :meth:`stats` and :meth:`state_dict`.

        Raises:
            PayloadError: on all ranks alike, if one did not fit: its round's mean was NaN.
        """
        self._judgments.settle()

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank must save: plain numbers and tensors, safe for ``weights_only``.

        Every rank's residual differs: save one file per rank.  All of them together can be loaded
        on another number of ranks (:meth:`load_state_dicts`).
        """
        self.settle()
        state: dict[str, Any] = {
            "step": self.step,
            "rank": self.transport.rank,
            "world_size": self.transport.world_size,
            "collective": self.settings.collective,
        }
        if self.settings.collective == "hierarchical":
            state["ranks_per_node"] = self.ranks_per_node
        if self.provenance:
            state["provenance"] = dict(self.provenance.saved())
        return seal_own({**state, **self.remembered.state_dict()})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned on this rank; all ranks must load theirs.

        Raises:
            ValueError: if the state is damaged, another rank's, of another number of ranks, of
                another kind of memory, of parameters that the owner of the exchange does not have,
                of shards that this exchange may not have, or of training that was not private, if
                this is; nothing is changed.
        """
        check_whole(state)
        check_own(state, self.transport.rank, self.transport.world_size, self.ranks_per_node)
        check_memory(state, self.memory, self._known_names())
        self._check_provenance(state)
        if not self._passes_on(state):
            raise ValueError(
                "the state has what owners of shards had not passed on, and was saved with "
                f"collective={state['collective']!r}: with {self.settings.collective!r} there may "
                "be no such owners, so load the states of all ranks with load_state_dicts()"
            )
        self._adopt_provenance(state)
        self.remembered.load_state_dict(state)
        self.step = self.agreement.loaded_at = state["step"]

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restore what :meth:`state_dict` returned on *all* ranks, on any number of ranks.

        On as many ranks as then, each loads its own.  On another number (or where there were shards
        and may be none), all start with the mean over ranks of what the ranks remembered, and what
        the owners of shards had not passed on is added to it: what the mean over ranks still has to
        receive is the same as before, or the sum in private training, whose divisor is public.

        Args:
            states: in rank order; the same on all ranks.

        Raises:
            ValueError: if states are missing, out of order, of different steps or of another kind
                of memory; nothing is changed.
        """
        check_complete(states)
        ranks, rank = self.transport.world_size, self.transport.rank
        if self.continues(states):
            self.load_state_dict(states[rank])
            return
        for state in states:
            check_memory(state, self.memory, self._known_names())
            self._check_provenance(state)
        over_nodes = self.settings.collective == "hierarchical"
        count = self._require_ranks_per_node() if over_nodes else None
        for state in states:
            self._adopt_provenance(state)
        scale = len(states) / ranks if self.owes_sums else 1.0
        if self.only_owners_remember:
            self.remembered.load_of_owners(states, rank, ranks, scale)
        else:
            self.remembered.load_merged(states, rank % (count or 1), count, scale)
        self.step = self.agreement.loaded_at = states[0]["step"]

    def continues(self, states: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether each of the ranks that saved these states goes on with its own.

        Args:
            states: complete, in rank order; or some of them.
        """
        alike = {"world_size": self.transport.world_size, "ranks_per_node": self.ranks_per_node}
        return all(
            self._passes_on(state) and all(state.get(key) == alike[key] for key in alike)
            for state in states
        )

    def _check_provenance(self, state: Mapping[str, Any]) -> None:
        if self.provenance:
            self.provenance.check(state.get("provenance"))

    def _adopt_provenance(self, state: Mapping[str, Any]) -> None:
        if self.provenance:
            self.provenance.adopt(state["provenance"])

    def _known_names(self) -> Collection[str] | None:
        return self.owner.names() if self.owner else None

    def _passes_on(self, state: Mapping[str, Any]) -> bool:
        """Return whether rounds will send what the state's rank remembers as an owner of shards.

        Settings alone do not decide whether ``"auto"`` and ``"hierarchical"`` divide into shards;
        an exchange that did will do so again.
        """
        collective = self.settings.collective
        if not state.get("server_memory") or collective == "sharded":
            return True
        return collective == state.get("collective") and "sharded" in self.settings.carriers()

    def _require_ranks_per_node(self) -> int:
        """Return how many ranks share a node.

        Raises:
            ValueError: if that is not known, or ranks cannot be divided like that.
        """
        count, ranks = self.ranks_per_node, self.transport.world_size
        if count is None:
            raise ValueError(
                "collective 'hierarchical': how many ranks share a node is not known. "
                "LOCAL_WORLD_SIZE is not set (torchrun does that), or the process group does not "
                "have equally many consecutive ranks on each node: pass ranks_per_node"
            )
        if ranks % count:
            raise ValueError(
                f"collective 'hierarchical': {ranks} ranks cannot be divided into nodes of "
                f"{count}: ranks_per_node must divide the number of ranks"
            )
        return count


def _take(memory: Memory, exchange: SavedExchange) -> None:
    """Let a memory belong to an exchange.

    Raises:
        ValueError: if it belongs to another one, whose residuals would be mixed with this one's.
    """
    user = _exchange_of.get(memory)
    if user is not None and user() not in (None, exchange):
        raise ValueError(
            f"Exchange: this {type(memory).__name__} remembers for another exchange: give each its "
            "own, or ExchangeSettings"
        )
    _exchange_of[memory] = weakref.ref(exchange)

"""One round on flat vectors, no framework in sight."""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Collection, Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from comm_hooks.agreement import Owner, compare_settings, compare_tensors
from comm_hooks.checks import check_nodes, require_dense_floats
from comm_hooks.collectives.base import Transport
from comm_hooks.collectives.requests import Round
from comm_hooks.collectives.routes import Route, cheapest_route, row_norms
from comm_hooks.collectives.torch_distributed import TorchDistributed
from comm_hooks.compressors.base import Compressor
from comm_hooks.compressors.identity import Identity
from comm_hooks.errors import PeerError
from comm_hooks.exchange.settings import Collective, ExchangeSettings
from comm_hooks.layout import Layout, Segment
from comm_hooks.memory.base import Memory
from comm_hooks.memory.feedback import Feedback
from comm_hooks.nodes import Nodes
from comm_hooks.randomness import Keys, derive_key, derive_keys
from comm_hooks.requirements import (
    require_kind,
)
from comm_hooks.resuming import (
    check_complete,
    check_memory,
    check_own,
    check_whole,
    cut_memory,
    merge_memories,
    seal_own,
)
from comm_hooks.safeguard import COLLECTIVE_OF, Place, Safeguard
from comm_hooks.wire.checksum import fingerprint
from comm_hooks.wire.stamp import WIRE_VERSION, Stamp, digest

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from comm_hooks.exchange.settings import ExchangeOptions

# Which exchange each memory remembers for.
_exchange_of: weakref.WeakKeyDictionary[Memory, weakref.ref[Exchange]] = weakref.WeakKeyDictionary()


class Exchange:
    """Averages named tensors over ranks through a compressor.

    A round on one bucket:

    1. copy the tensors into a float32 workspace, small and 1-D ones apart;
    2. add what the memory kept of earlier rounds;
    3. compress everything into one payload;
    4. move payloads between ranks;
    5. decompress and average them in rank order: the mean is bit-identical on all ranks;
    6. let the memory keep what this rank did not send;
    7. copy the mean back.

    If any element on any rank is not finite, every rank gets NaN everywhere, so that all of them
    skip the step alike, and the memory stays as it was.

    Args:
        compressor: what turns a parameter into a payload; or all of :class:`ExchangeSettings`.
        memory, collective, seed: see :class:`ExchangeSettings`.  What a memory has seen belongs to
            one exchange; to make several, give each a memory of its own, or all the same settings.
        transport: how ranks reach each other; by default ``torch.distributed`` over
            ``process_group``.
        process_group: the group to average over; the default group if None.
        options: more of :class:`ExchangeSettings`, by name.

    Memory: a float32 workspace of 4 bytes per element, beside what ``memory`` keeps.

    Raises:
        ValueError: for a combination that cannot work, before anything is sent; if the memory
            belongs to another exchange.
        ConfigMismatchError: in the first round, if ranks are configured differently.

    Not supported: tensors that are complex, integer or sparse.

    Example::

        >>> from comm_hooks import Exchange, TopK, ErrorFeedback
        >>> from comm_hooks.collectives import Simulated
        >>> world = Simulated(2)
        >>> exchanges = [
        ...     Exchange(TopK(density=0.5), memory=ErrorFeedback(), transport=t) for t in world
        ... ]
        >>> gradients = [{"weight": torch.randn(64, 64)} for _ in world]
        >>> _ = world.run([e.round(g) for e, g in zip(exchanges, gradients)])
        >>> torch.equal(gradients[0]["weight"], gradients[1]["weight"])
        True
    """

    def __init__(
        self,
        compressor: Compressor | ExchangeSettings,
        memory: Memory | Literal["auto"] | None = "auto",
        collective: Collective = "auto",
        seed: int = 0,
        *,
        transport: Transport | None = None,
        process_group: dist.ProcessGroup | None = None,
        **options: Unpack[ExchangeOptions],
    ) -> None:
        if isinstance(compressor, ExchangeSettings):
            if (memory, collective, seed, options) != ("auto", "auto", 0, {}):
                raise ValueError(
                    "Exchange: settings say everything: change them with dataclasses.replace()"
                )
            settings = compressor
            own_memory = settings.memory.fresh() if settings.memory else None
        else:
            settings = ExchangeSettings(compressor, memory, collective, seed, **options)  # type: ignore[arg-type]
            own_memory = settings.memory
        if transport is not None:
            require_kind(self, "transport", transport, Transport)
        if own_memory:
            _take(own_memory, self)
        self.settings = settings
        self.memory = own_memory
        self.step = 0
        self._agreed_on: dict[str, Any] = {}
        self._owner: weakref.ref[Owner] | None = None
        self._server_memory = own_memory.for_server() if own_memory else None
        self._transport = transport
        self._process_group = process_group
        self._agreed = False
        self._compared: set[Layout] = set()
        self._loaded_at: int | None = None
        self._layouts: dict[tuple[tuple[Segment, ...], torch.device], Layout] = {}
        self._routes: dict[tuple[Layout, Identity, Compressor, Place | None], Route] = {}
        self._digests: dict[Layout, int] = {}
        self._numels: dict[str, int] = {}  # of all parameters that the memory may know
        self._bytes = 0
        self._bytes_uncompressed = 0
        self._nodes: Nodes | None = None

    def __repr__(self) -> str:
        own = {f.name: getattr(self.settings, f.name) for f in fields(self.settings)[1:]}
        if self.settings.collective != "hierarchical":
            del own["ranks_per_node"]
        keywords = ", ".join(f"{name}={value!r}" for name, value in own.items())
        return f"Exchange({self.compressor!r}, {keywords})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Exchange:
        """Return an exchange between the same ranks, with a copy of what is remembered."""
        duplicate = memo[id(self)] = copy.copy(self)
        memories = self.memory, self._server_memory
        duplicate.memory, duplicate._server_memory = copy.deepcopy(memories, memo)
        duplicate._agreed_on = dict(self._agreed_on)
        duplicate.owner = None
        duplicate._compared = set()
        duplicate._numels = dict(self._numels)
        # Workspaces are made when they are needed.
        duplicate._layouts, duplicate._routes, duplicate._digests = {}, {}, {}
        duplicate._nodes = None
        return duplicate

    def __getstate__(self) -> dict[str, Any]:
        """Return what is pickled: all but the owner, which is known by a weak reference."""
        return {**self.__dict__, "_owner": None}

    @property
    def owner(self) -> Owner | None:
        """The optimizer or hook that exchanges through this, as long as there is one."""
        return self._owner() if self._owner else None

    @owner.setter
    def owner(self, owner: Owner | None) -> None:
        # Weak: an owner has its exchange, and a circle would keep ledgers and memories alive.
        self._owner = weakref.ref(owner) if owner else None

    @property
    def compressor(self) -> Compressor:
        return self.settings.compressor

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

    @property
    def nodes(self) -> Nodes | None:
        """With ``collective="hierarchical"``, the nodes and the exchange between them, else None.

        The memories of that exchange are those of this one, about the shards of this rank's place.

        Raises:
            ValueError: if ranks cannot be divided into nodes.
        """
        if self.settings.collective == "hierarchical" and self._nodes is None:
            count = check_nodes(self.ranks_per_node, self.transport.world_size)
            self._nodes = Nodes(self.transport, count, self._exchange_at)
        return self._nodes

    def _exchange_at(self, place: int, transport: Transport) -> Exchange:
        exchange = Exchange(
            self.compressor,
            self.memory.fresh() if self.memory else None,
            seed=derive_key(self.settings.seed, 0, f"place {place} of a node"),
            exempt_bits=self.settings.exempt_bits,
            granularity=self.settings.granularity,
            transport=transport,
        )
        exchange.memory, exchange._server_memory = self.memory, self._server_memory
        return exchange

    def agree_on(self, settings: Mapping[str, Any]) -> None:
        """Let ranks make sure that they have more in common than this exchange's own settings.

        For whoever exchanges through it, before the first round; what was said before stays.

        Args:
            settings: plain values by name.
        """
        self._agreed_on |= settings

    def config(self) -> dict[str, Any]:
        """Return all that must be equal on all ranks, as plain values."""
        return {
            **self.settings.as_dict(),
            "ranks_per_node": self.ranks_per_node,
            "step": self.step,
            "wire_version": WIRE_VERSION,
            **self._agreed_on,
        }

    def agree(self) -> Round[None]:
        """Make sure, once, that all ranks are configured alike."""
        if self._agreed:
            return
        yield from compare_settings(self.config(), self.owner)
        if self.nodes:
            if self.nodes.count == 1:
                warnings.warn("all ranks are on one node: nothing is compressed", stacklevel=2)
        elif self.transport.world_size == 1 and self.compressor != Identity():
            warnings.warn(
                "world size is 1: gradients are compressed and decompressed, but no communication "
                "is saved",
                stacklevel=2,
            )
        self._agreed = True

    def agree_now(self) -> None:
        """Do so before the first round; blocking, on all ranks."""
        # Counted like one, so that a failure that is over is not taken for one of this.
        self.transport.begin_round()
        self.transport.run(self.agree())

    def round(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        beside: Mapping[str, torch.Tensor] | None = None,
        compress: bool | Compressor = True,
        memory: Memory | None = None,
        safeguard: Safeguard | None = None,
    ) -> Round[None]:
        """Return a round that replaces each tensor, in place, by its mean over ranks.

        For whoever drives several ranks (:class:`~comm_hooks.collectives.Simulated`); with a
        process group use :meth:`average_`, which takes the same arguments.
        """
        yield from self.bucket_round(
            self.layout_of(tensors, beside),
            [*tensors.values(), *(beside or {}).values()],
            compress=compress,
            memory=memory,
            safeguard=safeguard,
        )
        self.end_step()

    def end_step(self) -> None:
        """Count a step: whatever comes next belongs to other gradients of the same parameters.

        For whoever exchanges bucket by bucket; :meth:`round` and :meth:`average_` do it themselves.
        """
        self.step += 1

    def average_(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        beside: Mapping[str, torch.Tensor] | None = None,
        compress: bool | Compressor = True,
        memory: Memory | None = None,
        safeguard: Safeguard | None = None,
    ) -> None:
        """Replace each tensor, in place, by its mean over ranks; blocking.  Counts as one step.

        Args:
            tensors: parameter name -> floating-point tensor, the same names and shapes in the same
                order on all ranks.  Those of :meth:`workspace` are not copied.
            beside: more tensors, float32, in the same payload, which no compressor sees: flags,
                counts and the like, averaged exactly.
            compress: False averages exactly, for warm-up steps; a compressor takes the place of
                the exchange's own in this round.
            memory: takes the place of the exchange's own: another client's, say.
            safeguard: clips and adds noise on the way, for private training.

        Raises:
            ValueError: for tensors that are not dense and floating-point, and for a compressor
                or a safeguard that cannot go with the exchange's other settings.
        """
        self.transport.run(
            self.round(
                tensors, beside=beside, compress=compress, memory=memory, safeguard=safeguard
            )
        )

    def layout_of(
        self,
        tensors: Mapping[str, torch.Tensor],
        beside: Mapping[str, torch.Tensor] | None = None,
    ) -> Layout:
        """Return the workspace for these tensors by name; see :meth:`average_`.

        Raises:
            ValueError: if there are none, or one is not dense and floating-point.
        """
        if not tensors:
            raise ValueError("there is nothing to average: no tensors were given")
        for tensor in tensors.values():
            require_dense_floats(tensor)
        exact = (Segment(n, tuple(t.shape), True, True) for n, t in (beside or {}).items())
        return self.layout(
            [
                *(
                    Segment(n, tuple(t.shape), self.settings.exempts(t.shape))
                    for n, t in tensors.items()
                ),
                *exact,
            ],
            next(iter(tensors.values())).device,
        )

    def workspace(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return contiguous float32 tensors of these names and shapes to make a message in.

        :meth:`average_` works on them without copying.  They hold anything at first, and again as
        soon as another round averages tensors of any of these names.

        Raises:
            ValueError: as :meth:`layout_of`.

        Example::

            >>> from comm_hooks import Exchange, Identity
            >>> weight = torch.ones(64, 64)
            >>> exchange = Exchange(Identity())
            >>> message = exchange.workspace({"weight": weight})
            >>> _ = torch.mul(weight, 2, out=message["weight"])
            >>> exchange.average_(message)
        """
        return dict(zip(tensors, self.layout_of(tensors).views, strict=True))

    def norm_bound(self, layout: Layout) -> float:
        """Return the largest possible norm of a payload over that of what is in it.

        See :meth:`~comm_hooks.compressors.base.Compressor.norm_bound`.
        """
        world_size = self.transport.world_size
        bounds = [
            self.compressor.norm_bound(rows.matrix.shape[1], world_size=world_size)
            for rows in layout.compressed
        ]
        if layout.exempt:
            bounds.append(self.settings.exempt.norm_bound(layout.exempt.matrix.shape[1]))
        if layout.exact:
            bounds.append(1.0)
        # Parts are apart in the vector and in the payload, so their bounds do not add up.
        return max(bounds)

    def layout(self, segments: Sequence[Segment], device: torch.device) -> Layout:
        """Return the workspace for a bucket of these segments, made at the first call."""
        key = (tuple(segments), device)
        if key not in self._layouts:
            names = {segment.name for segment in segments}
            if len(names) < len(segments):
                raise ValueError("parameter names must be distinct within a bucket")
            # A bucket that shares a parameter with this one is gone: DDP has rebuilt its buckets.
            for old in [k for k, v in self._layouts.items() if not names.isdisjoint(v.names)]:
                layout = self._layouts.pop(old)
                self._routes = {k: r for k, r in self._routes.items() if k[0] is not layout}
                self._digests.pop(layout, None)
                self._compared.discard(layout)
            self._layouts[key] = Layout(*key, self.settings.granularity)
            self._numels.update({s.name: s.numel for s in segments if not s.exempt})
        return self._layouts[key]

    def bucket_round(
        self,
        layout: Layout,
        tensors: Sequence[torch.Tensor],
        *,
        compress: bool | Compressor = True,
        memory: Memory | None = None,
        scale: float = 1.0,
        safeguard: Safeguard | None = None,
        replica: Sequence[torch.Tensor] | None = None,
    ) -> Round[None]:
        """Return a round on one bucket of a step that may have several.

        Args:
            layout: from :meth:`layout`.
            tensors: dense, of one floating-point dtype, shaped like the layout's segments;
                overwritten with the mean.
            compress, memory, safeguard: see :meth:`average_`.
            scale: the factor by which the tensors are scaled at present.
            replica: what must be bit-identical on all ranks at this moment, of which now and then
                they compare a fingerprint; by default what the exchange's owner says.
        """
        if isinstance(compress, Compressor):
            self.settings.check(compress)
        round_number = self.transport.begin_round()
        yield from self.agree()
        is_new = layout not in self._compared
        if is_new:
            yield from compare_tensors(layout.segments)
            self._compared.add(layout)
        stamp = self.stamp(layout)
        verify = self.verifies(is_new=is_new)
        if verify:
            tensors_alike = self.owner.replica() if replica is None and self.owner else replica
            if tensors_alike:
                stamp = replace(stamp, model=fingerprint(tensors_alike))
        round_ = self.unchecked_round(
            layout,
            tensors,
            stamp,
            compress=compress,
            memory=memory,
            scale=scale,
            safeguard=safeguard,
            verify=verify,
            limit=largest_in(tensors[0].dtype),
        )
        yield from self.reported(round_, round_number)

    def verifies(self, *, is_new: bool = False) -> bool:
        """Return whether this step is one that makes sure of what ranks have in common.

        Args:
            is_new: nobody has made sure of it yet.
        """
        # What has just been loaded is looked at, too.
        is_due = is_new or self.step == self._loaded_at
        return self.settings.verify_every > 0 and (
            is_due or self.step % self.settings.verify_every == 0
        )

    def reported(self, round_: Round[None], round_number: int) -> Round[None]:
        """Return a round of this step of whose failure here the other ranks are told.

        Args:
            round_number: see :meth:`~comm_hooks.collectives.base.Transport.begin_round`.
        """
        step = self.step
        try:
            yield from round_
        except PeerError as error:
            raise PeerError(f"{error}, during step {step}") from error.__cause__
        except Exception as error:
            self.transport.report(error, round_number)
            raise

    def unchecked_round(
        self,
        layout: Layout,
        tensors: Sequence[torch.Tensor],
        stamp: Stamp,
        *,
        compress: bool | Compressor = True,
        memory: Memory | None = None,
        scale: float = 1.0,
        safeguard: Safeguard | None = None,
        verify: bool = False,
        limit: float | None = None,
    ) -> Round[None]:
        """Return a :meth:`bucket_round` whose ranks have compared settings and tensors already.

        Args:
            stamp: what all payloads must have in common; see :meth:`stamp`.
            verify: make sure that what is remembered is finite.
            limit: the largest element that whoever gets the mean can hold; what is above it is
                remembered.
            layout, tensors, compress, memory, scale, safeguard: see :meth:`bucket_round`.
        """
        if self.nodes and compress:
            if safeguard:
                raise ValueError(
                    "a safeguard cannot be used with collective='hierarchical', where nodes "
                    "average vectors before it sees them"
                )
            layout.load(tensors)
            self._count(self.nodes.traffic(layout), tensors)
            yield from self.nodes.round(
                layout,
                stamp,
                compress=compress,
                memory=memory,
                scale=scale,
                verify=verify,
                limit=limit,
            )
            layout.store(tensors)
            return
        place = safeguard.place if safeguard else None
        route = self._route(layout, compress, place)
        layout.load(tensors)
        memory = (memory or self.memory) if compress and place != "owner" else None
        norms = [row_norms(rows.matrix) for rows in layout.groups]
        plain_norms = [row_norms(row.matrix) for row in (layout.exact, layout.exempt) if row]
        # 0 if all elements are finite, else NaN.  A norm that overflows float32 counts as infinite.
        health = torch.cat([norm - norm for norm in (*norms, *plain_norms)]).sum()
        feedback = self.feedback(memory, layout, norms, scale, verify=verify) if memory else None
        self._count(route.traffic, tensors)
        yield from route.travel(self.keys(layout), stamp, health, scale, feedback, safeguard)
        if feedback and limit is not None:
            feedback.give_back(limit)
        layout.store(tensors)

    def feedback(
        self,
        memory: Memory,
        layout: Layout,
        norms: Sequence[torch.Tensor],
        scale: float,
        *,
        verify: bool,
    ) -> Feedback:
        """Return this rank's memory's share in a round; see ``comm_hooks.memory.feedback``."""
        # Of now: by the time the memory draws, the owner may have gone on to the next step.
        own_key = derive_key(self.settings.seed, self.step, f"memory of rank {self.transport.rank}")
        return Feedback(memory, layout, norms, scale, own_key, verify=verify)

    def keys(self, layout: Layout) -> list[Keys]:
        """Return the random keys of each part of a layout in the present step."""
        return [derive_keys(self.settings.seed, self.step, part.names) for part in layout.parts()]

    def stamp(self, layout: Layout) -> Stamp:
        """Return what the payloads of a bucket in the present step have in common."""
        if layout not in self._digests:
            settings = {key: value for key, value in self.config().items() if key != "step"}
            self._digests[layout] = digest(settings, layout.segments)
        since = self.step - (self._loaded_at or 0)
        owner = self.owner
        return Stamp(
            self._digests[layout],
            self.step,
            # Exchanges since the start or the last load, and which of the two it was.
            loads=2 * since + (self._loaded_at is not None),
            hyperparameters=digest(owner.hyperparameters()) if owner else 0,
        )

    def _count(self, nbytes: int, tensors: Sequence[torch.Tensor]) -> None:
        ranks = self.transport.world_size
        uncompressed = sum(tensor.nbytes for tensor in tensors)
        self.count_traffic(nbytes, 2 * (ranks - 1) * uncompressed // ranks)

    def count_traffic(self, nbytes: int, uncompressed: int) -> None:
        """Add traffic that went past the compressor (sparse gradients)."""
        self._bytes += nbytes
        self._bytes_uncompressed += uncompressed

    def stats(self) -> dict[str, float]:
        """Return what this rank moved since the start.

        Keys: ``steps``; ``bytes_sent`` and ``bytes_received``, without transport headers, by the
        ring algorithms of gloo and NCCL; ``bytes_uncompressed``, what an all-reduce in the
        gradients' dtype would have sent; ``compression_ratio``, the latter over the bytes sent;
        ``residual_norm``, of everything the memory keeps.  With ``collective="hierarchical"`` also
        ``bytes_sent_between_nodes``, which is a part of ``bytes_sent``.
        """
        memories = [m for m in (self.memory, self._server_memory) if m]
        between = {"bytes_sent_between_nodes": self.nodes.exchange._bytes} if self.nodes else {}
        nbytes = self._bytes + sum(between.values())
        return {
            "steps": self.step,
            "bytes_sent": nbytes,
            "bytes_received": nbytes,
            **between,
            "bytes_uncompressed": self._bytes_uncompressed,
            "compression_ratio": self._bytes_uncompressed / nbytes if nbytes else 1.0,
            "residual_norm": sum(m.norm() ** 2 for m in memories) ** 0.5,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank must save: plain numbers and tensors, safe for ``weights_only``.

        Every rank's residual differs: save one file per rank.  All of them together can be loaded
        on another number of ranks (:meth:`load_state_dicts`).
        """
        state: dict[str, Any] = {
            "step": self.step,
            "rank": self.transport.rank,
            "world_size": self.transport.world_size,
            "collective": self.settings.collective,
        }
        if self.settings.collective == "hierarchical":
            state["ranks_per_node"] = self.ranks_per_node
        if self.memory and self._server_memory:
            state["memory_type"] = type(self.memory).__name__
            state["memory"] = self.memory.state_dict()
            state["server_memory"] = self._server_memory.state_dict()
            state["numels"] = dict(self._numels)
        return seal_own(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned on this rank; all ranks must load theirs.

        Raises:
            ValueError: if the state is damaged, another rank's, of another number of ranks, of
                another kind of memory, of parameters that the owner of the exchange does not have,
                or of shards that this exchange may not have; nothing is changed.
        """
        check_whole(state)
        check_own(state, self.transport.rank, self.transport.world_size, self.ranks_per_node)
        check_memory(state, self.memory, self._known_names())
        if not self._passes_on(state):
            raise ValueError(
                "the state has what owners of shards had not passed on, and was saved with "
                f"collective={state['collective']!r}: with {self.settings.collective!r} there may "
                "be no such owners, so load the states of all ranks with load_state_dicts()"
            )
        if self.memory and self._server_memory:
            self.memory.load_state_dict(state["memory"])
            self._server_memory.load_state_dict(state["server_memory"])
            self._numels = dict(state["numels"])
        self.step = self._loaded_at = state["step"]

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restore what :meth:`state_dict` returned on *all* ranks, on any number of ranks.

        On as many ranks as then, each loads its own.  On another number (or where there were shards
        and may be none), all start with the mean over ranks of what the ranks remembered, and what
        the owners of shards had not passed on is added to it: what the mean over ranks still has to
        receive is the same as before.

        Args:
            states: in rank order; the same on all ranks.

        Raises:
            ValueError: if states are missing, out of order, of different steps or of another kind
                of memory; nothing is changed.
        """
        check_complete(states)
        is_alike = (
            len(states) == self.transport.world_size
            and states[0].get("ranks_per_node") == self.ranks_per_node
        )
        if is_alike and all(map(self._passes_on, states)):
            self.load_state_dict(states[self.transport.rank])
            return
        for state in states:
            check_memory(state, self.memory, self._known_names())
        if self.memory and self._server_memory:
            numels = {name: n for state in states for name, n in state["numels"].items()}
            merged = merge_memories(states, self.memory, self._server_memory)
            if self.nodes:
                merged = cut_memory(
                    merged, self.memory, numels, self.nodes.place, self.nodes.ranks_per_node
                )
            self.memory.load_state_dict(merged)
            self._server_memory.load_state_dict({})
            self._numels = numels
        self.step = self._loaded_at = states[0]["step"]

    def _known_names(self) -> Collection[str] | None:
        return self.owner.names() if self.owner else None

    def _passes_on(self, state: Mapping[str, Any]) -> bool:
        """Return whether rounds will send what the state's rank remembers as an owner of shards.

        Whether ``"auto"`` and ``"hierarchical"`` divide into shards depends on more than settings,
        but where they did they will.
        """
        if not state.get("server_memory") or self.settings.collective == "sharded":
            return True
        possible = self.settings.carriers()
        return self.settings.collective == state["collective"] and "sharded" in possible

    def _route(self, layout: Layout, compress: bool | Compressor, place: Place | None) -> Route:
        compressor: Compressor = Identity()
        if compress:
            compressor = self.compressor if compress is True else compress
        exempt = self.settings.exempt if compress else Identity()
        key = (layout, exempt, compressor, place)
        if key not in self._routes:
            collectives = ["all_reduce"]
            if compress or place:
                collectives = self.settings.carriers(compressor)
                wanted = (
                    (self.settings.collective, COLLECTIVE_OF[place])
                    if place
                    else (self.settings.collective,)
                )
                collectives = [c for c in collectives if all(w in ("auto", c) for w in wanted)]
            if not collectives:
                assert place
                raise ValueError(
                    f"a safeguard at the {place} needs collective={COLLECTIVE_OF[place]!r}, which "
                    f"{compressor} with collective={self.settings.collective!r} cannot have"
                )
            self._routes[key] = cheapest_route(
                layout,
                compressor,
                exempt,
                collectives,
                self.transport,
                self._server_memory,
                exact_uplink=place == "owner",
            )
        return self._routes[key]


def _take(memory: Memory, exchange: Exchange) -> None:
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


def largest_in(dtype: torch.dtype) -> float | None:
    """Return the largest number that a dtype can hold; None if float32 has no larger ones.

    A sparse compressor sends what has gathered over many steps at once: in float16, scaled by a
    GradScaler, that may be too much although no gradient was.
    """
    largest = torch.finfo(dtype).max
    return largest if largest < torch.finfo(torch.bfloat16).max else None

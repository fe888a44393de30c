"""Exchange named tensors between ranks, in rounds of collectives."""

from __future__ import annotations

import atexit
import copy
import logging
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from comm_hooks.collectives.base import Transport
from comm_hooks.collectives.requests import AllGatherObject, Round
from comm_hooks.collectives.torch_distributed import TorchDistributed, made_in
from comm_hooks.compressors.base import Compressor
from comm_hooks.compressors.identity import Identity, exact
from comm_hooks.errors import PeerError
from comm_hooks.exchange.agreement import Agreement, Owner, compare_tensors
from comm_hooks.exchange.bucket import Bucket, Buckets
from comm_hooks.exchange.layout import Layout, Segment
from comm_hooks.exchange.message import RoundContext
from comm_hooks.exchange.noise_hook import Gate, NoiseHook
from comm_hooks.exchange.routes.choosing import choose_route
from comm_hooks.exchange.routes.ragged import RaggedShards
from comm_hooks.exchange.routes.route import Route
from comm_hooks.exchange.saved_state import Position
from comm_hooks.exchange.settings import Collective, ExchangeSettings
from comm_hooks.exchange.state import ExchangeState, Traffic
from comm_hooks.exchange.transaction import Transaction
from comm_hooks.memory.base import Memory
from comm_hooks.requirements import require_kind
from comm_hooks.warnings import warn_program
from comm_hooks.wire.checksum import fingerprint
from comm_hooks.wire.header import PendingChecks
from comm_hooks.wire.stamp import WIRE_VERSION, Stamp, digest, refuse_disagreement

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from comm_hooks.exchange.settings import ExchangeOptions


logger = logging.getLogger(__name__)

_exchanges: weakref.WeakSet[Exchange] = weakref.WeakSet()
_FLOATS = Identity()
_REPORTED = "_comm_hooks_reported"  # an attribute of errors that the other ranks know of


class Exchange:
    """Averages named tensors over ranks through a compressor.

    A round on one bucket:

    1. copy the tensors into a float32 workspace, small and 1-D ones apart;
    2. add the residuals of earlier rounds, from the error-feedback memory;
    3. compress everything into one payload;
    4. move payloads between ranks;
    5. decompress and average them in rank order: the mean is bit-identical on all ranks;
    6. keep the new residuals in the memory;
    7. copy the mean back.

    If any element on any rank is not finite, every rank gets NaN everywhere, so that all of them
    skip the step, and the memory does not change.

    Args:
        compressor: turns a parameter into a payload; or :class:`ExchangeSettings`, all settings.
        memory, collective, seed: see :class:`ExchangeSettings`.
        transport: connects the ranks; by default ``torch.distributed`` over ``process_group``.
        process_group: the group to average over; the default group if None.
        options: further settings of :class:`ExchangeSettings`, by name.

    Attributes:
        state: the residuals and the step of this rank.
        agreement: the settings that ranks compare, and the optimizer or hook that owns this object.
        buckets: the sets of tensors exchanged so far, with their workspaces.
        steps_per_round: the number of steps of the optimizer between two rounds.
        owner_counts: whether the owner counts the bytes that :meth:`stats` compares with.
        gate: asked before every round, if there is one; it clips and adds noise.

    Memory: a float32 workspace of 4 bytes per element, and the residuals in ``memory``.

    Raises:
        ValueError: for settings that are invalid or exclude each other, before anything is sent.
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
                    "Exchange: ExchangeSettings hold all settings, so no other can be passed: "
                    "change them with dataclasses.replace()"
                )
            settings = compressor
        else:
            settings = ExchangeSettings(compressor, memory, collective, seed, **options)  # type: ignore[arg-type]
        if transport is not None:
            require_kind(self, "transport", transport, Transport)
        self.state = ExchangeState(settings.memory.fresh() if settings.memory else None)
        self.agreement = Agreement()
        self.settings = settings
        self._transport = transport
        self._process_group = process_group
        self._traffic = Traffic()
        self._checks = PendingChecks()
        self._transaction = Transaction()
        self.owner_counts = False
        self.gate: Gate | None = None
        self.steps_per_round = 1.0
        self._compared_at = 0
        _exchanges.add(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Exchange:
        """Return an exchange between the same ranks, with a copy of the state."""
        duplicate = memo[id(self)] = copy.copy(self)
        duplicate.state = copy.copy(self.state)
        duplicate.agreement = copy.copy(self.agreement)
        duplicate.settings = self.settings
        duplicate._traffic = copy.copy(self._traffic)
        duplicate._checks = PendingChecks()
        duplicate._transaction = Transaction()
        _exchanges.add(duplicate)
        return duplicate

    def __repr__(self) -> str:
        own = {f.name: getattr(self.settings, f.name) for f in fields(self.settings)[1:]}
        if self.settings.collective != "hierarchical":
            del own["ranks_per_node"]
        keywords = ", ".join(f"{name}={value!r}" for name, value in own.items())
        return f"Exchange({self.compressor!r}, {keywords})"

    @property
    def settings(self) -> ExchangeSettings:
        """The settings of this exchange, equal on all ranks."""
        return self._settings

    @settings.setter
    def settings(self, settings: ExchangeSettings) -> None:
        self._settings = settings
        self.buckets = Buckets(settings, self.state.numels)

    @property
    def owner(self) -> Owner | None:
        """The optimizer or hook that uses this exchange; None without one, or if it was deleted."""
        return self.agreement.owner

    @owner.setter
    def owner(self, owner: Owner | None) -> None:
        if owner is not None and self.agreement.number is None:
            kind = digest(type(owner).__name__, type(self.compressor).__name__, owner.names())
            if self._transport is not None:
                made = self._transport.made
            else:
                made = made_in(self._process_group)
            self.agreement.number = made[kind]
            made[kind] += 1
        self.agreement.owner = owner

    @property
    def compressor(self) -> Compressor:
        return self.settings.compressor

    @property
    def memory(self) -> Memory | None:
        """The error-feedback memory, which keeps this rank's residuals; None if there is none."""
        return self.state.memory

    @property
    def step(self) -> int:
        """The number of steps exchanged so far."""
        return self.state.step

    @step.setter
    def step(self, step: int) -> None:
        self.state.step = step

    @property
    def transport(self) -> Transport:
        if self._transport is None:
            self._transport = TorchDistributed(self._process_group)
        return self._transport

    @property
    def ranks_per_node(self) -> int | None:
        """The number of ranks per node; None if it is unknown or collective is not hierarchical."""
        if self.settings.collective != "hierarchical":
            return None
        return self.settings.ranks_per_node or self.transport.ranks_per_node

    def agree_on(self, settings: Mapping[str, Any]) -> None:
        """Add settings that must be equal on all ranks; call it before the first round.

        Args:
            settings: plain values by name, in addition to those of earlier calls.
        """
        self.agreement.settings |= settings

    def config(self) -> dict[str, Any]:
        """Return all settings that must be equal on all ranks, as plain values."""
        return {
            **self.settings.as_dict(),
            "ranks_per_node": self.ranks_per_node,
            "step": self.step,
            "wire_version": WIRE_VERSION,
            **self.agreement.settings,
        }

    def agree(self) -> Round[None]:
        """Return a round that compares the settings of all ranks, once and after each failure."""
        is_first, epoch = self.agreement.epoch is None, self.transport.epoch
        if self.agreement.epoch == epoch:
            return
        loaded = {"state loaded from the run": self.state.loaded_from}
        yield from self.agreement.reach(self.config() | loaded, self.transport.ranks, epoch)
        for bucket in self.buckets:
            bucket.digest = None  # of the identity, which some ranks may have lacked
        ranks = self.transport.world_size
        if not is_first:
            return
        if self.settings.collective == "hierarchical":
            if self._require_ranks_per_node() == ranks:
                warnings.warn("all ranks are on one node: nothing is compressed", stacklevel=2)
        elif ranks == 1 and self.compressor != Identity():
            warnings.warn(
                "world size is 1: gradients are compressed and decompressed, but no communication "
                "is saved",
                stacklevel=2,
            )

    @property
    def source_collective(self) -> str:
        """The collective of the source of the owner, or of the memory; ``"auto"`` for any.

        Shards compress the mean again, which is another algorithm where the source does not.
        """
        published = getattr(self.owner, "published", {})
        own = self.memory.source_collective if self.memory else "auto"
        return str(published.get("collective", own))

    def agree_now(self) -> None:
        """Compare the settings of all ranks before the first round; blocking and collective."""
        self.transport.run(self.agree())

    def round(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        extras: Mapping[str, torch.Tensor] | None = None,
        **options: Any,
    ) -> Round[None]:
        """Return a round that replaces each tensor, in place, by its mean over ranks.

        For drivers of several ranks (:class:`~comm_hooks.collectives.Simulated`); with a
        process group use :meth:`average_`, which takes the same arguments except ``scale``.
        """
        with self.failing_together():
            every = [*tensors.values(), *(extras or {}).values()]
            yield from self.bucket_round(self.buckets.of(tensors, extras), every, **options)
            self.end_step()

    def note_health(self, health: torch.Tensor) -> None:
        """Let the present step depend on other tensors of it, too.

        Args:
            health: 0 if they are finite on all ranks, else NaN; float32, ().
        """
        self._transaction.note(health)

    def end_step(self, agree: Callable[[torch.Tensor], torch.Tensor] | None = None) -> torch.Tensor:
        """End a step, after all its rounds: later rounds exchange the gradients of the next step.

        Residuals change now, if all buckets were finite.  For hooks, which exchange bucket by
        bucket; :meth:`average_` calls it.

        Args:
            agree: returns NaN if its argument, this rank's result, is NaN on any rank that holds
                another part of the model; None if this rank's is that of all.

        Returns:
            0 if all buckets of the step were finite on all ranks, else NaN; float32, ().
        """
        health = self._transaction.health()
        if agree is not None:
            health = agree(health)
        self._transaction.decide(health)
        self.step += 1
        return health

    def leave_step(self) -> None:
        """Leave a step in which a bucket has failed: residuals stay as they were before it."""
        self._transaction.forget()

    def average_(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        extras: Mapping[str, torch.Tensor] | None = None,
        compress: bool | Compressor = True,
        memory: Memory | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Replace each tensor, in place, by its mean over ranks; blocking.  Counts as one step.

        Args:
            tensors: parameter name -> floating-point tensor, the same names and shapes in the same
                order on all ranks.  The tensors of :meth:`workspace` are not copied.
            extras: more float32 tensors for the same payload, averaged exactly and never
                compressed: flags, counts and the like.
            compress: False averages exactly, for warm-up steps; a compressor replaces that of the
                exchange in this round.
            memory: an error-feedback memory in place of that of the exchange, such as a client's.
            dtype: the values' dtype, if the tensors are wider copies: 16 bits are sent exactly.

        Raises:
            ValueError: for tensors that are not dense and floating-point, and for a compressor
                that does not fit the settings or the :attr:`gate`.
        """
        options = {"compress": compress, "memory": memory, "dtype": dtype}
        self.transport.run(self.round(tensors, extras=extras, **options))

    def workspace(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return contiguous float32 tensors of these names and shapes, to fill and then average.

        :meth:`average_` works on them without copying.  Their content is undefined at first, and
        again after a round over other tensors with any of these names.

        Raises:
            ValueError: as :meth:`average_`.

        Example::

            >>> from comm_hooks import Exchange, Identity
            >>> weight = torch.ones(64, 64)
            >>> exchange = Exchange(Identity())
            >>> message = exchange.workspace({"weight": weight})
            >>> _ = torch.mul(weight, 2, out=message["weight"])
            >>> exchange.average_(message)
        """
        return dict(zip(tensors, self.buckets.of(tensors).layout.views, strict=True))

    def norm_bound(self, layout: Layout) -> float:
        """Return the largest possible ratio of a payload's norm to the norm of its vectors.

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

    def bucket_round(
        self,
        bucket: Bucket,
        tensors: Sequence[torch.Tensor],
        *,
        compress: bool | Compressor = True,
        memory: Memory | None = None,
        scale: float = 1.0,
        replica: Sequence[torch.Tensor] | None = None,
        partial: bool = False,
        dtype: torch.dtype | None = None,
    ) -> Round[None]:
        """Return a round that averages one bucket; a step may have several buckets.

        Args:
            bucket: from :attr:`buckets`.
            tensors: dense, of one floating-point dtype, shaped like the bucket's segments;
                overwritten with the mean.
            compress, memory, dtype: see :meth:`average_`.
            scale: the loss scale by which the tensors are multiplied.
            replica: tensors that must be bit-identical on all ranks at this moment; every
                ``verify_every`` steps ranks compare a fingerprint of them.  None: the parameters of
                the optimizer or hook that owns the exchange.
            partial: whether the step may have other buckets: residuals then change in
                :meth:`end_step`, and only if all buckets were finite.
        """
        with self.failing_together():
            self.require_open(protects=True)
            if isinstance(compress, Compressor):
                self.settings.check(compress)
            yield from self.agree()
            epoch = self.transport.epoch
            is_new = bucket.compared_in != epoch
            if is_new:
                yield from compare_tensors(bucket.layout.segments, self.transport.ranks)
                bucket.compared_in = epoch
                if (dtype or tensors[0].dtype) == torch.float64:
                    warn_program(
                        "float64 tensors are averaged in float32, whose relative error is 6e-8: "
                        "convert the model by model.float(), or leave the averaging to DDP"
                    )
            verify = self.verifies(is_new=is_new)
            stamp = self._stamp(bucket)
            if verify:
                if replica is None:
                    replica = self.owner.replica() if self.owner else ()
                if replica:
                    stamp = replace(stamp, model=fingerprint(replica))
                self._compared_at = self.step
            self._checks.wait(before=self.step)
            if not bucket.layout.work.numel():
                return  # parameters without elements
            bucket.layout.load(tensors)
            noise_hook = self.gate.protect(bucket.layout) if self.gate else None
            uses_memory = compress and not (noise_hook and noise_hook.place == "owner")
            limit = largest_in(tensors[0].dtype)
            waits = partial or limit is not None
            context = RoundContext(
                stamp,
                memory=(memory or self.memory) if uses_memory else None,
                scale=scale,
                verify=verify,
                limit=limit,
                noise_hook=noise_hook,
                checks=self._checks,
                transaction=self._transaction if waits else None,
                mean=self.buckets.mean_of(bucket) if waits and uses_memory else None,
            )
            dtype = dtype or tensors[0].dtype
            # Rounding to 16 bits on each rank would spoil shares of noise.
            is_exact = _FLOATS if self.gate else exact(dtype)
            route = self._route(bucket, compress, noise_hook, is_exact)
            self._traffic.sent += route.traffic
            if not self.owner_counts:
                self.count_gradients(dtype.itemsize * bucket.layout.work.numel())
            self._traffic.between_nodes += route.traffic_between_nodes
            yield from route.reduce(context)
            (context.mean or bucket.layout).store(tensors)
            if not partial:
                self._transaction.decide(self._transaction.health())

    def reduce_scatter_round(
        self,
        shards: Sequence[Bucket],
        tensors: Sequence[Sequence[torch.Tensor]],
        output: Sequence[torch.Tensor],
        *,
        scale: float = 1.0,
        factor: float = 1.0,
    ) -> Round[None]:
        """Return a round that gives each rank the mean of one shard only.

        The caller must have called :meth:`agree_now`, and counts the bytes of an uncompressed round
        itself (:meth:`count_traffic`).

        Args:
            shards: a bucket for each rank's shard, in rank order.
            tensors: the tensors of each bucket; see :meth:`bucket_round`.
            output: receives ``factor`` times the mean of this rank's shard, in its shapes.
            scale: see :meth:`bucket_round`.
        """
        own, limit = self.transport.rank, largest_in(output[0].dtype) if output else None
        with self.failing_together():
            self.require_open()
            verify = self.verifies()
            context = [
                RoundContext(
                    self._stamp(bucket),
                    self.memory,
                    scale,
                    verify=verify,
                    limit=limit,
                    checks=self._checks,
                    transaction=self._transaction,
                    mean=self.buckets.mean_of(bucket) if self.memory else None,
                )
                for bucket in shards
            ]
            self._checks.wait(before=self.step)
            layouts = [bucket.layout for bucket in shards]
            for layout, of_shard in zip(layouts, tensors, strict=True):
                layout.load(of_shard)
            of_dtype = exact(output[0].dtype) if output else Identity()
            exempt = self.settings.exempt if of_dtype.linear else of_dtype
            compressors = [layout.compressors(self.compressor, exempt) for layout in layouts]
            route = RaggedShards(layouts, compressors, self.transport, self.settings.seed)
            self._traffic.sent += route.traffic
            yield from route.reduce(context, factor=factor)
            (context[own].mean or layouts[own]).store(output)

    def require_open(self, *, protects: bool = False) -> None:
        """Raise ``ValueError`` if :attr:`gate` allows no round now; see :class:`Gate`."""
        if self.gate is not None:
            self.gate.require_open(protects=protects)

    def verifies(self, *, is_new: bool = False) -> bool:
        """Return whether ranks compare a fingerprint of their parameters in this step.

        Args:
            is_new: whether ranks have not compared this bucket yet.
        """
        every, step = self.settings.verify_every, self.state.step
        if not every:
            return False
        steps, before = (int(self.steps_per_round * each) // every for each in (step, step - 1))
        return is_new or step == self.state.loaded_at or steps > before

    @property
    def rounds_not_compared(self) -> int:
        """The number of rounds since ranks have compared their parameters; 0 if they never do."""
        knows_others = self.agreement.identity is not None and self.owner is not None
        return self.step - self._compared_at if knows_others and self.settings.verify_every else 0

    def compare_replicas(self) -> None:
        """Compare the parameters of all ranks; blocking and collective.

        Does nothing if the owner has no replicas, or ``verify_every`` is 0.

        Raises:
            PayloadError: on all ranks, naming those with other parameters.
        """
        replica = self.owner.replica() if self.owner and self.settings.verify_every else ()
        if replica and self.transport.world_size > 1:
            own = AllGatherObject(int(fingerprint(replica)), about="the parameters")
            found = self.transport.perform(own)
            self._compared_at = self.step
            stamps = [Stamp(0, 0, model=each).words() for each in found]
            refuse_disagreement(stamps, [f"rank {rank}" for rank in self.transport.ranks])

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """Return a context: an error of this rank in it ends the step on the other ranks, too.

        Without it they would wait for this rank.
        """
        step = self.step
        try:
            yield
        except Exception as error:
            self._transaction.forget()
            if getattr(error, _REPORTED, False):
                raise
            if isinstance(error, PeerError):
                told = PeerError(f"{error}, during step {step}")
                setattr(told, _REPORTED, True)
                raise told from error.__cause__
            setattr(error, _REPORTED, True)
            with suppress(ValueError):  # without a process group there are no other ranks
                self.transport.report(error)
            raise

    def _stamp(self, bucket: Bucket) -> Stamp:
        """Return the stamp (header words) of all payloads of a bucket in the present step."""
        if bucket.digest is None:
            settings = {key: value for key, value in self.config().items() if key != "step"}
            bucket.digest = digest(settings, bucket.layout.segments, self.agreement.identity)
        owner = self.owner
        hyperparameters = digest(sorted(owner.hyperparameters().items())) if owner else 0
        return Stamp(bucket.digest, self.step, self.state.loads, hyperparameters)

    def bytes_per_round(
        self, shapes: Mapping[str, Sequence[int]], extras: Mapping[str, Sequence[int]] | None = None
    ) -> int:
        """Return the bytes that this rank will send in a round over tensors of these shapes.

        It needs neither a collective nor tensors.

        Args:
            shapes: the shapes of the tensors, by name.
            extras: shapes of the extras; see :meth:`average_`.

        Example::

            >>> from comm_hooks import Exchange, TopK
            >>> from comm_hooks.collectives import Simulated
            >>> exchange = Exchange(TopK(density=1 / 32), transport=Simulated(2)[0])
            >>> exchange.bytes_per_round({"w": (64, 64)}) < 4 * 64 * 64 / 16
            True
        """
        exempts = self.settings.exempts
        segments = [Segment(n, tuple(shape), exempts(shape)) for n, shape in shapes.items()]
        segments += [Segment(n, tuple(shape), True, True) for n, shape in (extras or {}).items()]
        nowhere = torch.device("meta")
        bucket = Bucket(Layout(tuple(segments), nowhere, self.settings.granularity))
        return self._route(bucket, True, None).traffic

    def count_sent(self, nbytes: int) -> None:
        """Add bytes that this rank has sent to :meth:`stats`."""
        self._traffic.sent += nbytes

    def count_gradients(self, nbytes: int) -> None:
        """Add the traffic of an all-reduce of so many bytes of gradients to :meth:`stats`.

        With :attr:`owner_counts` the owner calls it at each of its steps, else each round does.
        """
        ranks = self.transport.world_size
        self._traffic.uncompressed += 2 * (ranks - 1) * nbytes // ranks

    def stats(self) -> dict[str, float]:
        """Return the traffic of this rank since the start, and the norm of its residuals.

        Keys: ``steps``; ``bytes_sent`` and ``bytes_received``, without transport headers, by the
        ring algorithms of gloo and NCCL; ``bytes_uncompressed``, the bytes of an all-reduce in the
        dtype of the gradients; ``compression_ratio``, ``bytes_uncompressed`` over ``bytes_sent``;
        ``residual_norm``.  With ``collective="hierarchical"`` also ``bytes_sent_between_nodes``, a
        part of ``bytes_sent``.
        """
        self.wait()
        traffic = self._traffic
        knows_nodes = self.settings.collective == "hierarchical"
        between = {"bytes_sent_between_nodes": traffic.between_nodes} if knows_nodes else {}
        return {
            "steps": self.step,
            "bytes_sent": traffic.sent,
            "bytes_received": traffic.sent,
            **between,
            "bytes_uncompressed": traffic.uncompressed,
            "compression_ratio": traffic.uncompressed / traffic.sent if traffic.sent else 1.0,
            "residual_norm": self.state.residual_norm(),
        }

    def wait(self) -> None:
        """Wait until the headers of all payloads on an accelerator have been checked.

        The next step's rounds, :meth:`stats` and :meth:`state_dict` call it.

        Raises:
            PayloadError: on all ranks, if a payload was damaged or belonged to another step: the
                mean of its round was NaN.
        """
        self._checks.wait()

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank: plain numbers and tensors, safe for ``weights_only``.

        Residuals differ between ranks: save one file per rank.  All of them together can be loaded
        on another number of ranks (:meth:`load_state_dicts`).
        """
        self.wait()
        return self.state.state_dict(self._position(), self.agreement.identity)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that this rank saved; all ranks must load their own states.

        Raises:
            ValueError: if the state is damaged, or was saved by another rank, on another number of
                ranks, with another kind of memory, other parameters or shards that this exchange
                may not have, or, in private training, by a run without noise; nothing is changed.
        """
        self.state.load_state_dict(state, self._position(), self._names())

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restore the exchange from the states of *all* ranks of a run, on any number of ranks.

        On the same number of ranks each rank loads its own state.  On another number (or if there
        were shards and may be none) all ranks start with the mean of all residuals, and add the
        residuals of the shards: the residual of the mean over ranks stays the same, or the residual
        of the sum in private training, since its divisor is public.

        Args:
            states: the states in rank order; the same on all ranks.

        Raises:
            ValueError: if states are missing, out of order, of different steps or of another kind
                of memory; nothing is changed.
        """
        if self.settings.collective == "hierarchical":
            self._require_ranks_per_node()
        self.state.load_state_dicts(states, self._position(), self._names())

    def continues(self, states: Sequence[Mapping[str, Any]]) -> bool:
        """Return whether each rank of this run can load the state that the same rank saved.

        If not, because ranks, nodes or shards differ, use :meth:`load_state_dicts`.

        Args:
            states: the states of all ranks of the run that saved them, or of some of these ranks.
        """
        return self._position().continues(states)

    def _position(self) -> Position:
        return Position(
            self.transport.rank,
            self.transport.world_size,
            self.settings.collective,
            self.ranks_per_node,
            can_shard="sharded" in self.settings.carriers(),
        )

    def _names(self) -> Collection[str] | None:
        return self.owner.names() if self.owner else None

    def _require_ranks_per_node(self) -> int:
        count, ranks = self.ranks_per_node, self.transport.world_size
        if count is None:
            raise ValueError(
                "Exchange: collective 'hierarchical': how many ranks share a node is not known. "
                "LOCAL_WORLD_SIZE is not set (torchrun sets it), or the process group does not "
                "have equally many consecutive ranks on each node: pass ranks_per_node"
            )
        if ranks % count:
            raise ValueError(
                f"Exchange: collective 'hierarchical': {ranks} ranks cannot be divided into nodes "
                f"of {count}: ranks_per_node must divide the number of ranks"
            )
        return count

    def _route(
        self,
        bucket: Bucket,
        compress: bool | Compressor,
        noise_hook: NoiseHook | None,
        exact: Identity = _FLOATS,
    ) -> Route:
        place = noise_hook.place if noise_hook else None
        key = compress, place, exact
        if key not in bucket.routes:
            compressor = self.compressor if compress is True else compress or None
            over_nodes = self.settings.collective == "hierarchical" and compressor
            bucket.routes[key] = choose_route(
                bucket.layout,
                self.settings,
                compressor,
                self.transport,
                self.state.server_memory,
                exact=exact,
                place=place,
                ranks_per_node=self._require_ranks_per_node() if over_nodes else None,
                source=self.source_collective,
            )
        return bucket.routes[key]


@atexit.register
def _tell_of_rounds_not_compared() -> None:
    """Log how much of the run ranks have not compared; at the end nobody may be there to ask."""
    if count := max((exchange.rounds_not_compared for exchange in _exchanges), default=0):
        logger.warning(
            "the parameters of the ranks were last compared %d exchanges before the end of this "
            "process: end a run with save_rank_file() or synchronize()",
            count,
        )


def largest_in(dtype: torch.dtype) -> float | None:
    """Return the largest finite value of a dtype; None if its range is that of float32.

    A sparse compressor sends the sum of many steps at once: in float16, scaled by a GradScaler, it
    may overflow although no gradient did.
    """
    largest = torch.finfo(dtype).max
    return largest if largest < torch.finfo(torch.bfloat16).max else None

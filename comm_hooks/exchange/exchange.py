"""The exchange: one round after the other."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from comm_hooks.collectives.base import Transport
from comm_hooks.collectives.requests import Round
from comm_hooks.compressors.base import Compressor
from comm_hooks.compressors.identity import Identity
from comm_hooks.errors import PeerError
from comm_hooks.exchange.agreement import compare_tensors
from comm_hooks.exchange.bucket import Bucket
from comm_hooks.exchange.layout import Layout, Segment
from comm_hooks.exchange.message import RoundContext
from comm_hooks.exchange.noise_hook import NoiseHook
from comm_hooks.exchange.routes import RaggedShards, Route, choose_route
from comm_hooks.exchange.saving import SavedExchange
from comm_hooks.exchange.settings import Collective, ExchangeSettings
from comm_hooks.exchange.traffic import Traffic
from comm_hooks.memory.base import Memory
from comm_hooks.requirements import require_kind
from comm_hooks.wire.stamp import WIRE_VERSION, Stamp, digest

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from comm_hooks.exchange.settings import ExchangeOptions


class Exchange(SavedExchange):
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

    Attributes:
        provenance: who says what the state is made of, and judges states that are to be loaded;
            private training does.
        only_owners_remember: whether all rounds have a noise_hook at the owners' place, so that what
            is remembered is theirs.
        owes_sums: whether the owner of the exchange turns means into sums over ranks; what has not
            been sent is then kept as such on another number of them.

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
        super().__init__(settings, own_memory, transport, process_group)
        self._traffic = Traffic()

    def __deepcopy__(self, memo: dict[int, Any]) -> Exchange:
        """Return an exchange between the same ranks, with a copy of what is remembered."""
        duplicate = super().__deepcopy__(memo)
        duplicate._traffic = copy.copy(self._traffic)
        return duplicate

    @classmethod
    def of(
        cls,
        compressor: Compressor | str,
        /,
        *,
        transport: Transport | None = None,
        process_group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> Exchange:
        """Return an exchange from names as well as objects.

        Args:
            compressor, options: see :meth:`ExchangeSettings.of`.
            transport, process_group: see above.

        Raises:
            ValueError: as :meth:`ExchangeSettings.of`.
        """
        settings = ExchangeSettings.of(compressor, **options)
        values = {field.name: getattr(settings, field.name) for field in fields(settings)}
        return cls(**values, transport=transport, process_group=process_group)

    def __repr__(self) -> str:
        own = {f.name: getattr(self.settings, f.name) for f in fields(self.settings)[1:]}
        if self.settings.collective != "hierarchical":
            del own["ranks_per_node"]
        keywords = ", ".join(f"{name}={value!r}" for name, value in own.items())
        return f"Exchange({self.compressor!r}, {keywords})"

    def agree_on(self, settings: Mapping[str, Any]) -> None:
        """Add settings of the owner's that all ranks must have in common.

        To be called before the first round.

        Args:
            settings: plain values by name; those that were added before stay.
        """
        self.agreement.add(settings)

    def config(self) -> dict[str, Any]:
        """Return all that must be equal on all ranks, as plain values."""
        return {
            **self.settings.as_dict(),
            "ranks_per_node": self.ranks_per_node,
            "step": self.step,
            "wire_version": WIRE_VERSION,
            **self.agreement.settings,
        }

    def agree(self) -> Round[None]:
        """Make sure, once, that all ranks are configured alike."""
        if self.agreement.reached:
            return
        yield from self.agreement.reach(self.config(), self.transport.ranks)
        ranks = self.transport.world_size
        if self.settings.collective == "hierarchical":
            if self._require_ranks_per_node() == ranks:
                warnings.warn("all ranks are on one node: nothing is compressed", stacklevel=2)
        elif ranks == 1 and self.compressor != Identity():
            warnings.warn(
                "world size is 1: gradients are compressed and decompressed, but no communication "
                "is saved",
                stacklevel=2,
            )

    def agree_now(self) -> None:
        """Run :meth:`agree` before the first round; blocking, and all ranks must call it."""
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
        scale: float = 1.0,
        noise_hook: NoiseHook | None = None,
    ) -> Round[None]:
        """Return a round that replaces each tensor, in place, by its mean over ranks.

        For drivers of several ranks (:class:`~comm_hooks.collectives.Simulated`); with a
        process group use :meth:`average_`, which takes the same arguments.
        """
        yield from self.bucket_round(
            self.buckets.of(tensors, beside),
            [*tensors.values(), *(beside or {}).values()],
            compress=compress,
            memory=memory,
            scale=scale,
            noise_hook=noise_hook,
        )
        self.end_step()

    def end_step(self) -> None:
        """Count a step: whatever comes next belongs to other gradients of the same parameters.

        For hooks, which exchange bucket by bucket; :meth:`average_` does it itself.
        """
        self.step += 1

    def average_(
        self,
        tensors: Mapping[str, torch.Tensor],
        *,
        beside: Mapping[str, torch.Tensor] | None = None,
        compress: bool | Compressor = True,
        memory: Memory | None = None,
        noise_hook: NoiseHook | None = None,
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
            noise_hook: clips and adds noise on the way, for private training.

        Raises:
            ValueError: for tensors that are not dense and floating-point, and for a compressor
                or a noise_hook that cannot go with the exchange's other settings.
        """
        self.transport.run(
            self.round(
                tensors,
                beside=beside,
                compress=compress,
                memory=memory,
                noise_hook=noise_hook,
            )
        )

    def workspace(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return contiguous float32 tensors of these names and shapes to make a message in.

        :meth:`average_` works on them without copying.  They hold anything at first, and again as
        soon as another round averages tensors of any of these names.

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

    def bucket_round(
        self,
        bucket: Bucket,
        tensors: Sequence[torch.Tensor],
        *,
        compress: bool | Compressor = True,
        memory: Memory | None = None,
        scale: float = 1.0,
        noise_hook: NoiseHook | None = None,
        replica: Sequence[torch.Tensor] | None = None,
    ) -> Round[None]:
        """Return a round on one bucket of a step that may have several.

        Args:
            bucket: from :attr:`buckets`.
            tensors: dense, of one floating-point dtype, shaped like the bucket's segments;
                overwritten with the mean.
            compress, memory, noise_hook: see :meth:`average_`.
            scale: the factor by which the tensors are scaled at present.
            replica: what must be bit-identical on all ranks at this moment, of which now and then
                they compare a fingerprint; by default what the exchange's owner says.
        """
        if isinstance(compress, Compressor):
            self.settings.check(compress)
        round_number = self.transport.begin_round()
        yield from self.agree()
        is_new = not bucket.compared
        if is_new:
            yield from compare_tensors(bucket.layout.segments, self.transport.ranks)
            bucket.compared = True
        verify = self.verifies(is_new=is_new)
        stamp = self._stamp(bucket)
        if verify:
            stamp = self.agreement.with_fingerprint(stamp, replica)
        remembers = compress and not (noise_hook and noise_hook.place == "owner")
        terms = RoundContext(
            stamp,
            memory=(memory or self.memory) if remembers else None,
            scale=scale,
            verify=verify,
            limit=largest_in(tensors[0].dtype),
            noise_hook=noise_hook,
            judgments=self._judgments,
        )
        round_ = self._round(bucket, tensors, compress, terms)
        yield from self._reported(round_, round_number)

    def _round(
        self,
        bucket: Bucket,
        tensors: Sequence[torch.Tensor],
        compress: bool | Compressor,
        terms: RoundContext,
    ) -> Round[None]:
        self._judgments.settle(before=self.step)
        if not bucket.layout.work.numel():
            return  # parameters without elements
        route = self._route(bucket, compress, terms.noise_hook)
        bucket.layout.load(tensors)
        self._count(route, tensors)
        yield from route.travel(terms)
        bucket.layout.store(tensors)

    def reduce_scatter_round(
        self,
        shards: Sequence[Bucket],
        tensors: Sequence[Sequence[torch.Tensor]],
        output: Sequence[torch.Tensor],
        *,
        scale: float = 1.0,
        factor: float = 1.0,
    ) -> Round[None]:
        """Return a round in which each rank gets the mean of one shard only.

        The caller has called :meth:`agree_now`, and counts what an uncompressed round would have
        sent (:meth:`count_traffic`).

        Args:
            shards: a bucket for each rank's shard, in rank order.
            tensors: of each bucket; see :meth:`bucket_round`.
            output: shaped like the tensors of this rank's shard: ``factor`` times their mean.
            scale: see :meth:`bucket_round`.
        """
        round_number = self.transport.begin_round()
        own, limit = self.transport.rank, largest_in(output[0].dtype) if output else None
        verify = self.verifies()
        terms = [
            RoundContext(
                self._stamp(bucket),
                self.memory,
                scale,
                verify=verify,
                limit=limit,
                judgments=self._judgments,
            )
            for bucket in shards
        ]

        def round_() -> Round[None]:
            self._judgments.settle(before=self.step)
            layouts = [bucket.layout for bucket in shards]
            for layout, of_shard in zip(layouts, tensors, strict=True):
                layout.load(of_shard)
            exempt = self.settings.exempt
            compressors = [layout.compressors(self.compressor, exempt) for layout in layouts]
            route = RaggedShards(layouts, compressors, self.transport, self.settings.seed)
            self._traffic.sent += route.traffic
            yield from route.travel(terms, factor=factor)
            layouts[own].store(output)

        yield from self._reported(round_(), round_number)

    def verifies(self, *, is_new: bool = False) -> bool:
        """Return whether this step is one that makes sure of what ranks have in common.

        Args:
            is_new: nobody has made sure of it yet.
        """
        return self.agreement.is_due(self.step, self.settings.verify_every, is_new=is_new)

    def _reported(self, round_: Round[None], round_number: int) -> Round[None]:
        """Return the round; if it fails on this rank, the other ranks are told."""
        step = self.step
        try:
            yield from round_
        except PeerError as error:
            raise PeerError(f"{error}, during step {step}") from error.__cause__
        except Exception as error:
            self.transport.report(error, round_number)
            raise

    def _stamp(self, bucket: Bucket) -> Stamp:
        """Return what the payloads of a bucket in the present step have in common."""
        if bucket.digest is None:
            settings = {key: value for key, value in self.config().items() if key != "step"}
            bucket.digest = digest(settings, bucket.layout.segments)
        return self.agreement.stamp(bucket.digest, self.step)

    def bytes_per_round(
        self,
        shapes: Mapping[str, Sequence[int]],
        beside: Mapping[str, Sequence[int]] | None = None,
    ) -> int:
        """Return the bytes that this rank will send in a round over tensors of these shapes.

        Sends nothing, and needs none of the tensors.

        Args:
            shapes: of the tensors, by name.
            beside: of what travels beside them; see :meth:`average_`.

        Example::

            >>> from comm_hooks import Exchange, TopK
            >>> from comm_hooks.collectives import Simulated
            >>> exchange = Exchange(TopK(density=1 / 32), transport=Simulated(2)[0])
            >>> exchange.bytes_per_round({"w": (64, 64)}) < 4 * 64 * 64 / 16
            True
        """
        exempts = self.settings.exempts
        segments = [Segment(n, tuple(shape), exempts(shape)) for n, shape in shapes.items()]
        segments += [Segment(n, tuple(shape), True, True) for n, shape in (beside or {}).items()]
        nowhere = torch.device("meta")
        bucket = Bucket(Layout(tuple(segments), nowhere, self.settings.granularity))
        return self._route(bucket, True, None).traffic

    def _count(self, route: Route, tensors: Sequence[torch.Tensor]) -> None:
        ranks = self.transport.world_size
        uncompressed = sum(tensor.nbytes for tensor in tensors)
        self.count_traffic(route.traffic, 2 * (ranks - 1) * uncompressed // ranks)
        self._traffic.between_nodes += route.traffic_between_nodes

    def count_traffic(self, nbytes: int, uncompressed: int) -> None:
        """Add traffic that went past the compressor (sparse gradients)."""
        self._traffic.sent += nbytes
        self._traffic.uncompressed += uncompressed

    def stats(self) -> dict[str, float]:
        """Return what this rank moved since the start.

        Keys: ``steps``; ``bytes_sent`` and ``bytes_received``, without transport headers, by the
        ring algorithms of gloo and NCCL; ``bytes_uncompressed``, what an all-reduce in the
        gradients' dtype would have sent; ``compression_ratio``, the latter over the bytes sent;
        ``residual_norm``, of everything the memory keeps.  With ``collective="hierarchical"`` also
        ``bytes_sent_between_nodes``, which is a part of ``bytes_sent``.
        """
        self.settle()
        traffic = self._traffic
        knows_nodes = self.settings.collective == "hierarchical"
        between = {"bytes_sent_between_nodes": traffic.between_nodes} if knows_nodes else {}
        return {
            "steps": self.step,
            "bytes_sent": traffic.sent,
            "bytes_received": traffic.sent,
            **between,
            "bytes_uncompressed": traffic.uncompressed,
            "compression_ratio": traffic.ratio,
            "residual_norm": self.remembered.norm(),
        }

    def _route(
        self, bucket: Bucket, compress: bool | Compressor, noise_hook: NoiseHook | None
    ) -> Route:
        place = noise_hook.place if noise_hook else None
        key = compress, place
        if key not in bucket.routes:
            compressor = self.compressor if compress is True else compress or None
            over_nodes = self.settings.collective == "hierarchical" and compressor
            bucket.routes[key] = choose_route(
                bucket.layout,
                self.settings,
                compressor,
                self.transport,
                self.remembered.server,
                place=place,
                ranks_per_node=self._require_ranks_per_node() if over_nodes else None,
            )
        return bucket.routes[key]


def largest_in(dtype: torch.dtype) -> float | None:
    """Return the largest number that a dtype can hold; None if float32 has no larger ones.

    A sparse compressor sends what has gathered over many steps at once: in float16, scaled by a
    GradScaler, that may be too much although no gradient was.
    """
    largest = torch.finfo(dtype).max
    return largest if largest < torch.finfo(torch.bfloat16).max else None

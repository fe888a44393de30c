"""Step times at numbers of ranks that nobody here has, by the cost model of ``comm-hooks advise``.

Nothing in this module is measured.  Bytes are exact: they are those of the library's own payloads.
Everything else is an assumption, stated in :class:`Assumptions`, or the cost model's for NCCL: full
use of every link, trees, and messages to all other ranks that cost nothing beyond their bytes and
one latency, which favours ``sharded`` at thousands of ranks.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from comm_hooks.collectives import Simulated
from comm_hooks.compressors import Compressor, CountSketch, Identity, Sign, TopK
from comm_hooks.exchange.layout import Layout, Segment
from comm_hooks.exchange.routes import Gathered, Route, Sharded, Summed
from comm_hooks.launchers.advise.cost_model import (
    Collective,
    Link,
    Network,
    Plan,
    Round,
    all_reduce,
    matrix_shapes,
    predict,
    ready_shares,
)

Way = Literal["all_reduce", "all_gather", "sharded", "hierarchical"]

_FIRST_BUCKET, _BUCKET = 1 << 20, 25 << 20  # DDP's defaults
_LOCAL_STEPS = 8


@dataclass(frozen=True)
class Assumptions:
    """What the predictions rest on; none of it was measured.

    Attributes:
        ranks_per_node: they share their node's link to the others.
        latency: seconds of a tiny message between two nodes.
        inside_bandwidth, inside_latency: of the link between two ranks of a node; bytes per second
            and seconds.
        memory: bytes per second that a copy moves on the device, read and written.
        share: of that, what compressors reach.
        sector: bytes that one scattered access costs, read and written.
    """

    ranks_per_node: int = 8
    latency: float = 25e-6
    inside_bandwidth: float = 150e9
    inside_latency: float = 5e-6
    memory: float = 1.5e12
    share: float = 0.6
    sector: int = 64

    def network(self, ranks: int, gigabits: float) -> Network:
        """Return that many ranks, with links of that many Gbit/s between nodes."""
        link = Link(gigabits * 1e9 / 8, self.latency)
        return Network(
            ranks,
            self.inside if ranks <= self.ranks_per_node else link,
            self.ranks_per_node,
            backend="nccl",
        )

    @property
    def inside(self) -> Link:
        """The link between two ranks of a node."""
        return Link(self.inside_bandwidth, self.inside_latency)

    def seconds(self, nbytes: float) -> float:
        """Return how long the device takes to move so many bytes to and from its memory."""
        return nbytes / (self.share * self.memory)


@dataclass(frozen=True)
class InsideNode(Collective):
    """A collective of the ranks of each node, over the links inside it."""

    ranks_per_node: int
    link: Link

    def seconds(self, network: Network) -> float:
        inside = replace(network, ranks=self.ranks_per_node, link=self.link)
        return super().seconds(inside)


@dataclass(frozen=True)
class AcrossNodes(Collective):
    """A collective of one rank of each node, at the same time as those of its other ranks."""

    ranks_per_node: int

    def seconds(self, network: Network) -> float:
        share = replace(network.link, bandwidth=network.link.bandwidth / self.ranks_per_node)
        ranks = network.ranks // self.ranks_per_node
        return super().seconds(replace(network, ranks=ranks, link=share, ranks_per_node=1))


@dataclass(frozen=True)
class Model:
    """A model by its number of parameters, and the seconds of a step without any exchange."""

    name: str
    numel: int
    seconds: float


MODELS = (
    # 16,384 and 8,192 tokens per rank at 125 TFLOP/s, 6 operations per parameter and token.
    Model("125 M", 125_000_000, 0.1),
    Model("1.3 B", 1_300_000_000, 0.5),
)


@dataclass(frozen=True)
class Scheme:
    """One method: what its payloads are, and how they travel.

    Args:
        name: what tables call it.
        compressor: of the gradients; None sends nothing.
        way: how payloads travel.
        local_steps: steps between two exchanges.
        bits: of an element where nothing is compressed.
    """

    name: str
    compressor: Compressor | None
    way: Way = "all_reduce"
    local_steps: int = 1
    bits: int = 32


def make_schemes() -> list[Scheme]:
    """Return what is predicted: the first two are what the others are measured by."""
    top_k = TopK(density=1 / 64, value_bits=1)
    return [
        Scheme("no communication", None),
        Scheme("all-reduce, bf16", Identity(), bits=16),
        Scheme("Count-Sketch 2 %, all-reduce", CountSketch(ratio=0.02)),
        Scheme("signs, sharded", Sign(), "sharded"),
        Scheme("top-k 1/64, all-gather", top_k, "all_gather"),
        Scheme("top-k 1/64, sharded", top_k, "sharded"),
        Scheme("top-k 1/64, hierarchical", top_k, "hierarchical"),
        Scheme(
            "local steps, top-k 1/16, sharded",
            TopK(density=1 / 16, value_bits=1),
            "sharded",
            _LOCAL_STEPS,
        ),
    ]


@dataclass(frozen=True)
class Predicted:
    """One prediction.

    Attributes:
        seconds: of a step.
        bytes_sent: by one rank per step, inside its node and out of it.
        codec: seconds of the step in which the device compresses and decompresses.
    """

    model: str
    gigabits: float
    ranks: int
    scheme: str
    seconds: float
    bytes_sent: float
    codec: float


def predict_all(
    assumptions: Assumptions,
    models: Sequence[Model],
    gigabits: Sequence[float],
    ranks: Sequence[int],
) -> list[Predicted]:
    """Return a prediction for every combination, in this order of loops, schemes innermost."""
    return [
        _predict(assumptions, model, rate, count, scheme)
        for model in models
        for rate in gigabits
        for count in ranks
        for scheme in make_schemes()
    ]


def _predict(
    assumptions: Assumptions, model: Model, gigabits: float, ranks: int, scheme: Scheme
) -> Predicted:
    plan = plan_of(assumptions, scheme, model.numel, ranks)
    network = assumptions.network(ranks, gigabits)
    return Predicted(
        model.name,
        gigabits,
        ranks,
        scheme.name,
        predict(plan, network, forward_backward=model.seconds),
        plan.traffic,
        plan.codec,
    )


@functools.lru_cache(maxsize=256)
def plan_of(assumptions: Assumptions, scheme: Scheme, numel: int, ranks: int) -> Plan:
    """Return what a method does on a model of equal square matrices, in DDP's buckets."""
    if scheme.compressor is None:
        return Plan()
    shapes = matrix_shapes(numel)
    sizes = [4 * torch.Size(shape).numel() for shape in shapes]
    known: dict[tuple[tuple[int, ...], ...], Round] = {}
    rounds = []
    for members, ready in ready_shares(sizes, _FIRST_BUCKET, _BUCKET):
        bucket = tuple(shapes[::-1][members.start : members.stop])
        if bucket not in known:
            known[bucket] = _round_of(assumptions, scheme, bucket, ranks)
        exchanged = known[bucket]
        rounds.append(exchanged.scaled(1.0, ready))
    if scheme.local_steps == 1:
        return Plan(hook_rounds=tuple(rounds))
    return Plan(optimizer_rounds=tuple(rounds), steps=scheme.local_steps)


def _round_of(
    assumptions: Assumptions, scheme: Scheme, bucket: Sequence[tuple[int, ...]], ranks: int
) -> Round:
    """Return one bucket's round.

    The device reads gradients and residuals and writes residuals (12 bytes per element), and writes
    the mean (4).  Of each payload that it decodes it reads all bytes; what stands for one of few
    elements is added to a place of its own in memory.  Sketches have no residual, and are read and
    written once each way.
    """
    compressor = scheme.compressor
    assert compressor
    if scheme.way == "hierarchical":
        return _between_nodes(assumptions, scheme, bucket, ranks)
    numel = sum(torch.Size(shape).numel() for shape in bucket)
    if isinstance(compressor, Identity):
        cast = 0.0 if scheme.bits == 32 else assumptions.seconds(6 * numel)
        return Round((all_reduce(numel * scheme.bits // 8, ranks),), cast, cast)
    route = _route(scheme, bucket, ranks)
    collectives: tuple[Collective, ...]
    kept = assumptions.sector * compressor.density * numel if isinstance(compressor, TopK) else 0.0
    if isinstance(route, Sharded):
        # All of the bucket up; an N-th of it averaged and compressed again; all of it down.
        one_way = route.traffic // 2
        collectives = (Collective("all_to_all", one_way), Collective("all_gather", one_way))
        arrived = one_way * ranks / (ranks - 1) + kept
        before, after = 12 * numel + 16 * numel / ranks + arrived, 4 * numel + arrived
    elif compressor.linear:
        collectives = (Collective("all_reduce", route.traffic),)
        before = after = 8.0 * numel
    else:
        collectives = (Collective("all_gather", route.traffic),)
        payload = route.traffic / (ranks - 1)
        before, after = 12.0 * numel, 4 * numel + ranks * (payload + kept)
    return Round(collectives, assumptions.seconds(before), assumptions.seconds(after))


def _between_nodes(
    assumptions: Assumptions, scheme: Scheme, bucket: Sequence[tuple[int, ...]], ranks: int
) -> Round:
    """Return the round of a bucket that is averaged in full precision inside each node.

    Each rank of a node gets a part of every parameter, exchanges it with the ranks at its place in
    the other nodes, by whichever of the ways sends fewer bytes, and gives the result to its node.
    """
    of_node = min(assumptions.ranks_per_node, ranks)
    parts = tuple((1, -(-torch.Size(shape).numel() // of_node)) for shape in bucket)
    numel = sum(width for _, width in parts)
    inside = (of_node - 1) * 4 * numel
    first = InsideNode("all_to_all", inside, of_node, assumptions.inside)
    last = InsideNode("all_gather", inside, of_node, assumptions.inside)
    averaging = assumptions.seconds(4 * (2 * of_node + 1) * numel)
    if ranks == of_node:
        return Round((first, last), averaging)
    ways: tuple[Way, Way] = ("all_gather", "sharded")
    rounds = [
        _round_of(assumptions, replace(scheme, way=way), parts, ranks // of_node) for way in ways
    ]
    between = min(rounds, key=lambda each: each.traffic)
    across = tuple(AcrossNodes(c.kind, c.traffic, of_node) for c in between.collectives)
    return Round((first, *across, last), averaging + between.encode, between.decode)


def _route(scheme: Scheme, bucket: Sequence[tuple[int, ...]], ranks: int) -> Route:
    """Return the library's own route, which knows the bytes; on a device without memory."""
    assert scheme.compressor
    segments = [Segment(str(index), shape, exempt=False) for index, shape in enumerate(bucket)]
    layout = Layout(tuple(segments), torch.device("meta"), "parameter")
    transport = Simulated(ranks)[0]
    compressors = [scheme.compressor] * len(layout.compressed)
    if scheme.way == "sharded":
        return Sharded(layout, compressors, transport, 0, None)
    kind = Summed if scheme.compressor.linear else Gathered
    return kind(layout, compressors, transport, 0)

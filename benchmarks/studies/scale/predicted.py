"""Step times at numbers of ranks that nobody here has, by the cost model of ``comm-hooks advise``.

Nothing in this module is measured.  Bytes are exact: they are those of the library's own payloads.
Everything else is an assumption, stated in :class:`Assumptions`, or the cost model's for NCCL: full
use of every link, trees, and messages to all other ranks that cost nothing beyond their bytes and
one latency, which favours ``sharded`` at thousands of ranks.
"""

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from comm_hooks.collectives import Simulated
from comm_hooks.compressors import TopK
from comm_hooks.exchange.layout import Layout, Segment
from comm_hooks.exchange.routes import Gathered, Sharded
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

Way = Literal["none", "all_reduce", "all_gather", "sharded", "hierarchical"]

_FIRST_BUCKET, _BUCKET = 1 << 20, 25 << 20  # DDP's defaults


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


TOP_K = TopK(density=1 / 64, value_bits=1)
SCHEMES: dict[str, Way] = {
    "no communication": "none",
    "all-reduce, bf16": "all_reduce",
    "top-k 1/64, all-gather": "all_gather",
    "top-k 1/64, sharded": "sharded",
    "top-k 1/64, hierarchical": "hierarchical",
}
"""The predicted methods; the first two are what the others are measured by."""


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
    rows = []
    for model, rate, count in itertools.product(models, gigabits, ranks):
        for name, way in SCHEMES.items():
            plan = plan_of(assumptions, way, model.numel, count)
            network = assumptions.network(count, rate)
            seconds = predict(plan, network, forward_backward=model.seconds)
            rows.append(Predicted(model.name, rate, count, name, seconds, plan.traffic, plan.codec))
    return rows


@functools.lru_cache(maxsize=256)
def plan_of(assumptions: Assumptions, way: Way, numel: int, ranks: int) -> Plan:
    """Return what a method does on a model of equal square matrices, in DDP's buckets."""
    if way == "none":
        return Plan()
    shapes = matrix_shapes(numel)
    sizes = [4 * torch.Size(shape).numel() for shape in shapes]
    known: dict[tuple[tuple[int, ...], ...], Round] = {}
    rounds = []
    for members, ready in ready_shares(sizes, _FIRST_BUCKET, _BUCKET):
        bucket = tuple(shapes[::-1][members.start : members.stop])
        if bucket not in known:
            known[bucket] = _round_of(assumptions, way, bucket, ranks)
        rounds.append(known[bucket].scaled(1.0, ready))
    return Plan(hook_rounds=tuple(rounds))


def _round_of(
    assumptions: Assumptions, way: Way, bucket: Sequence[tuple[int, ...]], ranks: int
) -> Round:
    """Return one bucket's round.

    The device reads gradients and residuals and writes residuals (12 bytes per element), and writes
    the mean (4).  It reads all bytes of each payload that it decodes, and adds each kept element
    to a place of its own in memory.
    """
    if way == "hierarchical":
        return _between_nodes(assumptions, bucket, ranks)
    numel = sum(torch.Size(shape).numel() for shape in bucket)
    if way == "all_reduce":
        cast = assumptions.seconds(6 * numel)
        return Round((all_reduce(2 * numel, ranks),), cast, cast)
    traffic = _traffic(way, bucket, ranks)
    collectives: tuple[Collective, ...]
    kept = assumptions.sector * TOP_K.density * numel
    if way == "sharded":
        # All of the bucket up; an N-th of it averaged and compressed again; all of it down.
        one_way = traffic // 2
        collectives = (Collective("all_to_all", one_way), Collective("all_gather", one_way))
        arrived = one_way * ranks / (ranks - 1) + kept
        before, after = 12 * numel + 16 * numel / ranks + arrived, 4 * numel + arrived
    else:
        collectives = (Collective("all_gather", traffic),)
        payload = traffic / (ranks - 1)
        before, after = 12.0 * numel, 4 * numel + ranks * (payload + kept)
    return Round(collectives, assumptions.seconds(before), assumptions.seconds(after))


def _between_nodes(
    assumptions: Assumptions, bucket: Sequence[tuple[int, ...]], ranks: int
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
    rounds = [_round_of(assumptions, way, parts, ranks // of_node) for way in ways]
    between = min(rounds, key=lambda each: each.traffic)
    across = tuple(AcrossNodes(c.kind, c.traffic, of_node) for c in between.collectives)
    return Round((first, *across, last), averaging + between.encode, between.decode)


def _traffic(way: Way, bucket: Sequence[tuple[int, ...]], ranks: int) -> int:
    """Return the bytes of top-k by the library's own route, on a device without memory."""
    segments = [Segment(str(index), shape, exempt=False) for index, shape in enumerate(bucket)]
    layout = Layout(tuple(segments), torch.device("meta"), "parameter")
    transport = Simulated(ranks)[0]
    compressors = [TOP_K] * len(layout.compressed)
    if way == "sharded":
        return Sharded(layout, compressors, transport, 0, None).traffic
    return Gathered(layout, compressors, transport, 0).traffic

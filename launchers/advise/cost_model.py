"""How long a step takes: arithmetic, codec, and what crosses the wire, some of it at once.

The time of a collective on a link is ::

    rounds * latency + bytes / (efficiency * bandwidth)

with the bytes as :mod:`comm_hooks.collectives.requests` counts them, the latency and the bandwidth
of a single transfer (so that headers and interrupts are in them), and for each collective two
constants: how many transfers follow one another, and how well it uses the link.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from comm_hooks.collectives.requests import AllGather, AllReduce, AllToAll

Kind = Literal["all_reduce", "all_gather", "all_to_all"]
Members = Literal["all", "node", "across"]

TCP_SHARE = 1448 / 1514
"""Of the bytes on an Ethernet link, those that are not headers: the best a transfer can do."""

BACKWARD_SHARE = 2 / 3
"""Of forward and backward: for each product of matrices forward there are two backward."""

_GLOO_EFFICIENCY: dict[Kind, tuple[float, float]] = {
    # Bandwidth used over that of one transfer: with two ranks, with more.  Measured in network
    # namespaces at 100 Mbit on 1 to 8 MiB.  Two ranks send acknowledgements against each other's
    # data; in an all-to-all of more, several senders meet at one receiver.
    "all_reduce": (0.93, 0.93),
    "all_gather": (0.91, 0.93),
    "all_to_all": (0.95, 0.82),
}


@dataclass(frozen=True)
class Link:
    """One way between two ranks: bytes per second of one long transfer, seconds of a tiny one."""

    bandwidth: float
    latency: float

    def slowest(self, other: "Link") -> "Link":
        """Return what a ring over both kinds of links is held up by."""
        return Link(min(self.bandwidth, other.bandwidth), max(self.latency, other.latency))


@dataclass(frozen=True)
class Network:
    """What joins the ranks.

    Attributes:
        ranks: N, at least 2.
        between: the slowest link between two nodes.
        ranks_per_node: L; they share their node's link.
        inside: the slowest link inside a node; None where every node has one rank.
        backend: of ``torch.distributed``.  Gloo's constants are measured.  For NCCL full use of
            the link and trees (a number of rounds that grows with log N) are assumed, not measured.
    """

    ranks: int
    between: Link
    ranks_per_node: int = 1
    inside: Link | None = None
    backend: str = "gloo"

    @property
    def ring(self) -> Link:
        """The link that holds up a ring over all ranks, which enters and leaves each node once."""
        if self.ranks <= self.ranks_per_node:
            return self.inside or self.between
        return self.between.slowest(self.inside) if self.inside else self.between


@dataclass(frozen=True)
class Collective:
    """One collective of a round.

    Attributes:
        kind: what it does.
        traffic: the bytes that each rank sends.
        members: which ranks take part in one: ``"all"``; those of a ``"node"``; or those at the
            same place in every node, ``"across"``, of which a node's ranks have one each at the
            same time.
    """

    kind: Kind
    traffic: int
    members: Members = "all"

    @classmethod
    def of(cls, request: AllReduce | AllGather | AllToAll, ranks: int) -> "Collective":
        """Return what a request costs between ``ranks`` ranks, those of its group."""
        kinds: dict[type, Kind] = {
            AllReduce: "all_reduce",
            AllGather: "all_gather",
            AllToAll: "all_to_all",
        }
        members: Members = request.group.kind if request.group else "all"
        return cls(kinds[type(request)], request.traffic(ranks), members)

    def seconds(self, network: Network) -> float:
        """Return how long it takes when nothing else uses the network."""
        ranks, link, load = self._path(network)
        if ranks < 2:
            return 0.0
        efficiency = 1.0
        if network.backend == "gloo":
            efficiency = _GLOO_EFFICIENCY[self.kind][ranks > 2]
        transfer = load * self.traffic / (efficiency * link.bandwidth)
        return self._rounds(ranks, network.backend) * link.latency + transfer

    def _path(self, network: Network) -> tuple[int, Link, float]:
        """Return how many ranks take part, over which link, and how many transfers share it."""
        of_node = min(network.ranks_per_node, network.ranks)
        if self.members == "node":
            return of_node, network.inside or network.between, 1.0
        if self.members == "across":
            return network.ranks // of_node, network.between, of_node
        outside = network.ranks - of_node
        load = 1.0
        if self.kind == "all_to_all" and outside:
            # Every rank of a node sends to every rank outside, over the one link of the node.
            load = of_node * outside / (network.ranks - 1)
        return network.ranks, network.ring, load

    def _rounds(self, ranks: int, backend: str) -> float:
        if self.kind == "all_to_all":
            return 1  # all transfers are posted at once
        hops = ranks - 1
        if backend == "nccl":
            hops = math.ceil(math.log2(ranks))
        return 2 * hops if self.kind == "all_reduce" else hops


def all_reduce(nbytes: int, ranks: int) -> Collective:
    """Return the all-reduce of a payload of that many bytes."""
    payload = torch.empty(nbytes, dtype=torch.uint8, device="meta")
    return Collective.of(AllReduce(payload), ranks)


@dataclass(frozen=True)
class Exchanged:
    """One round: what is computed before its collectives and after them, in seconds.

    ``ready`` says when it may begin, as a share of the backward pass: 1 is its end.
    """

    collectives: tuple[Collective, ...]
    before: float = 0.0
    after: float = 0.0
    ready: float = 1.0

    def sent(self) -> int:
        """Return the bytes that this rank sends."""
        return sum(collective.traffic for collective in self.collectives)


@dataclass(frozen=True)
class Compute:
    """A step's arithmetic in seconds, without any exchange."""

    forward_backward: float
    optimizer: float = 0.0

    @classmethod
    def of_step(cls, step: float, optimizer: float) -> "Compute":
        """Split a step whose optimizer takes that long (but not more than the step)."""
        optimizer = min(optimizer, step)
        return cls(step - optimizer, optimizer)


@dataclass(frozen=True)
class Plan:
    """What one method does in ``steps`` steps.

    Attributes:
        in_backward: rounds of each step that a DDP hook begins during the backward pass.
        in_optimizer: rounds of all ``steps`` steps together, begun by the optimizer.
        optimizer: seconds per step that the method's own optimizer computes, outside of
            ``in_optimizer``; None: the optimizer is the user's.
        state_bytes: what each rank keeps for the method beside the optimizer: residuals.
        noise: seconds per step of all this arithmetic that may have been another load's.
    """

    in_backward: tuple[Exchanged, ...] = ()
    in_optimizer: tuple[Exchanged, ...] = ()
    steps: int = 1
    optimizer: float | None = None
    state_bytes: int = 0
    noise: float = 0.0

    @property
    def codec(self) -> float:
        """Seconds per step that its rounds compute, before and after their collectives."""
        blocking = sum(exchanged.before + exchanged.after for exchanged in self.in_optimizer)
        hooked = sum(exchanged.before + exchanged.after for exchanged in self.in_backward)
        return hooked + blocking / self.steps

    def sent_per_step(self) -> float:
        """Return the bytes that each rank sends per step, in the mean."""
        regular = sum(exchanged.sent() for exchanged in self.in_backward)
        return regular + sum(exchanged.sent() for exchanged in self.in_optimizer) / self.steps


@dataclass(frozen=True)
class Prediction:
    """The seconds of a step: in all, and those that the device computes (codec included)."""

    step: float
    arithmetic: float

    @property
    def waiting(self) -> float:
        """Seconds in which there is nothing to do but wait for the network."""
        return self.step - self.arithmetic


def predict(
    plan: Plan, compute: Compute, network: Network, *, afterwards: Sequence[Collective] = ()
) -> Prediction:
    """Return the mean time of a step.

    1. forward, then backward; a hook's round begins when its share of the backward pass is done;
    2. encoding takes the device's time; the collectives of a round follow one another beside the
       rest of the backward pass.  The network does one collective at a time, in order;
    3. decoding takes the device's time, the last round's after its collectives;
    4. the optimizer, whose rounds do not overlap with anything;
    5. what comes ``afterwards`` in every step: under ZeRO the all-gather of parameters.

    Args:
        plan: what the method does.
        compute: without any exchange.
        network: between the ranks.

    Example::

        >>> network = Network(2, Link(bandwidth=12.5e6, latency=1e-4))
        >>> plan = Plan(in_backward=(Exchanged((all_reduce(20_000_000, ranks=2),)),))
        >>> round(predict(plan, Compute(0.3), network).step, 2)
        2.02
    """
    backward = BACKWARD_SHARE * compute.forward_backward
    device = compute.forward_backward - backward
    network_free, done = 0.0, 0.0
    last_after = 0.0
    for exchanged in sorted(plan.in_backward, key=lambda exchanged: exchanged.ready):
        device += (exchanged.ready - done) * backward + last_after + exchanged.before
        done = exchanged.ready
        last_after = exchanged.after
        for collective in exchanged.collectives:
            network_free = max(device, network_free) + collective.seconds(network)
    device += (1 - done) * backward
    time = max(device, network_free) + last_after

    optimizer = compute.optimizer if plan.optimizer is None else plan.optimizer
    blocking = sum(
        exchanged.before + exchanged.after + sum(c.seconds(network) for c in exchanged.collectives)
        for exchanged in plan.in_optimizer
    )
    time += optimizer + blocking / plan.steps + sum(c.seconds(network) for c in afterwards)
    return Prediction(time, compute.forward_backward + optimizer + plan.codec)


def ready_shares(sizes: Sequence[int], first_cap: int, cap: int) -> list[tuple[range, float]]:
    """Return DDP's buckets and when each is ready, as a share of the backward pass.

    Gradients become ready last parameter first, each in time with its size.  DDP closes a bucket
    once it holds ``cap`` bytes, the first one at ``first_cap``.

    Args:
        sizes: bytes of each parameter, in the model's order.

    Returns:
        For each bucket the range of its parameters in *reversed* order, and its share.

    Example::

        >>> ready_shares([6, 2, 2], first_cap=1, cap=5)
        [(range(0, 1), 0.2), (range(1, 3), 1.0)]
    """
    buckets: list[tuple[range, float]] = []
    total, filled, seen, start = sum(sizes), 0, 0, 0
    for index, size in enumerate(reversed(sizes)):
        filled += size
        seen += size
        if filled >= (cap if buckets else first_cap) or index == len(sizes) - 1:
            buckets.append((range(start, index + 1), seen / total))
            start, filled = index + 1, 0
    return buckets

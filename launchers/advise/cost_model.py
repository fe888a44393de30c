"""Prediction of the time of a training step from its arithmetic, its payloads and the network.

A collective takes ::

    rounds * latency + bytes / (efficiency * bandwidth)

The bytes are those of :mod:`comm_hooks.collectives.requests`.  Latency and bandwidth are those of a
single transfer, headers and interrupts included.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from comm_hooks.collectives.requests import AllGather, AllReduce, AllToAll, Request

TCP_SHARE = 1448 / 1514
"""The share of the bytes on an Ethernet link that is payload, not headers."""

BACKWARD_SHARE = 2 / 3
"""The backward pass's share of the time of both: two matrix products for each forward one."""

_LEAST_SIDE, _LEAST_MATRICES = 32, 64

_GLOO_EFFICIENCY: dict[type[Request], tuple[float, float]] = {
    # The bandwidth of a collective over that of one transfer: with two ranks, with more.  Measured
    # between network namespaces at 100 Mbit/s with 1 to 8 MiB.  Two ranks send acknowledgements
    # against each other's data; in a larger all-to-all several senders share one receiver.
    AllReduce: (0.93, 0.93),
    AllGather: (0.91, 0.93),
    AllToAll: (0.95, 0.82),
}


@dataclass(frozen=True)
class Link:
    """One direction of a link: bandwidth in bytes per second, one-way latency in seconds."""

    bandwidth: float
    latency: float


@dataclass(frozen=True)
class Network:
    """The links between all ranks.

    Attributes:
        ranks: N, the number of ranks, at least 2.
        link: the slowest link between two nodes, or between two ranks of a single node.
        ranks_per_node: the number of ranks on a node, which share its link to other nodes.
        backend: the backend of ``torch.distributed``.  The constants of gloo are measured.  NCCL is
            assumed to use the whole link, and trees with log2(N) rounds.
    """

    ranks: int
    link: Link
    ranks_per_node: int = 1
    backend: str = "gloo"


@dataclass(frozen=True)
class Collective:
    """One collective: its kind, and ``traffic``, the bytes that each rank sends."""

    kind: type[Request]
    traffic: int

    @classmethod
    def of(cls, request: AllReduce | AllGather | AllToAll, ranks: int) -> "Collective":
        """Return the collective of a request between ``ranks`` ranks."""
        return cls(type(request), request.traffic(ranks))

    def seconds(self, network: Network) -> float:
        """Return the predicted duration on an otherwise idle network."""
        ranks, gloo = network.ranks, network.backend == "gloo"
        if ranks < 2:
            return 0.0
        load = 1.0
        outside = ranks - network.ranks_per_node
        if self.kind is AllToAll:
            rounds = 1  # all transfers start at once
            if outside > 0:
                # Each rank of a node sends to each rank outside, over the one link of the node.
                load = network.ranks_per_node * outside / (ranks - 1)
        else:
            hops = ranks - 1 if gloo else math.ceil(math.log2(ranks))
            rounds = 2 * hops if self.kind is AllReduce else hops
        efficiency = _GLOO_EFFICIENCY[self.kind][ranks > 2] if gloo else 1.0
        transfer = load * self.traffic / (efficiency * network.link.bandwidth)
        return rounds * network.link.latency + transfer


def all_reduce(nbytes: int, ranks: int) -> Collective:
    """Return the all-reduce of a payload of ``nbytes`` bytes between ``ranks`` ranks."""
    payload = torch.empty(nbytes, dtype=torch.uint8, device="meta")
    return Collective.of(AllReduce(payload), ranks)


@dataclass(frozen=True)
class Round:
    """One exchange: arithmetic and collectives.

    Attributes:
        collectives: the collectives, which run one after the other.
        encode: seconds of arithmetic before the last collective.
        decode: seconds of arithmetic after it.
        ready: the share of the backward pass after which a hook starts the round; 1 is its end.
    """

    collectives: tuple[Collective, ...]
    encode: float = 0.0
    decode: float = 0.0
    ready: float = 1.0

    @property
    def traffic(self) -> int:
        """The bytes that this rank sends."""
        return sum(collective.traffic for collective in self.collectives)

    def seconds(self, network: Network) -> float:
        """Return the predicted duration if collectives and arithmetic do not overlap."""
        return self.encode + self.decode + sum(c.seconds(network) for c in self.collectives)

    def scaled(self, factor: float, ready: float = 1.0) -> "Round":
        """Return the exchange of a vector with ``factor`` times as many elements."""
        collectives = tuple(replace(c, traffic=round(factor * c.traffic)) for c in self.collectives)
        return Round(collectives, factor * self.encode, factor * self.decode, ready)


@dataclass(frozen=True)
class Plan:
    """The exchanges and the arithmetic of one method.

    Attributes:
        hook_rounds: the exchanges of each step, started by a DDP hook during the backward pass.
        optimizer_rounds: those of ``steps`` steps together, by the optimizer after backward.
        steps: the number of steps that ``optimizer_rounds`` cover.
        optimizer: seconds per step of the method's own optimizer; None for the user's optimizer.
    """

    hook_rounds: tuple[Round, ...] = ()
    optimizer_rounds: tuple[Round, ...] = ()
    steps: int = 1
    optimizer: float | None = None

    @property
    def codec(self) -> float:
        """The seconds of encoding and decoding per step."""
        hooked = sum(r.encode + r.decode for r in self.hook_rounds)
        return hooked + sum(r.encode + r.decode for r in self.optimizer_rounds) / self.steps

    @property
    def arithmetic(self) -> float:
        """The seconds of encoding, decoding and the method's own optimizer per step."""
        return self.codec + (self.optimizer or 0.0)

    @property
    def traffic(self) -> float:
        """The bytes that each rank sends per step, on average."""
        hooked = sum(r.traffic for r in self.hook_rounds)
        return hooked + sum(r.traffic for r in self.optimizer_rounds) / self.steps


def predict(
    plan: Plan, network: Network, *, forward_backward: float, optimizer: float = 0.0
) -> float:
    """Return the predicted seconds of a step, on average.

    1. forward, then backward; a hook starts each round when its share of backward is done;
    2. encoding takes the device's time; the network carries out one collective at a time, in order,
       during the rest of backward;
    3. decoding takes the device's time, for the last round after its collectives;
    4. the optimizer; its rounds overlap with nothing.

    Args:
        plan: the plan of the method.
        network: the network between the ranks.
        forward_backward: the seconds of forward and backward pass.
        optimizer: the seconds of a step of the user's optimizer.
    """
    backward = BACKWARD_SHARE * forward_backward
    device = forward_backward - backward
    network_free, done, decode = 0.0, 0.0, 0.0
    for each in sorted(plan.hook_rounds, key=lambda each: each.ready):
        device += (each.ready - done) * backward + decode + each.encode
        done, decode = each.ready, each.decode
        for collective in each.collectives:
            network_free = max(device, network_free) + collective.seconds(network)
    device += (1 - done) * backward
    step = max(device, network_free) + decode
    step += optimizer if plan.optimizer is None else plan.optimizer
    return step + sum(each.seconds(network) for each in plan.optimizer_rounds) / plan.steps


def matrix_shapes(numel: int) -> tuple[tuple[int, ...], ...]:
    """Return the parameter shapes of a model of equal square matrices with ``numel`` elements."""
    side = _LEAST_SIDE
    while (2 * side) ** 2 * _LEAST_MATRICES <= numel:
        side *= 2
    matrices, rest = divmod(numel, side * side)
    rows, rest = divmod(rest, side)
    shapes: list[tuple[int, ...]] = [(side, side)] * matrices
    shapes += [(rows, side)] if rows else []
    shapes += [(rest,)] if rest else []
    return tuple(shapes)


def ready_shares(sizes: Sequence[int], first_cap: int, cap: int) -> list[tuple[range, float]]:
    """Return the buckets of DDP and the share of backward after which each is ready.

    Gradients become ready last parameter first, each after a time proportional to its size.  DDP
    closes a bucket that holds ``cap`` bytes, the first one at ``first_cap``.

    Args:
        sizes: the bytes of each parameter, in the model's order.
        first_cap: the bytes at which the first bucket is closed.
        cap: the bytes at which other buckets are closed.

    Returns:
        For each bucket the range of its parameters in *reversed* order, and its share.
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

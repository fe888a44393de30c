"""Routes: in which order a round uses collectives to bring a bucket's vectors to their mean.

* :class:`Summed`: one all-reduce of linear payloads;
* :class:`Gathered`: one all-gather, and every rank decodes all payloads in rank order;
* :class:`Sharded`: two legs, to the owners of shards and back;
* :class:`Hierarchical`: exact inside each node, one of the others between nodes;
* :class:`RaggedShards`: the first leg of ``Sharded`` for shards that others have cut.
"""

import logging
from collections.abc import Sequence

from comm_hooks.collectives.base import Transport
from comm_hooks.compressors.base import Compressor
from comm_hooks.exchange.layout import Layout
from comm_hooks.exchange.routes.hierarchical import Hierarchical
from comm_hooks.exchange.routes.one_shot import Gathered, Summed
from comm_hooks.exchange.routes.ragged import RaggedShards
from comm_hooks.exchange.routes.route import Route
from comm_hooks.exchange.routes.sharded import Sharded
from comm_hooks.memory.base import Memory

__all__ = [
    "Gathered",
    "Hierarchical",
    "RaggedShards",
    "Route",
    "Sharded",
    "Summed",
    "cheapest_route",
]

logger = logging.getLogger(__name__)


def cheapest_route(
    layout: Layout,
    compressors: Sequence[Compressor],
    collectives: Sequence[str],
    transport: Transport,
    seed: int,
    server_memory: Memory | None,
    *,
    exact_uplink: bool = False,
) -> Route:
    """Return the route over one of ``collectives`` that moves the fewest bytes.

    Where payloads can be summed they are: gathered ones, or shards, would move as many bytes at
    least, but for rounding and headers, and take more arithmetic.

    Args:
        layout, compressors, transport, seed: see
            :class:`~comm_hooks.exchange.routes.route.CompressedRoute`.
        collectives: a choice of ``"all_reduce"``, ``"all_gather"`` and ``"sharded"``.
        server_memory, exact_uplink: see :class:`Sharded`.
    """
    routes: dict[str, Route] = {}
    for collective in ["all_reduce"] if "all_reduce" in collectives else collectives:
        if collective == "sharded":
            routes[collective] = Sharded(
                layout, compressors, transport, seed, server_memory, exact_uplink=exact_uplink
            )
        else:
            kind = Summed if collective == "all_reduce" else Gathered
            routes[collective] = kind(layout, compressors, transport, seed)
    # min() keeps the first of equals, and the simplest routes come first.
    chosen = min(routes, key=lambda name: routes[name].traffic)
    logger.info("%d elements travel by %s", layout.work.numel(), chosen)
    return routes[chosen]

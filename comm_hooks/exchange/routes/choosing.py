"""Choose the route of a bucket: one all-reduce, one all-gather, or shards."""

import logging
from dataclasses import replace

from comm_hooks.collectives.base import Transport
from comm_hooks.compressors.base import Compressor
from comm_hooks.compressors.identity import Identity
from comm_hooks.exchange.layout import Layout
from comm_hooks.exchange.noise_hook import COLLECTIVE_OF, Place
from comm_hooks.exchange.routes.hierarchical import Hierarchical
from comm_hooks.exchange.routes.one_shot import OneShot
from comm_hooks.exchange.routes.route import Route
from comm_hooks.exchange.routes.sharded import Sharded
from comm_hooks.exchange.settings import ExchangeSettings
from comm_hooks.memory.base import Memory
from comm_hooks.randomness import derive_key

logger = logging.getLogger(__name__)

_FLOATS = Identity()


def choose_route(
    layout: Layout,
    settings: ExchangeSettings,
    compressor: Compressor | None,
    transport: Transport,
    server_memory: Memory | None,
    *,
    exact: Identity = _FLOATS,
    place: Place | None = None,
    ranks_per_node: int | None = None,
    source: str = "auto",
) -> Route:
    """Return the route for a bucket: the sequence of collectives that averages its tensors.

    Args:
        exact: sends the tensors exactly; replaces float32 where payloads are not summed.
        compressor: the compressor of the round; None: tensors are averaged exactly.
        transport: connects all ranks.
        server_memory: keeps the residuals of the shard that this rank owns.
        place: the place of the noise hook; None if there is no hook.
        ranks_per_node: if given, only the exchange between nodes is compressed.
        source: the collective of the algorithm's source, for ``collective="auto"``; see
            :attr:`Exchange.source_collective`.

    Raises:
        ValueError: if the settings or the compressor exclude a noise hook at that place.
    """
    if ranks_per_node is not None:
        if place:
            raise ValueError(
                "a noise_hook cannot be used with collective='hierarchical', where nodes average "
                "vectors before the hook sees them"
            )
        if ranks_per_node == transport.world_size:
            # Exact, and sends the residuals of an earlier run on more nodes.
            compressor = Identity()
        place_in_node = transport.rank % ranks_per_node
        seed = derive_key(settings.seed, 0, f"place {place_in_node} of a node")
        inner = replace(settings, collective="auto", ranks_per_node=None, seed=seed)
        return Hierarchical(
            layout,
            transport,
            ranks_per_node,
            lambda shards, across: choose_route(
                shards, inner, compressor, across, server_memory, source=source
            ),
        )
    if place and compressor and not compressor.adds_up:
        raise ValueError(
            f"a noise_hook cannot be used with {compressor}, which does not decode to the sum over "
            "ranks that noise is added to: use overlap=0"
        )
    if place or settings.collective == "all_reduce":
        exact = _FLOATS
    if compressor == _FLOATS and exact != _FLOATS:
        compressor = None
    carriers = settings.carriers(exact) if exact != _FLOATS else ["all_reduce"]
    if compressor or place:
        wanted = {settings.collective, COLLECTIVE_OF[place] if place else "auto"} - {"auto"}
        carriers = [c for c in settings.carriers(compressor or Identity()) if wanted <= {c}]
        # Sums of payloads leave the algorithm as it is, whatever its source has.
        if not wanted and source in carriers and "all_reduce" not in carriers:
            carriers = [source]
    if not carriers:
        assert place
        raise ValueError(
            f"a noise_hook at the {place} needs collective={COLLECTIVE_OF[place]!r}, but "
            f"{compressor} with collective={settings.collective!r} cannot have that: change either"
        )
    exempt = exact
    if compressor and (exact == _FLOATS or "all_reduce" in carriers):
        exempt = settings.exempt
    downlink = compressors = layout.compressors(compressor or exact, exempt)
    # A round with another compressor than that of the settings uses it in both directions.
    if settings.downlink is not None and compressor == settings.compressor:
        downlink = layout.compressors(settings.downlink, exempt)
    routes: dict[str, Route] = {}
    # Payloads that can be summed always are: other routes would move at least as many bytes, except
    # for rounding and headers, and take more arithmetic.
    for collective in ["all_reduce"] if "all_reduce" in carriers else carriers:
        if collective == "sharded":
            routes[collective] = Sharded(
                layout,
                compressors,
                transport,
                settings.seed,
                server_memory,
                downlink=downlink,
                exact_uplink=place == "owner",
            )
        else:
            summed = collective == "all_reduce"
            routes[collective] = OneShot(
                layout, compressors, transport, settings.seed, summed=summed
            )
    # min() keeps the first of equals, and the simplest routes come first.
    chosen = min(routes, key=lambda name: routes[name].traffic)
    logger.debug("%d elements are sent by %s", layout.work.numel(), chosen)
    return routes[chosen]

"""Routes: the sequence of collectives that averages the vectors of a bucket.

* :class:`Summed`: one all-reduce of linear payloads;
* :class:`Gathered`: one all-gather, and every rank decodes all payloads in rank order;
* :class:`Sharded`: two legs, to the owners of shards and back;
* :class:`Hierarchical`: exact inside each node, another route between nodes;
* :class:`RaggedShards`: the first leg of ``Sharded`` for shards of different sizes.

:func:`choose_route` decides between them.
"""

from comm_hooks.exchange.routes.choosing import choose_route
from comm_hooks.exchange.routes.hierarchical import Hierarchical
from comm_hooks.exchange.routes.one_shot import Gathered, Summed
from comm_hooks.exchange.routes.ragged import RaggedShards
from comm_hooks.exchange.routes.route import Route, fill_nan_
from comm_hooks.exchange.routes.sharded import Sharded

__all__ = [
    "Gathered",
    "Hierarchical",
    "RaggedShards",
    "Route",
    "Sharded",
    "Summed",
    "choose_route",
    "fill_nan_",
]

"""Routes: the sequence of collectives that averages the vectors of a bucket.

* ``Summed``: one all-reduce of linear payloads;
* ``Gathered``: one all-gather, and every rank decodes all payloads in rank order;
* ``Sharded``: two legs, to the owners of shards and back;
* ``Hierarchical``: exact inside each node, another route between nodes;
* ``RaggedShards``: the first leg of ``Sharded`` for shards of different sizes.

:func:`~comm_hooks.exchange.routes.choosing.choose_route` decides between them.
"""

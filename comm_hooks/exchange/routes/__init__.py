"""Routes: the sequence of collectives that averages the vectors of a bucket.

* ``OneShot``: one all-reduce of linear payloads, or one all-gather, after which every rank decodes
  all payloads in rank order;
* ``Sharded``: two legs, to the owners of shards and back;
* ``Hierarchical``: exact inside each node, another route between nodes;
* ``RaggedShards``: the first leg of ``Sharded`` for shards of different sizes.

:func:`~comm_hooks.exchange.routes.choosing.choose_route` decides between them.
"""

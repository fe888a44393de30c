"""FSDP2: compressed averaging between nodes (HSDP), and a compressed reduce-scatter.

* :func:`compress_all_reduce`: hybrid sharding (HSDP).  Each node holds the whole model, sharded
  over its ranks; inside FSDP reduces in full precision, between nodes gradients are compressed.
* :func:`compress_reduce_scatter`: compresses the reduce-scatter of FSDP, inside the shard group.
"""

from comm_hooks.frameworks.fsdp.all_reduce import compress_all_reduce
from comm_hooks.frameworks.fsdp.reduce_scatter import compress_reduce_scatter
from comm_hooks.frameworks.fsdp.state import CompressedReduction

__all__ = ["CompressedReduction", "compress_all_reduce", "compress_reduce_scatter"]

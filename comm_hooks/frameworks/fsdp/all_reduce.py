"""Hybrid sharding: compressed averaging between nodes, with one sharded replica per node."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from comm_hooks.collectives.requests import AllGatherObject
from comm_hooks.collectives.torch_distributed import TorchDistributed
from comm_hooks.compressors.base import Compressor
from comm_hooks.exchange import Exchange
from comm_hooks.exchange.agreement import check_agreement
from comm_hooks.frameworks.fsdp.state import CompressedReduction, new_exchange
from comm_hooks.frameworks.fsdp.units import Unit, find_units

logger = logging.getLogger(__name__)


def compress_all_reduce(
    model: nn.Module,
    compressor: Compressor | str,
    *,
    mesh: DeviceMesh | dist.ProcessGroup,
    loss_scale: Callable[[], float] | None = None,
    **settings: Any,
) -> CompressedReduction:
    """Average the gradients of an FSDP2 model between nodes through a compressor.

    The model is sharded over the ranks of each node (``fully_shard(..., mesh=mesh["shard"])`` on
    every module) and every node is a replica.  In every backward pass, per FSDP module:

    1. FSDP averages over the shards' ranks, in full precision, and leaves each rank its shard;
    2. the ranks that hold the same shard, one per node, average it through the compressor, with
       error feedback: FSDP does not divide by their number, the exchange does;
    3. the mean, bit-identical on all of them, becomes the gradient of the sharded parameters.

    All ranks must call it, after the last ``fully_shard`` and before the first backward pass.  The
    configurations of all ranks are compared now.  The weights of all replicas are compared, by
    digests, at the first exchange, until which they may still be loaded or initialized, and then
    every ``verify_every`` steps.

    Micro-batches: ``set_requires_gradient_sync(False)`` accumulates without any communication.
    ``set_requires_all_reduce(False)``, which FSDP ignores for models sharded over one dimension, is
    obeyed here: gradients, reduced inside the node, wait for the next exchange (``grad`` is zero).

    Args:
        model: an FSDP2 model, also after ``torch.compile``.
        compressor: a compressor, or its name in ``comm_hooks.config.COMPRESSORS``.
        mesh: the dimension between nodes, ``mesh["replicate"]``, or its process group: the ranks
            that hold the same shard.
        loss_scale: see :class:`~comm_hooks.CompressionState`.
        settings: see :func:`~comm_hooks.register`.  Residuals are those of this rank's shard: 4
            bytes (``bits=4``: 0.53) per parameter of it.  Whether a parameter is exempt depends on
            its whole shape, not on its shard's.  A bucket is an FSDP module.

    Returns:
        The state to save, with ``stats()``.

    Raises:
        ValueError: for bad settings; if nothing is sharded by FSDP2; if FSDP itself all-reduces,
            because ``fully_shard`` was given a 2-D mesh (its hook runs after the all-reduce and
            could save nothing); for a ``mesh`` that is not between nodes; if the model has an
            all-reduce hook.  In a backward pass: if replicas have different weights.
        ConfigMismatchError: if ranks are configured differently.

    Warns about trainable parameters that no FSDP module reduces: they are not averaged at all.

    Not supported: parameters on several meshes (``shard_placement_fn`` returning meshes); a step in
    which some of a module's parameters get no gradient, unless
    ``set_reduce_scatter_unused_params`` fills them; FSDP1; PyTorch before 2.7.

    Example::

        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from torch.distributed.fsdp import fully_shard
        >>> from comm_hooks.frameworks.fsdp import compress_all_reduce
        >>> mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("replicate", "shard"))
        >>> model = fully_shard(torch.nn.Linear(64, 64), mesh=mesh["shard"])
        >>> state = compress_all_reduce(model, "topk", density=1 / 64, mesh=mesh["replicate"])
        >>> model(torch.ones(1, 64)).sum().backward()
        >>> state.stats()["steps"]
        1
    """
    caller = "compress_all_reduce"
    units = find_units(model, caller)
    for unit in units:
        if unit.all_reduces:
            raise ValueError(
                f"{caller}: fully_shard was given a mesh with a replicate dimension, so FSDP "
                "all-reduces by itself before any hook runs: give it the other dimension only, "
                'fully_shard(module, mesh=mesh["shard"])'
            )
        if not hasattr(unit.module, "set_all_reduce_hook"):
            raise ValueError(f"{caller} needs PyTorch 2.7 or newer, this is {torch.__version__}")
        if unit.group._all_reduce_hook is not None:
            raise ValueError(
                f"{caller}: {unit.title} has an all-reduce hook already: register one only"
            )
    group = _replicas(mesh, units[0].shard_group)
    exchange = new_exchange(model, units, compressor, caller, group, settings)
    shards = TorchDistributed(units[0].shard_group)
    _agree(exchange, shards, dist.get_process_group_ranks(group))
    state = CompressedReduction(
        exchange, units, [shards.rank], loss_scale, shards, [units[0].shard_group]
    )
    waiting: dict[str, torch.Tensor] = {}
    for unit in units:
        unit.module.set_all_reduce_hook(partial(_reduce, state, unit, shards.rank, waiting))
    logger.info("registered %s with %s on %d modules", compressor, exchange.memory, len(units))
    return state


def _reduce(
    state: CompressedReduction,
    unit: Unit,
    shard: int,
    waiting: dict[str, torch.Tensor],
    flat: torch.Tensor,
) -> None:
    """Average a module's gradient over nodes, in place, as the all-reduce hook of FSDP."""
    if flat.device.type != "cpu":
        # FSDP may free the tensor while this stream still works on it (pytorch#180900).
        flat.record_stream(torch.get_device_module(flat.device.type).current_stream())
    if not unit.group.all_reduce_grads:
        before = waiting.get(unit.name)
        waiting[unit.name] = flat.clone() if before is None else before.add_(flat)
        flat.zero_()
        return
    if unit.name in waiting:
        flat.add_(waiting.pop(unit.name))
    exchange = state.exchange
    with exchange.failing_together():
        scale = state.begin()
        segments, tensors = unit.views(unit.pieces(), flat, shard, exchange.settings.exempts)
        if segments:
            bucket = exchange.buckets.of_segments(segments, flat.device)
            round_ = exchange.bucket_round(bucket, tensors, scale=scale, partial=True)
            # Not run_async(): FSDP uses the tensor on this stream as soon as the hook returns.
            exchange.transport.run(round_)
        state.end()


def _agree(exchange: Exchange, shards: TorchDistributed, replica_ranks: list[int]) -> None:
    """Compare configurations and shards over all ranks; raise on all of them if any differ."""
    here = [dist.get_rank(), shards.rank, replica_ranks, exchange.config()]
    node: list[Any] = shards.perform(AllGatherObject(here))
    nodes: list[list[Any]] = exchange.transport.perform(AllGatherObject(node))
    everyone = sorted((entry for entries in nodes for entry in entries), key=lambda e: e[0])
    check_agreement([config for *_, config in everyone], [rank for rank, *_ in everyone])
    shard_of = {rank: shard for rank, shard, *_ in everyone}
    for rank, shard, ranks, _ in everyone:
        if any(shard_of.get(other) != shard for other in ranks):
            raise ValueError(
                f"compress_all_reduce: mesh joins ranks {ranks}, but not all of them hold the "
                f"shard of rank {rank}: give the dimension of the mesh that did not go to "
                "fully_shard"
            )
    exchange.agree_now()


def _replicas(
    mesh: DeviceMesh | dist.ProcessGroup, shard_group: dist.ProcessGroup
) -> dist.ProcessGroup:
    """Return the group of ranks that hold the same shard."""
    if isinstance(mesh, DeviceMesh):
        if mesh.ndim != 1:
            raise ValueError(
                f"compress_all_reduce: mesh must be the one dimension between nodes, such as "
                f'mesh["replicate"], got one with dimensions {mesh.mesh_dim_names or mesh.ndim}'
            )
        group = mesh.get_group()
    else:
        group = mesh
    if not isinstance(group, dist.ProcessGroup) or dist.get_rank(group) < 0:
        raise ValueError(
            f"compress_all_reduce: mesh must be a DeviceMesh or a process group that this rank "
            f"belongs to, got {mesh!r}"
        )
    ranks = set(dist.get_process_group_ranks(group))
    common = ranks & set(dist.get_process_group_ranks(shard_group))
    if common != {dist.get_rank()}:
        raise ValueError(
            f"compress_all_reduce: mesh has ranks {sorted(ranks)}, of which {sorted(common)} share "
            f"one copy of the model: give the dimension between copies"
        )
    return group

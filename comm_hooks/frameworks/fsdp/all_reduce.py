"""Hybrid sharding: compressed averaging between nodes, each of which shards one replica."""

import logging
from collections.abc import Callable, Mapping, Sequence
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
from comm_hooks.frameworks import adaptive
from comm_hooks.frameworks.fsdp.units import (
    Replicas,
    Unit,
    check_names,
    count_step,
    find_units,
    settle_model,
    warn_of_unsharded,
)

logger = logging.getLogger(__name__)


def compress_all_reduce(
    model: nn.Module,
    compressor: Compressor | str,
    *,
    mesh: DeviceMesh | dist.ProcessGroup,
    loss_scale: Callable[[], float] | None = None,
    **settings: Any,
) -> "CompressedAllReduce":
    """Average the gradients of an FSDP2 model between nodes through a compressor.

    The model is sharded over the ranks of each node (``fully_shard(..., mesh=mesh["shard"])`` on
    every module) and every node is a replica.  In every backward pass, per FSDP module:

    1. FSDP averages the gradient over the shards' ranks, in full precision, and leaves each rank
       its shard;
    2. the ranks that hold the same shard, one per node, average it through the compressor, with
       error feedback: FSDP does not divide by their number, the exchange does;
    3. the mean, bit-identical on all of them, becomes the gradient of the sharded parameters.

    All ranks must call it, after the last ``fully_shard`` and before the first backward pass.  The
    configurations of all ranks are compared now.  The weights of all replicas are compared, by
    digests, at the first exchange, until which they may still be loaded or initialized, and then
    every ``verify_every`` steps.

    Micro-batches: ``set_requires_gradient_sync(False)`` accumulates without any communication.
    ``set_requires_all_reduce(False)``, which FSDP ignores for models sharded over one dimension, is
    obeyed here: gradients are reduced inside the node and wait for the next exchange.  (Until then
    ``grad`` is zero.)

    Args:
        model: an FSDP2 model, or what ``torch.compile`` made of one.
        compressor: an object, or a name from ``comm_hooks.config.COMPRESSORS``.
        mesh: the dimension between nodes, ``mesh["replicate"]``, or its process group: the ranks
            that hold the same shard.
        loss_scale: see :class:`~comm_hooks.CompressionState`.
        settings: see :func:`~comm_hooks.register`.  A memory is about this rank's shard: 4 bytes
            (``bits=4``: 0.53) times the model's parameters over the number of shards.  Whether a
            parameter is exempt depends on its whole shape, not on its shard's.  A bucket is an FSDP
            module.

    Returns:
        A :class:`CompressedAllReduce`, for ``stats()`` and what to save.

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
    exchange = Exchange.of(compressor, process_group=group, **settings)
    settle_model(exchange, units, caller)
    state = CompressedAllReduce(exchange, units, group, loss_scale)
    state.agree()
    warn_of_unsharded(model, units)
    adaptive.watch(exchange.compressor, model.parameters())
    for unit in units:
        unit.module.set_all_reduce_hook(partial(state.reduce, unit))
    logger.info("registered %s with %s on %d modules", compressor, exchange.memory, len(units))
    return state


class CompressedAllReduce:
    """What :func:`compress_all_reduce` returns: the exchange between replicas of one shard.

    Attributes:
        exchange: averages this rank's shard with those of its replicas.
    """

    def __init__(
        self,
        exchange: Exchange,
        units: Sequence[Unit],
        group: dist.ProcessGroup,
        loss_scale: Callable[[], float] | None,
    ) -> None:
        self.exchange = exchange
        self._units = units
        self._loss_scale = loss_scale
        self._shards = TorchDistributed(units[0].shard_group)
        self._replica_ranks = dist.get_process_group_ranks(group)
        self._waiting: dict[str, torch.Tensor] = {}
        self._replicas = Replicas(units, exchange.transport, self._shards)

    @property
    def model_parallel_groups(self) -> list[dist.ProcessGroup]:
        """Groups of ranks that hold other parts of the model: nobody exchanges between these."""
        return [self._units[0].shard_group]

    def stats(self) -> dict[str, float]:
        """Return what this rank moved between nodes; see :meth:`~comm_hooks.Exchange.stats`.

        What FSDP moves inside the node is not counted.
        """
        return self.exchange.stats()

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank must save: every rank its own, plain numbers and tensors.

        Gradients that wait for an exchange (``set_requires_all_reduce(False)``) are not part of it:
        save between steps.
        """
        return self.exchange.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned on this rank.

        Raises:
            ValueError: if the state is another rank's, or of another number of shards; nothing is
                changed.
        """
        check_names(self.exchange, self._known_names(), [state])
        self.exchange.load_state_dict(state)

    def load_state_dicts(self, states: Sequence[Mapping[str, Any]]) -> None:
        """Restore the states of a run with another number of nodes and as many shards.

        Args:
            states: what the holders of this rank's shard saved, in the order of the nodes; see
                :meth:`~comm_hooks.Exchange.load_state_dicts`.

        Raises:
            ValueError: if the states are not those, or of another number of shards; nothing is
                changed.
        """
        check_names(self.exchange, self._known_names(), states)
        self.exchange.load_state_dicts(states)

    def agree(self) -> None:
        """Compare the configurations of all ranks, of all nodes and shards.

        Raises:
            ConfigMismatchError: on all ranks, if any two differ.
            ValueError: on all ranks, if replicas hold different shards.
        """
        replicas = self.exchange.transport
        here = [dist.get_rank(), self._shards.rank, self._replica_ranks, self.exchange.config()]
        node: list[Any] = self._shards.perform(AllGatherObject(here))
        nodes: list[list[Any]] = replicas.perform(AllGatherObject(node))
        everyone = sorted((entry for entries in nodes for entry in entries), key=lambda e: e[0])
        check_agreement([config for *_, config in everyone], [rank for rank, *_ in everyone])
        shards = {rank: shard for rank, shard, *_ in everyone}
        for rank, shard, ranks, _ in everyone:
            if any(shards.get(other) != shard for other in ranks):
                raise ValueError(
                    f"compress_all_reduce: mesh joins ranks {ranks}, but not all of them hold the "
                    f"shard of rank {rank}: give the other dimension of the mesh whose first one "
                    "went to fully_shard"
                )
        self.exchange.agree_now()

    def reduce(self, unit: Unit, flat: torch.Tensor) -> None:
        """Average what FSDP reduced for one module, in place: the all-reduce hook."""
        if flat.device.type != "cpu":
            # FSDP may free the tensor while this stream still works on it (pytorch#180900).
            flat.record_stream(torch.get_device_module(flat.device.type).current_stream())
        if not unit.group.all_reduce_grads:
            waiting = self._waiting.get(unit.name)
            self._waiting[unit.name] = flat.clone() if waiting is None else waiting.add_(flat)
            flat.zero_()
            return
        if unit.name in self._waiting:
            flat.add_(self._waiting.pop(unit.name))
        exchange = self.exchange
        self._replicas.compare(exchange)
        segments, tensors = unit.views(
            unit.pieces(), flat, self._shards.rank, exchange.settings.exempts
        )
        if segments:
            bucket = exchange.buckets.of_segments(segments, flat.device)
            scale = float(self._loss_scale()) if self._loss_scale else 1.0
            # Not run_async(): FSDP uses the tensor on this stream as soon as the hook returns.
            exchange.transport.run(exchange.bucket_round(bucket, tensors, scale=scale))
        count_step(exchange)

    def _known_names(self) -> set[str]:
        return {
            piece.shard_name(self._shards.rank)
            for unit in self._units
            for piece in unit.pieces(frozen=True)
        }


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

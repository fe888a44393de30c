"""A compressed reduce-scatter for FSDP2: what ranks of one shard group send each other."""

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from comm_hooks.collectives.requests import Round
from comm_hooks.collectives.torch_distributed import TorchDistributed
from comm_hooks.compressors.base import Compressor
from comm_hooks.exchange import Exchange
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


def compress_reduce_scatter(
    model: nn.Module,
    compressor: Compressor | str,
    *,
    loss_scale: Callable[[], float] | None = None,
    **settings: Any,
) -> "CompressedReduceScatter":
    """Compress the reduce-scatter of an FSDP2 model.

    In every backward pass, per FSDP module and rank, instead of FSDP's reduce-scatter:

    1. for each rank, take the part of this rank's gradient that goes into that rank's shard, add
       the residual, and compress it;
    2. give every rank its payload (one all-to-all) and keep what was not sent;
    3. decompress the payloads in rank order: their mean is the gradient of this rank's shard.

    What it saves is bounded, because FSDP also gathers the parameters twice per step (once with
    ``reshard_after_forward=False``) and these bytes stay: with parameters and gradients of one
    dtype at most a third of all traffic (a half); with bfloat16 parameters and float32 gradients a
    half (two thirds).  And what FSDP shards, the residual is not: every rank remembers what it owes
    to all others, 4 bytes (``{"type": "error_feedback", "bits": 4}``: 0.53) per parameter of the
    *whole* model.  Compressors without memory (sketches, stochastic ``quantize``) need none.
    Between nodes :func:`~comm_hooks.frameworks.fsdp.compress_all_reduce` has neither limit, and
    both can be used at once.

    All ranks must call it, after the last ``fully_shard`` and before the first backward pass; the
    configurations of the shard group are compared now.  On a 2-D mesh the weights of replicas are
    compared, by digests, at the first exchange and then every ``verify_every`` steps.  On a 1-D
    mesh there is nothing to compare: every rank holds a part of the model that no other one holds.
    Residuals are looked at in the same steps.

    What a float16 gradient cannot hold is remembered, by the rank whose shard it is.

    Args:
        model: an FSDP2 model, or what ``torch.compile`` made of one; a 2-D mesh is welcome.
        compressor: an object, or a name from ``comm_hooks.config.COMPRESSORS``.
        loss_scale: see :class:`~comm_hooks.CompressionState`.
        settings: see :func:`~comm_hooks.register`; but for ``collective``.  Whether a parameter is
            exempt depends on its whole shape, not on its shard's.

    Returns:
        A :class:`CompressedReduceScatter`, for ``stats()`` and what to save.

    Raises:
        ValueError: for bad settings; if nothing is sharded by FSDP2; if the model has a custom
            reduce-scatter.  In a backward pass: with ``set_gradient_divide_factor``, whose factor
            PyTorch does not tell; if replicas have different weights.
        ConfigMismatchError: if ranks are configured differently.

    Not supported: parameters on several meshes; a step in which some of a module's parameters get
    no gradient; resuming on another number of shards; PyTorch whose FSDPModule has no
    ``set_custom_reduce_scatter``.

    Example::

        >>> from torch.distributed.device_mesh import init_device_mesh
        >>> from torch.distributed.fsdp import fully_shard
        >>> from comm_hooks.frameworks.fsdp import compress_reduce_scatter
        >>> model = fully_shard(torch.nn.Linear(64, 64), mesh=init_device_mesh("cpu", (1,)))
        >>> state = compress_reduce_scatter(model, "quantize", bits=4, memory="error_feedback")
        >>> state.exchange.memory
        ErrorFeedback(bits=32)
    """
    caller = "compress_reduce_scatter"
    units = find_units(model, caller)
    for unit in units:
        if not unit.shards:
            raise ValueError(f"{caller}: {unit.title} is replicated, not sharded")
        if not hasattr(unit.module, "set_custom_reduce_scatter"):
            raise ValueError(
                f"{caller}: FSDPModule of PyTorch {torch.__version__} has no "
                "set_custom_reduce_scatter: use a newer one"
            )
        if type(unit.group._reduce_scatter_comm).__name__ != "DefaultReduceScatter":
            raise ValueError(
                f"{caller}: {unit.title} has a custom reduce-scatter already: register one only"
            )
    # The payloads never travel so, but whatever can be gathered can be exchanged.
    settings["collective"] = "all_gather"
    exchange = Exchange.of(compressor, process_group=units[0].shard_group, **settings)
    settle_model(exchange, units, caller)
    exchange.agree_now()
    state = CompressedReduceScatter(exchange, units, loss_scale)
    warn_of_unsharded(model, units)
    adaptive.watch(exchange.compressor, model.parameters())
    for unit in units:
        # torch's ReduceScatter is private; only its two methods are called.
        unit.module.set_custom_reduce_scatter(_ReduceScatter(state, unit))  # type: ignore[arg-type]
    logger.info("registered %s with %s on %d modules", compressor, exchange.memory, len(units))
    return state


class CompressedReduceScatter:
    """What :func:`compress_reduce_scatter` returns: the exchange inside a group of shards.

    Attributes:
        exchange: holds the settings, the memory and the count of steps and bytes.
    """

    def __init__(
        self,
        exchange: Exchange,
        units: Sequence[Unit],
        loss_scale: Callable[[], float] | None,
    ) -> None:
        self.exchange = exchange
        self._units = units
        self._loss_scale = loss_scale
        group = units[0].replica_group
        self._replicas = (
            Replicas(units, TorchDistributed(group), exchange.transport) if group else None
        )

    @property
    def model_parallel_groups(self) -> list[dist.ProcessGroup]:
        """The group of ranks that hold the same part as this one, if there are others."""
        group = self._units[0].replica_group
        return [group] if group else []

    def stats(self) -> dict[str, float]:
        """Return what this rank moved to reduce gradients; see :meth:`~comm_hooks.Exchange.stats`.

        What FSDP moves to gather parameters is not counted.
        """
        return self.exchange.stats()

    def state_dict(self) -> dict[str, Any]:
        """Return what this rank must save: every rank its own, plain numbers and tensors."""
        return self.exchange.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned on this rank.

        Raises:
            ValueError: if the state is another rank's, or of another number of shards; nothing is
                changed.
        """
        known = {
            piece.shard_name(shard)
            for unit in self._units
            for piece in unit.pieces(frozen=True)
            for shard in range(len(piece.shards))
        }
        check_names(self.exchange, known, [state])
        self.exchange.load_state_dict(state)

    def reduce_scatter(
        self, unit: Unit, output: torch.Tensor, flat: torch.Tensor, *, mean: bool
    ) -> None:
        """Put the mean over ranks, or the sum, of this rank's part of ``flat`` into ``output``."""
        if self._replicas:
            self._replicas.compare(self.exchange)
        self.exchange.transport.run(self._round(unit, output, flat, mean=mean))
        count_step(self.exchange)

    def _round(
        self, unit: Unit, output: torch.Tensor, flat: torch.Tensor, *, mean: bool
    ) -> Round[None]:
        exchange, pieces = self.exchange, unit.pieces()
        exempts, ranks = exchange.settings.exempts, exchange.transport.world_size
        shards, tensors = [], []
        for shard, part in enumerate(flat.view(ranks, -1)):
            segments, views = unit.views(pieces, part, shard, exempts)
            shards.append(exchange.buckets.of_segments(segments, flat.device))
            tensors.append(views)
        own = unit.views(pieces, output, exchange.transport.rank, exempts)[1]
        # The padding of the shard is reduced again where FSDP has replicas.
        output.zero_()
        exchange.count_traffic(0, (ranks - 1) * flat.numel() * flat.element_size() // ranks)
        scale = float(self._loss_scale()) if self._loss_scale else 1.0
        factor = 1 if mean else ranks
        yield from exchange.reduce_scatter_round(shards, tensors, own, scale=scale, factor=factor)


class _ReduceScatter:
    """What FSDP calls, by torch's ``ReduceScatter`` protocol."""

    def __init__(self, state: CompressedReduceScatter, unit: Unit) -> None:
        self._state = state
        self._unit = unit

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        if op not in (dist.ReduceOp.AVG, dist.ReduceOp.SUM):
            raise ValueError(
                "compress_reduce_scatter cannot go with set_gradient_divide_factor: divide the "
                "loss instead"
            )
        self._state.reduce_scatter(
            self._unit, output_tensor, input_tensor, mean=op == dist.ReduceOp.AVG
        )

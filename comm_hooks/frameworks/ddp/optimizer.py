"""DDP with an optimizer that averages by itself: nothing is averaged twice."""

import logging
import warnings
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from comm_hooks.checkpoints.optimizer_state import OptimizerState
from comm_hooks.collectives import TorchDistributed
from comm_hooks.frameworks.ddp.model import DataParallelModel, find_data_parallel
from comm_hooks.frameworks.own_exchange import owns_exchange, unwrapped, works_in_rounds
from comm_hooks.shards import is_sharded, whole
from comm_hooks.shared_model import show_server_model

logger = logging.getLogger(__name__)

_NOTABLE = 1e-3
"""Of the model's bytes, sent beside the rounds at every forward pass."""


def register_optimizer(model: nn.Module, optimizer: Optimizer, hook: Any) -> Any:
    """Let a model leave the averaging to an optimizer that exchanges by itself.

    Args:
        model: see :func:`comm_hooks.register`; with nothing inside that averages, too.
        optimizer: one of ``comm_hooks.optim``, or what a framework has made of it.
        hook: which communicates nothing.

    Returns:
        What every rank saves and what counts: the rounds, or an
        :class:`~comm_hooks.checkpoints.optimizer_state.OptimizerState`.

    Raises:
        ValueError: for an optimizer that does not exchange, or not for this model; for layers whose
            forward pass writes to what the optimizer trains.
    """
    own = unwrapped(optimizer)
    if not owns_exchange(own):
        raise ValueError(
            "register() takes a compressor, or an optimizer that exchanges by itself, such as what "
            f"comm_hooks.optim.low_communication(...) returns; {type(own).__name__} does not"
        )
    _require_constant_weights(model)
    module = model
    if find_data_parallel(model) is not None:
        replicas = DataParallelModel(model)
        module = replicas.module
        _require_parameters_of(module, own)
        _require_ranks_of(replicas, own)
        replicas.register_comm_hook(None, hook)
        if works_in_rounds(own):
            _warn_of_broadcasts(replicas)
    else:
        _require_parameters_of(module, own)
        _warn_of_unsharded(module)
    if not works_in_rounds(own):
        return OptimizerState(own)
    show_server_model(module, own)
    logger.info("registered %s, %s", type(own).__name__, own.exchange)
    return own


def _require_constant_weights(model: nn.Module) -> None:
    """Raise ``ValueError`` for embeddings that shorten what a rank looks up, on each other rows."""
    for name, module in model.named_modules():
        if (
            isinstance(module, nn.Embedding | nn.EmbeddingBag)
            and module.max_norm is not None
            and module.weight.requires_grad
        ):
            raise ValueError(
                f"{name!r} has max_norm, which shortens rows of its weight in the forward pass, "
                "on each rank those that it looks up: what all ranks share would not be the same. "
                "Leave max_norm out, or shorten all rows after step()"
            )


def _warn_of_broadcasts(replicas: DataParallelModel) -> None:
    """Warn if DDP goes on sending buffers, which would be much of what the rounds send."""
    size = replicas.broadcast_bytes()
    if size > _NOTABLE * sum(p.nbytes for p in replicas.module.parameters()):
        warnings.warn(
            f"DistributedDataParallel sends {size:,} bytes of buffers, running means and the like, "
            "from rank 0 at every forward pass, which stats() does not count: make it with "
            "broadcast_buffers=False",
            stacklevel=4,
        )


def _warn_of_unsharded(module: nn.Module) -> None:
    """Warn of parameters that every rank of a node trains by itself beside shards of others."""
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    whole_ones = [name for name, parameter in trained.items() if not is_sharded(parameter)]
    if 0 < len(whole_ones) < len(trained):
        others = f" and {len(whole_ones) - 1} more" if len(whole_ones) > 1 else ""
        warnings.warn(
            f"{whole_ones[0]!r}{others} is sharded over no ranks, though other parameters are: "
            "nodes exchange it, but nobody averages its gradients over the ranks of a node, which "
            "end with different values: give the module to fully_shard, or average them before "
            "step()",
            stacklevel=4,
        )


def _require_ranks_of(replicas: DataParallelModel, optimizer: Any) -> None:
    """Raise ``ValueError`` if the optimizer exchanges with other ranks than DDP would."""
    transport = optimizer.exchange.transport
    if not isinstance(transport, TorchDistributed):
        return
    own, others = (
        list(transport.ranks),
        dist.get_process_group_ranks(replicas.process_group or dist.group.WORLD),
    )
    if own != others:
        raise ValueError(
            f"{type(optimizer).__name__} exchanges with ranks {own}, DistributedDataParallel with "
            f"{others}: give the optimizer the same process_group"
        )


def _require_parameters_of(module: nn.Module, optimizer: Optimizer) -> None:
    """Raise ``ValueError`` unless the optimizer's parameters are the model's."""
    known = set(module.parameters())
    numbers = [whole(p) not in known for group in optimizer.param_groups for p in group["params"]]
    if any(numbers):
        raise ValueError(
            f"{sum(numbers)} of the {len(numbers)} parameters of {type(optimizer).__name__} are "
            f"not in {type(module).__name__}: make the optimizer of the parameters of the model "
            "that it is registered with"
        )
    own = {whole(p) for group in optimizer.param_groups for p in group["params"]}
    others = [
        name
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and parameter.numel() and parameter not in own
    ]
    if others:
        raise ValueError(
            f"{len(others)} parameters of {type(module).__name__} that require a gradient are not "
            f"in {type(optimizer).__name__}, the first of them {others[0]}: nobody averages those, "
            "and under another optimizer ranks would drift apart. Pass all to this one, or freeze "
            "them"
        )

"""Checks in the first step: whether DDP or FSDP averaged the gradients, and ranks' settings."""

import gc
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from comm_hooks.collectives.model_parallel import gather_from_all
from comm_hooks.exchange.agreement import check_agreement
from comm_hooks.frameworks.ddp.model import hooks_of
from comm_hooks.shards import whole

_HOOKS_OF_TORCH = "torch.distributed.algorithms.ddp_comm_hooks"


def require_unaveraged(optimizer: Any, parameters: Sequence[torch.Tensor]) -> None:
    """Raise ``ValueError`` if DDP or FSDP averages the gradients of the parameters.

    Raises ``ConfigMismatchError`` if settings differ between ranks of a sharded model.  Does
    nothing once ``optimizer.averaging_ruled_out`` is set, as it is after the first call.
    """
    if optimizer.averaging_ruled_out:
        return
    if getattr(optimizer, "participation", None) is None:  # else ranks step when they like
        require_consistent(optimizer)
    ranks = optimizer.exchange.transport.ranks
    if sharing := sharded_over(parameters, ranks):
        raise ValueError(
            f"the parameters are sharded over ranks {', '.join(map(str, sharing))}, and FSDP has "
            "averaged the gradients that this optimizer exchanges itself: pass it ranks that FSDP "
            'does not shard over, process_group=mesh["replicate"].get_group(), or use an optimizer '
            "of torch with compress_reduce_scatter or compress_all_reduce"
        )
    if hook := averaging_hook(parameters) if len(ranks) > 1 else None:
        raise ValueError(
            f"DDP has averaged the gradients (its hook: {hook}) that this optimizer exchanges "
            "itself, so everything is sent twice: call register(ddp_model, optimizer) before the "
            "first step"
        )
    optimizer.averaging_ruled_out = True


def averaging_hook(parameters: Sequence[torch.Tensor]) -> str | None:
    """Return the hook by which DDP has averaged gradients of the parameters; None if it has not.

    DDP models of this process that hold some of the parameters are found, those of ``replicate`` as
    well, unless their last pass was under ``no_sync()``.  Hooks are ours and PyTorch's; others may
    send nothing, and count as such.  ``"all_reduce"`` is DDP's own average.

    Not seen: models that were made before ``gc.freeze()``, which hides them from this search.
    """
    for ddp in _models_of(DistributedDataParallel, set(parameters)):
        hooks = hooks_of(ddp)
        name = "all_reduce"
        if hooks:
            hook = hooks[0]
            name = hook if isinstance(hook, str) else getattr(hook, "__name__", repr(hook))
            module = getattr(hook, "__module__", "")
            known = isinstance(hook, str) or module.startswith(("comm_hooks.", _HOOKS_OF_TORCH))
            if not known or name in ("skip_hook", "noop_hook"):
                continue
        if ddp.require_forward_param_sync:
            return name
    return None


def sharded_over(parameters: Sequence[torch.Tensor], ranks: Sequence[int]) -> list[int]:
    """Return those of ``ranks`` between which FSDP 1 or 2 averages gradients.

    FSDP always averages: a rank gets the mean of its shard, and never its own gradient.

    Args:
        parameters: the optimizer's parameters.
        ranks: the ranks of the optimizer's exchange, this one included.

    Returns:
        The sorted ranks; an empty list if this rank is the only one.
    """
    meshes: set[Any] = {getattr(whole(p), "device_mesh", None) for p in parameters} - {None}
    sharing = {rank for mesh in meshes for rank in mesh.mesh.flatten().tolist()}
    # Owners of a model of FSDP 1 have imported this, which takes a while.
    if module := sys.modules.get("torch.distributed.fsdp"):
        for model in _models_of(module.FullyShardedDataParallel, set(parameters)):
            sharing.update(dist.get_process_group_ranks(model.process_group))
    shared = sorted(sharing.intersection(ranks))
    return shared if len(shared) > 1 else []


def require_consistent(optimizer: Any) -> None:
    """Raise ``ConfigMismatchError`` on all ranks if settings differ within a sharded model.

    An exchange compares the settings of the ranks that exchange; this compares those of all ranks
    that share a model.  Does nothing where the model is not sharded.  All ranks must call it.
    """
    groups = optimizer.model_parallel_groups
    if groups:
        exchange = optimizer.exchange
        own = {**exchange.config(), **optimizer.hyperparameters()}
        found = gather_from_all(exchange.transport, groups, [dist.get_rank(), own])
        found.sort(key=lambda entry: entry[0])
        check_agreement([config for _, config in found], [rank for rank, _ in found])


def _models_of(kind: type[Any], parameters: set[torch.Tensor]) -> Iterator[Any]:
    """Yield the models of type ``kind`` in this process that hold some of the parameters."""
    kinds = _with_subclasses(kind)
    # By type: isinstance() asks proxies for their referents, and takes seconds where millions
    # of objects are alive.
    for thing in [thing for thing in gc.get_objects() if type(thing) in kinds]:
        if not parameters.isdisjoint(thing.parameters()):
            yield thing


def _with_subclasses(kind: type[Any]) -> set[type[Any]]:
    return {kind}.union(*map(_with_subclasses, kind.__subclasses__()))

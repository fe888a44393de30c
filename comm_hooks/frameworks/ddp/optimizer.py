"""Models with an optimizer that exchanges by itself, so that DDP must not average gradients."""

import functools
import logging
from typing import Any, NoReturn

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from comm_hooks.checkpoints.optimizer_state import OptimizerState
from comm_hooks.collectives import TorchDistributed
from comm_hooks.exchange import Exchange
from comm_hooks.frameworks.ddp.model import check_options, find_ddp, register_hook
from comm_hooks.registered_model import RegisteredModel
from comm_hooks.requirements import first_of
from comm_hooks.shards import is_sharded, whole
from comm_hooks.shared_model import attach_shared_model
from comm_hooks.warnings import warn_program

logger = logging.getLogger(__name__)


def register_optimizer(model: nn.Module, optimizer: Optimizer, hook: Any) -> Any:
    """Let a model leave the averaging to an optimizer that exchanges by itself.

    Args:
        model: see :func:`comm_hooks.register`; it need not have a DDP model inside.
        optimizer: one of ``comm_hooks.optim``, or the wrapper of a framework around it.
        hook: a DDP hook that communicates nothing.

    Returns:
        The state that every rank saves: the optimizer itself if it takes local steps, else an
        :class:`~comm_hooks.checkpoints.optimizer_state.OptimizerState`.

    Raises:
        ValueError: for an optimizer that does not exchange, or has other parameters than the model;
            for layers with a forward pass that writes to trained weights.
    """
    own = unwrapped(optimizer)
    if not isinstance(getattr(own, "exchange", None), Exchange):
        raise ValueError(
            "register() takes a compressor, or an optimizer that exchanges by itself, such as the "
            f"result of comm_hooks.optim.low_communication(...); {type(own).__name__} does not"
        )
    works_in_rounds = hasattr(own, "server_parameters")
    _require_constant_weights(model)
    ddp = find_ddp(model)
    module = model if ddp is None else ddp.module
    _require_parameters_of(module, own)
    if ddp is None:
        _warn_of_unsharded(module)
    else:
        _require_ranks_of(ddp, own)
        check_options(ddp)
        register_hook(ddp, None, hook)
        ddp.join_hook = functools.partial(_refuse_to_join, type(own).__name__)  # type: ignore[method-assign]
        if works_in_rounds:
            ddp.broadcast_buffers = False  # the optimizer averages them
    registered = RegisteredModel(module, is_fixed=False)

    def check(*args: object) -> None:
        with own.exchange.failing_together():
            registered.require_unchanged()

    own.register_step_pre_hook(check)
    if not works_in_rounds:
        return OptimizerState(own)
    own.round_state.share_buffers(module)
    attach_shared_model(module, own)
    logger.info("registered %s, %s", type(own).__name__, own.exchange)
    return own


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer inside the wrappers of Accelerate, Fabric and Lightning."""
    while isinstance(getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def _refuse_to_join(name: str, **kwargs: object) -> NoReturn:
    raise ValueError(
        f"join() cannot be used with {name}, which exchanges in step(): a rank without data would "
        "let the others wait: give all ranks equally many batches (DistributedSampler does)"
    )


def _require_constant_weights(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if (
            isinstance(module, nn.Embedding | nn.EmbeddingBag)
            and module.max_norm is not None
            and module.weight.requires_grad
        ):
            raise ValueError(
                f"module {name!r} has max_norm, which shortens rows of its weight in the forward "
                "pass, different rows on each rank, so that replicas would differ: leave max_norm "
                "out, or shorten all rows after step()"
            )


def _warn_of_unsharded(module: nn.Module) -> None:
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    names = [name for name, parameter in trained.items() if not is_sharded(parameter)]
    if 0 < len(names) < len(trained):
        warn_program(
            f"{first_of(names)} is sharded over no ranks, though other parameters are: nodes "
            "exchange it, but its gradients are not averaged over the ranks of a node, which end "
            "with different values: give the module to fully_shard, or average them before step()"
        )


def _require_ranks_of(ddp: DistributedDataParallel, optimizer: Any) -> None:
    transport = optimizer.exchange.transport
    if not isinstance(transport, TorchDistributed):
        return
    own, others = list(transport.ranks), dist.get_process_group_ranks(ddp.process_group)
    if own != others:
        raise ValueError(
            f"{type(optimizer).__name__} exchanges with ranks {own}, DistributedDataParallel with "
            f"{others}: give the optimizer the same process_group"
        )


def _require_parameters_of(module: nn.Module, optimizer: Optimizer) -> None:
    known = set(module.parameters())
    own = [whole(p) for group in optimizer.param_groups for p in group["params"]]
    if strangers := sum(p not in known for p in own):
        raise ValueError(
            f"{strangers} of the {len(own)} parameters of {type(optimizer).__name__} are not in "
            f"{type(module).__name__}: pass the parameters of that model to the optimizer"
        )
    taken = set(own)
    others = [
        name
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and parameter.numel() and parameter not in taken
    ]
    if others:
        raise ValueError(
            f"{len(others)} parameters of {type(module).__name__} that require a gradient are not "
            f"in {type(optimizer).__name__}, the first of them {others[0]}: they are not averaged, "
            "and ranks would drift apart. Pass all to this optimizer, or freeze them"
        )

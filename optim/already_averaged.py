"""Checks in the first step: whether DDP or FSDP averaged the gradients, and ranks' settings."""

import gc
import hashlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from comm_hooks.collectives.base import Transport
from comm_hooks.collectives.model_parallel import gather_from_all
from comm_hooks.collectives.requests import AllGatherObject
from comm_hooks.exchange.agreement import check_agreement
from comm_hooks.frameworks.ddp.model import hooks_of
from comm_hooks.shards import whole

# Ours, and PyTorch's own.
_HOOKS_THAT_SEND_NOTHING = ("skip_hook", "noop_hook")


def double_averaging(
    parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
) -> dict[str, str | None]:
    """Return a fingerprint of gradients; equal ones on all ranks show that DDP averaged them.

    1. find the DDP models of this process (those of ``replicate`` as well) that hold some of the
       parameters, have another hook than :func:`~comm_hooks.skip_hook`, and did not run under
       ``no_sync()`` last;
    2. take a fingerprint of the gradients that these models have averaged, if there are any.  An
       unknown hook may send nothing as well; then the fingerprints differ between ranks.

    Reads one number per gradient back from the device.

    Not seen: models that were made before ``gc.freeze()``, which hides them from this search.

    Args:
        parameters: the optimizer's parameters.
        gradients: the gradient of each parameter, in any dtype; None if it has none.

    Returns:
        ``hook``: the name of the hook, ``"all_reduce"`` if there is none; ``gradients``: the
        fingerprint.  Both are None if no gradient was averaged, or all of them are zero.

    Example::

        >>> from comm_hooks.optim.already_averaged import double_averaging
        >>> ddp_model(torch.ones(1, 8)).sum().backward()
        >>> parameters = list(ddp_model.parameters())
        >>> double_averaging(parameters, [p.grad for p in parameters])["hook"]
        'all_reduce'
    """
    averaged: set[torch.Tensor] = set()
    name = None
    for ddp in _models_of(DistributedDataParallel, set(parameters)):
        hook = _hook_name(ddp)
        # If the last forward pass was under no_sync(), so were those before it.
        if ddp.require_forward_param_sync and hook not in _HOOKS_THAT_SEND_NOTHING:
            averaged.update(ddp.parameters())
            name = hook
    of_ddp = [
        gradient
        for parameter, gradient in zip(parameters, gradients, strict=True)
        if gradient is not None and parameter in averaged and not gradient.is_sparse
    ]
    # Sums of the bits: exact, so equal for equal gradients on any device.
    sums = [g.detach().float().view(torch.int32).sum(dtype=torch.int64) for g in of_ddp]
    numbers = torch.stack(sums).tolist() if sums else []
    if not any(numbers):
        return {"hook": None, "gradients": None}
    return {"hook": name, "gradients": hashlib.blake2b(repr(numbers).encode()).hexdigest()}


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


def refuse_double_averaging(findings: Sequence[Mapping[str, Any]]) -> None:
    """Raise ``ValueError`` if DDP or FSDP has averaged the gradients.

    Args:
        findings: for each rank that took a step, ``{"sharded over": ranks}`` with the result of
            :func:`sharded_over` if that is not empty, else the result of :func:`double_averaging`;
            equal on all ranks, so that all of them raise, or none.
    """
    for finding in findings:
        if sharing := finding.get("sharded over"):
            raise ValueError(
                f"the parameters are sharded over ranks {', '.join(map(str, sharing))}, and FSDP "
                "has averaged the gradients that this optimizer exchanges itself: pass it ranks "
                'that FSDP does not shard over, process_group=mesh["replicate"].get_group(), or '
                "use an optimizer of torch with compress_reduce_scatter or compress_all_reduce"
            )
    fingerprints = {finding.get("gradients") for finding in findings}
    if len(findings) > 1 and len(fingerprints) == 1 and None not in fingerprints:
        raise ValueError(
            f"DDP has averaged the gradients (its hook: {findings[0]['hook']}) that this optimizer "
            "exchanges itself, so everything is sent twice: call register(ddp_model, optimizer) "
            "before the first step"
        )


class AveragingCheck:
    """A check that neither DDP nor FSDP has averaged the gradients that an optimizer exchanges."""

    def __init__(self) -> None:
        self._is_done = False
        self._finding: dict[str, Any] | None = None

    def check(
        self,
        optimizer: Any,
        parameters: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor | None],
    ) -> None:
        """Raise ``ValueError`` on all ranks if DDP or FSDP has averaged the gradients.

        Raises ``ConfigMismatchError`` if settings differ between ranks of a sharded model.  Does
        nothing from the second call on.  All ranks must call it.
        """
        if not self._is_done:
            require_consistent(optimizer)
            transport = optimizer.exchange.transport
            self.note(transport, parameters, gradients)
            self.compare(transport)
            self._is_done = True

    def note(
        self,
        transport: Transport,
        parameters: Sequence[torch.Tensor],
        gradients: Sequence[torch.Tensor | None],
    ) -> None:
        """Store a fingerprint of this rank's first gradients for :meth:`compare`; send nothing."""
        if transport.world_size == 1 or self._is_done or self._finding is not None:
            return
        if sharing := sharded_over(parameters, transport.ranks):
            self._finding = {"sharded over": sharing}
        else:
            self._finding = double_averaging(parameters, gradients)

    def compare(self, transport: Transport) -> None:
        """Raise ``ValueError`` on all ranks if the gradients given to :meth:`note` were averaged.

        Later calls repeat the check until two ranks or more had gradients.  All ranks must call it.
        """
        if self._is_done or transport.world_size == 1:
            return
        own, self._finding = self._finding, None
        findings = [each for each in transport.perform(AllGatherObject(own)) if each]
        refuse_double_averaging(findings)
        self._is_done = len(findings) > 1


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


def _hook_name(ddp: DistributedDataParallel) -> str:
    for hook in hooks_of(ddp):
        return hook if isinstance(hook, str) else getattr(hook, "__name__", repr(hook))
    return "all_reduce"

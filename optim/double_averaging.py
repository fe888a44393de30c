"""Gradients that DDP has averaged already, where an optimizer is about to exchange by itself."""

import gc
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from comm_hooks.collectives.base import Transport
from comm_hooks.collectives.requests import AllGatherObject
from comm_hooks.ddp import hooks_of

# Ours, and PyTorch's own.
_HOOKS_THAT_SEND_NOTHING = ("skip_hook", "noop_hook")


def double_averaging(
    parameters: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]
) -> dict[str, str | None]:
    """Return what ranks have to compare to know whether DDP has averaged these gradients.

    1. find the DDP models of this process (those of ``replicate`` as well) that hold some of the
       parameters, have another hook than :func:`~comm_hooks.skip_hook`, and did not run under
       ``no_sync()`` last;
    2. of the gradients that these have averaged, if such there are, take a fingerprint.  A hook
       that is not known here may send nothing as well, and then ranks differ.

    Reads one number per gradient back from the device.

    Args:
        parameters: of the optimizer.
        gradients: of each, in any dtype; None where there is none.

    Returns:
        ``hook``: the name of the hook, ``"all_reduce"`` if there is none; ``gradients``: the
        fingerprint.  Both are None where nothing was averaged, or nothing but zeros.

    Example::

        >>> from comm_hooks.optim.double_averaging import double_averaging
        >>> ddp_model(torch.ones(1, 8)).sum().backward()
        >>> parameters = list(ddp_model.parameters())
        >>> double_averaging(parameters, [p.grad for p in parameters])["hook"]
        'all_reduce'
    """
    averaged: set[torch.Tensor] = set()
    name = None
    for ddp in _averaging_models(set(parameters)):
        averaged.update(ddp.parameters())
        name = _hook_name(ddp)
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


def refuse_double_averaging(findings: Sequence[Mapping[str, Any]]) -> None:
    """Raise ``ValueError`` if DDP has averaged the gradients.

    Args:
        findings: of all ranks, from :func:`double_averaging`; so all of them raise, or none.
    """
    fingerprints = {finding.get("gradients") for finding in findings}
    if len(findings) > 1 and len(fingerprints) == 1 and None not in fingerprints:
        raise ValueError(
            f"DDP has averaged the gradients (its hook: {findings[0]['hook']}) that this optimizer "
            "exchanges itself, so everything is sent twice: "
            "ddp_model.register_comm_hook(None, skip_hook) before the first step"
        )


def check_double_averaging(
    transport: Transport,
    parameters: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None],
) -> None:
    """Raise ``ValueError`` on all ranks if DDP has averaged the gradients; all ranks must call."""
    if transport.world_size > 1:
        findings = double_averaging(parameters, gradients)
        refuse_double_averaging(transport.perform(AllGatherObject(findings)))


def _averaging_models(parameters: set[torch.Tensor]) -> Iterator[DistributedDataParallel]:
    for thing in gc.get_objects():
        # Not isinstance(), which asks proxies for what they stand for.
        if not issubclass(type(thing), DistributedDataParallel):
            continue
        # Where the last forward pass was under no_sync(), so was what came before it.
        if (
            not parameters.isdisjoint(thing.parameters())
            and thing.require_forward_param_sync
            and _hook_name(thing) not in _HOOKS_THAT_SEND_NOTHING
        ):
            yield thing


def _hook_name(ddp: DistributedDataParallel) -> str:
    for hook in hooks_of(ddp):
        return hook if isinstance(hook, str) else getattr(hook, "__name__", repr(hook))
    return "all_reduce"

"""Checks in the first step: whether gradients were averaged already, and settings of ranks."""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from comm_hooks.collectives.base import Transport
from comm_hooks.collectives.model_parallel import gather_from_all
from comm_hooks.collectives.requests import AllGatherObject
from comm_hooks.exchange import Exchange
from comm_hooks.exchange.agreement import check_agreement
from comm_hooks.shards import whole

Tensors = Sequence[torch.Tensor]
Gradients = Sequence[torch.Tensor | None]


class Divided(Protocol):
    """An optimizer with an exchange of its own, perhaps of one part of a sharded model."""

    @property
    def exchange(self) -> Exchange:
        """The exchange between the ranks that hold the same part of the model."""

    @property
    def model_parallel_groups(self) -> Sequence[dist.ProcessGroup]:
        """The process groups over which the model is sharded: each rank holds another part."""

    def hyperparameters(self) -> Mapping[str, Any]:
        """Return the hyperparameters of the next step, which must be equal on all ranks."""


class AveragingCheck:
    """One check that neither DDP nor FSDP has averaged gradients that an optimizer exchanges."""

    def __init__(self) -> None:
        self._is_done = False
        self._finding: dict[str, Any] | None = None

    def check(self, optimizer: Divided, parameters: Tensors, gradients: Gradients) -> None:
        """Raise ``ValueError`` on all ranks if DDP or FSDP has averaged the gradients.

        Raises ``ConfigMismatchError`` if settings differ between ranks of a sharded model.  Does
        nothing from the second call on.  All ranks must call it.
        """
        if self._is_done:
            return
        transport = optimizer.exchange.transport
        if groups := optimizer.model_parallel_groups:
            own = {**optimizer.exchange.config(), **optimizer.hyperparameters()}
            found = gather_from_all(transport, groups, [dist.get_rank(), own])
            found.sort(key=lambda entry: entry[0])
            check_agreement([config for _, config in found], [rank for rank, _ in found])
        self.note(transport, parameters, gradients)
        self.compare(transport)
        self._is_done = True

    def note(self, transport: Transport, parameters: Tensors, gradients: Gradients) -> None:
        """Keep the finding about this rank's first gradients for :meth:`compare`; send nothing."""
        if not self._is_done and self._finding is None:
            shared = sharded_over(parameters, transport.ranks)
            self._finding = {"sharded over": shared, "gradients": fingerprint(gradients)}

    def compare(self, transport: Transport) -> None:
        """Raise ``ValueError`` on all ranks if the gradients given to :meth:`note` were averaged.

        Repeated until two ranks have a finding: one alone proves nothing.  All ranks must call it.
        """
        # Nothing else averages between ranks that are simulated in one process.
        if self._is_done or transport.world_size == 1 or not dist.is_initialized():
            return
        own, self._finding = self._finding, None
        findings = [each for each in transport.perform(AllGatherObject(own)) if each]
        refuse_averaged(findings)
        self._is_done = len(findings) > 1


def fingerprint(gradients: Gradients) -> str | None:
    """Return a digest of the gradients, equal for equal bits; None if all of them are zero.

    Reads one number per gradient back from the device.

    Args:
        gradients: gradients of any dtype; None for a parameter without one.

    Example::

        >>> from comm_hooks.optim.already_averaged import fingerprint
        >>> fingerprint([torch.ones(2), None]) == fingerprint([torch.ones(2)])
        True
        >>> fingerprint([torch.zeros(2)]) is None
        True
    """
    dense = [g for g in gradients if g is not None and not g.is_sparse]
    # Sums of the bits: exact, so equal for equal gradients on any device.
    sums = [g.detach().float().view(torch.int32).sum(dtype=torch.int64) for g in dense]
    numbers = torch.stack(sums).tolist() if sums else []
    return hashlib.blake2b(repr(numbers).encode()).hexdigest() if any(numbers) else None


def sharded_over(parameters: Tensors, ranks: Sequence[int]) -> list[int]:
    """Return the sorted ranks, of ``ranks``, between which FSDP averages gradients of these shards.

    A rank of FSDP gets the mean of its shard, and never its own gradient.
    """
    sharing: set[int] = set()
    for parameter in map(whole, parameters):
        if getattr(parameter, "_fsdp_flattened", False):  # FSDP1, in an unknown group
            sharing.update(ranks)
        elif (mesh := getattr(parameter, "device_mesh", None)) is not None:
            sharing.update(mesh.mesh.flatten().tolist())
    shared = sorted(sharing.intersection(ranks))
    return shared if len(shared) > 1 else []


def refuse_averaged(findings: Sequence[Mapping[str, Any]]) -> None:
    """Raise ``ValueError`` if the findings of the ranks show that gradients were averaged.

    Args:
        findings: the findings of all ranks that took a step, so that all of them raise, or none.
    """
    for finding in findings:
        if sharing := finding["sharded over"]:
            raise ValueError(
                f"the parameters are sharded over ranks {', '.join(map(str, sharing))}, and FSDP "
                "has averaged the gradients that this optimizer exchanges itself: give it ranks "
                'between which nothing does, process_group=mesh["replicate"].get_group(), or use '
                "one of torch with compress_reduce_scatter or compress_all_reduce"
            )
    fingerprints = {finding["gradients"] for finding in findings}
    if len(findings) > 1 and len(fingerprints) == 1 and None not in fingerprints:
        raise ValueError(
            "the gradients are equal on all ranks before this optimizer exchanges them: if DDP has "
            "averaged them, register(ddp_model, optimizer) before the first step; else give each "
            "rank data of its own"
        )

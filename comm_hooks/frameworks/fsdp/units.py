"""The modules that FSDP2 reduces as a unit, and the content of their flat gradients.

FSDP gives a hook a bare tensor: the shards of all parameters of one module, one after the other,
each padded to the size of the largest shard.  Only private objects of torch know the parameters
(``FSDPParamGroup``, ``FSDPParam``); no other file reads them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from comm_hooks.exchange.layout import Segment
from comm_hooks.requirements import first_of
from comm_hooks.warnings import warn_program

# torch.compile and activation checkpointing put these into names; a resumed run may do without.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


@dataclass(frozen=True)
class Piece:
    """A parameter's part of the flat gradient.

    Attributes:
        name: the parameter's fully qualified name.
        shape: the shape of the whole parameter.
        shards: the shape of each rank's shard, which may be empty.
        padded: the number of elements that a shard takes in the flat gradient.
    """

    name: str
    shape: torch.Size
    shards: tuple[torch.Size, ...]
    padded: int

    def shard_name(self, shard: int) -> str:
        """Return the name of shard i of n for residuals and random keys: ``name[i/n]``."""
        return f"{self.name}[{shard}/{len(self.shards)}]"


class Unit:
    """A module that ``fully_shard`` was applied to, with one flat gradient."""

    def __init__(self, name: str, module: FSDPModule, group: Any, names: Mapping[Any, str]) -> None:
        self.name = name
        self.module = module
        self.group = group
        self._names = names

    @property
    def title(self) -> str:
        return repr(self.name) if self.name else "the root module"

    @property
    def all_reduces(self) -> bool:
        """Whether FSDP itself averages over replicas."""
        return self.group.mesh_info.replicate_mesh_dim is not None

    @property
    def shards(self) -> bool:
        return self.group.mesh_info.shard_mesh_dim is not None

    @property
    def shard_group(self) -> dist.ProcessGroup:
        return self.group.mesh_info.shard_process_group

    def registered(self) -> list[torch.Tensor]:
        """Return all tensors that may be the module's parameters: shards and gathered tensors."""
        parameters = self.group.fsdp_params
        gathered = [p._unsharded_param for p in parameters if hasattr(p, "_unsharded_param")]
        return [*(p.sharded_param for p in parameters), *gathered]

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return the shards that this rank holds, frozen ones included, by parameter name."""
        return {self._name(p): p.sharded_param.to_local() for p in self.group.fsdp_params}

    def gradients(self) -> list[torch.Tensor]:
        """Return the gradients of the shards that this rank holds."""
        found = [p.sharded_param.grad for p in self.group.fsdp_params]
        return [gradient.to_local() for gradient in found if gradient is not None]

    def pieces(self, *, frozen: bool = False) -> list[Piece]:
        """Return each trainable (with ``frozen``: each) parameter's piece of the flat gradient."""
        ranks = self.group.mesh_info.shard_mesh_size
        pieces = []
        for parameter in self.group.fsdp_params:
            if parameter.sharded_param.requires_grad or frozen:
                dim = parameter.fsdp_placement.dim
                shards = _shards(parameter._orig_size, dim, ranks)
                shape = parameter.sharded_param.shape
                pieces.append(Piece(self._name(parameter), shape, shards, shards[0].numel()))
        return pieces

    def views(
        self, pieces: list[Piece], flat: torch.Tensor, shard: int, exempts: Callable[[Any], bool]
    ) -> tuple[list[Segment], list[torch.Tensor]]:
        """Return the segments of one shard of the flat gradient, and views of them in ``flat``.

        A parameter is exempt by its whole shape: a large one is compressed even in small shards.

        Raises:
            ValueError: if the length of ``flat`` is not that of the pieces.
        """
        expected = sum(piece.padded for piece in pieces)
        if flat.numel() != expected:
            raise ValueError(
                f"FSDP reduces {flat.numel()} elements per shard of {self.title}, but its "
                f"trainable parameters have {expected}: some of them got no gradient. "
                "Freeze what the loss does not use (requires_grad_(False)) or call "
                "model.set_reduce_scatter_unused_params(True) where this version of PyTorch has it"
            )
        segments, tensors, start = [], [], 0
        for piece in pieces:
            shape = piece.shards[shard]
            if shape.numel():
                segments.append(
                    Segment(piece.shard_name(shard), tuple(shape), exempts(piece.shape))
                )
                tensors.append(flat[start : start + shape.numel()].view(shape))
            start += piece.padded
        return segments, tensors

    def _name(self, parameter: Any) -> str:
        info = parameter._module_info
        prefix = self._names[info.module]
        return f"{prefix}.{info.param_name}" if prefix else info.param_name


def find_units(model: nn.Module, caller: str) -> list[Unit]:
    """Return the FSDP2 modules of a model that have parameters.

    Raises:
        ValueError: if there are none, or one of them has parameters on several meshes.
    """
    names: dict[Any, str] = {}
    for name, module in model.named_modules():
        for wrapper in _WRAPPERS:
            name = f"{name}.".replace(wrapper, "")[:-1]
        names[module] = name
    units: list[Unit] = []
    for module, name in names.items():
        if not isinstance(module, FSDPModule):
            continue
        state = module._get_fsdp_state()
        # Older versions of torch know only one group per module.
        groups = getattr(state, "_fsdp_param_groups", None)
        if groups is None:
            groups = [state._fsdp_param_group] if state._fsdp_param_group else []
        if len(groups) > 1:
            raise ValueError(
                f"{caller}: module {name!r} has parameters on {len(groups)} meshes "
                "(shard_placement_fn), which is not supported: apply fully_shard to them apart"
            )
        units += [Unit(name, module, group, names) for group in groups]
    if not units:
        raise ValueError(
            f"{caller}: {type(model).__name__} has no module that fully_shard was applied to: "
            "call torch.distributed.fsdp.fully_shard(module, mesh=...) first"
        )
    return units


def warn_of_unsharded(model: nn.Module, units: Sequence[Unit]) -> None:
    """Warn of trainable parameters that FSDP2 does not reduce: they are not averaged at all."""
    sharded = {id(p) for unit in units for p in unit.registered()}
    names = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in sharded]
    if names:
        warn_program(
            f"no module that fully_shard was applied to has {first_of(names)}: their gradients "
            "are not averaged over ranks"
        )


def _shards(shape: torch.Size, dim: int, ranks: int) -> tuple[torch.Size, ...]:
    """Return the shapes of the shards into which FSDP cuts a tensor of ``shape`` along ``dim``."""
    size = -(-shape[dim] // ranks)
    lengths = [max(0, min(size, shape[dim] - rank * size)) for rank in range(ranks)]
    return tuple(torch.Size([*shape[:dim], n, *shape[dim + 1 :]]) for n in lengths)

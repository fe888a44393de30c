"""What the flat gradient of an FSDP2 module consists of.

FSDP gives a hook a bare tensor: the shards of all parameters of one module, one after the other,
each padded to the size of the largest shard.  Which parameters those are is known only to objects
that torch does not document (``FSDPParamGroup``, ``FSDPParam``); this is the only file that reads
them.
"""

import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from comm_hooks.collectives.base import Transport
from comm_hooks.collectives.requests import AllGatherObject
from comm_hooks.exchange import Exchange
from comm_hooks.exchange.layout import Segment
from comm_hooks.exchange.settings import require_gradients
from comm_hooks.wire.checksum import fingerprint

# torch.compile and activation checkpointing put these into names; a resumed run may do without.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


@dataclass(frozen=True)
class Piece:
    """A parameter's part of the flat gradient.

    Attributes:
        name: the parameter's fully qualified name.
        shape: of the whole parameter.
        shards: the shape of each rank's shard, which may be empty.
        padded: the elements that a shard takes in the flat gradient.
    """

    name: str
    shape: torch.Size
    shards: tuple[torch.Size, ...]
    padded: int

    def shard_name(self, shard: int) -> str:
        """Return what residuals and random keys of a shard are tied to."""
        return f"{self.name}[{shard}/{len(self.shards)}]"


class Unit:
    """A module that ``fully_shard`` was applied to: what it reduces at once."""

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

    @property
    def replica_group(self) -> dist.ProcessGroup | None:
        """The ranks between which FSDP itself averages this rank's shard, if it does."""
        return self.group.mesh_info.replicate_process_group if self.all_reduces else None

    def registered(self) -> list[torch.Tensor]:
        """Return whatever may stand in the modules for the parameters: shards, or all-gathered."""
        parameters = self.group.fsdp_params
        gathered = [p._unsharded_param for p in parameters if hasattr(p, "_unsharded_param")]
        return [*(p.sharded_param for p in parameters), *gathered]

    def parameters(self) -> dict[str, torch.Tensor]:
        """Return the shards that this rank holds, frozen ones included, by parameter name."""
        return {self._name(p): p.sharded_param.to_local() for p in self.group.fsdp_params}

    def pieces(self, *, frozen: bool = False) -> list[Piece]:
        """Return what the flat gradient consists of, or would if nothing were frozen."""
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
        """Return the segments of one shard of the flat gradient, and where they are in ``flat``.

        A parameter is exempt by its whole shape: a large one is compressed even if cut into small
        shards, a bias is not.

        Raises:
            ValueError: if ``flat`` is not as long as it must be.
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


class Replicas:
    """The ranks that hold the same shards as this one, whose weights must stay the same.

    Args:
        units: of the model.
        replicas: between those ranks.
        shards: between the ranks that together hold one replica.
    """

    def __init__(self, units: Sequence[Unit], replicas: Transport, shards: Transport) -> None:
        self._units = units
        self._replicas = replicas
        self._shards = shards
        self._compared_at: int | None = None

    def compare(self, exchange: Exchange) -> None:
        """Compare weights at the first exchange, and then as often as its ``verify_every`` says.

        Raises:
            ValueError: on all ranks, if replicas of any shard hold different weights.
        """
        is_first = self._compared_at is None
        if self._compared_at == exchange.step or not (is_first or exchange.verifies()):
            return
        self._compared_at = exchange.step
        parameters = {n: p for unit in self._units for n, p in unit.parameters().items()}
        digests = {name: int(fingerprint([p])) for name, p in parameters.items()}
        replicas = self._replicas.perform(AllGatherObject(digests))
        differing = [n for n in digests if any(r[n] != digests[n] for r in replicas)]
        # A difference may lie in one shard only, but all ranks must stop together.
        names = dict.fromkeys(
            name for part in self._shards.perform(AllGatherObject(differing)) for name in part
        )
        if names:
            raise ValueError(
                f"replicas {'start from' if is_first else 'have come to'} different weights, in "
                f"{first_of(list(names))}: initialize them alike (torch.manual_seed) or load the "
                "same checkpoint everywhere, and let nothing but the optimizer change them"
            )


def find_units(model: nn.Module, caller: str) -> list[Unit]:
    """Return the FSDP2 modules of a model that have parameters.

    Raises:
        ValueError: if there are none, or some of them all-reduce by themselves or have parameters
            on several meshes.
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
    """Warn of trainable parameters that no FSDP2 module reduces, and hence nobody averages."""
    sharded = {id(p) for unit in units for p in unit.registered()}
    names = [n for n, p in model.named_parameters() if p.requires_grad and id(p) not in sharded]
    if names:
        warnings.warn(
            f"no module that fully_shard was applied to has {first_of(names)}: their gradients "
            "are not averaged over ranks",
            stacklevel=3,
        )


def settle_model(exchange: Exchange, units: Sequence[Unit], caller: str) -> None:
    """Let ranks agree on the model, too.

    Raises:
        ValueError: if rounds of the exchange return no means of gradients.
    """
    require_gradients(exchange.settings, caller)
    shapes = [(unit.name, p.name, p.shape) for unit in units for p in unit.pieces()]
    exchange.agree_on(
        {
            "model": hashlib.blake2b(repr(shapes).encode(), digest_size=8).hexdigest(),
            "shards": units[0].group.mesh_info.shard_mesh_size,
        }
    )


def first_of(names: Sequence[str]) -> str:
    """Return the first name, and how many there are beside it."""
    return f"{names[0]!r}" + (f" and {len(names) - 1} other parameters" if names[1:] else "")


def check_names(exchange: Exchange, known: set[str], states: Sequence[Mapping[str, Any]]) -> None:
    """Raise ``ValueError`` if states have residuals of shards that are not ``known``."""
    if exchange.memory is None:
        return
    for state in states:
        strangers = exchange.memory.parameters_in(state.get("memory", {})) - known
        if strangers:
            raise ValueError(
                "the state has residuals of shards that this rank does not have: "
                f"{', '.join(sorted(strangers)[:3])} (parameter[shard/shards])"
            )


def count_step(exchange: Exchange) -> None:
    """Let a step of the exchange end with the backward pass that is running."""
    step = exchange.step

    def end() -> None:
        # Every module's reduction asks for this; the first one to be called does it.
        if exchange.step == step:
            exchange.end_step()

    torch.autograd.Variable._execution_engine.queue_callback(end)


def _shards(shape: torch.Size, dim: int, ranks: int) -> tuple[torch.Size, ...]:
    """Return the shapes into which FSDP cuts ``shape`` along ``dim``."""
    size = -(-shape[dim] // ranks)
    lengths = [max(0, min(size, shape[dim] - rank * size)) for rank in range(ranks)]
    return tuple(torch.Size([*shape[:dim], n, *shape[dim + 1 :]]) for n in lengths)

"""What is refused before anything is sent."""

from typing import Literal

import torch

from comm_hooks.compressors.base import Compressor
from comm_hooks.memory.base import Memory

Collective = Literal["auto", "all_reduce", "all_gather", "sharded", "hierarchical"]


def require_dense_floats(tensor: torch.Tensor) -> None:
    """Raise ``ValueError`` for tensors that no compressor takes."""
    require_whole(tensor)
    if not tensor.is_floating_point() or tensor.is_sparse:
        raise ValueError(
            f"gradients must be dense and of a floating-point dtype to be compressed, got "
            f"{tensor.dtype} ({tensor.layout})"
        )


def require_whole(tensor: torch.Tensor) -> None:
    """Raise ``ValueError`` for a DTensor, as FSDP2 and tensor parallelism have them."""
    if hasattr(tensor, "device_mesh"):
        raise ValueError(
            "a DTensor (FSDP2, tensor parallelism) is in parts on several ranks and cannot be "
            "exchanged: give its to_local(), between ranks that hold the same part"
        )


def supported_collectives(compressor: Compressor, exempt: Compressor) -> list[str]:
    """Return the collectives that can carry a compressor's payloads, the simplest first.

    Without ``"hierarchical"``, which uses one of these between nodes.
    ``exempt`` is what compresses the parameters that the compressor does not see.
    """
    collectives = ["all_reduce"] if compressor.linear and exempt.linear else []
    collectives.append("all_gather")
    if not compressor.per_rank:
        collectives.append("sharded")
    return collectives


def check_combination(
    compressor: Compressor,
    memory: Memory | None,
    collective: str,
    exempt: Compressor,
) -> None:
    """Raise ``ValueError`` for a compressor that the other settings cannot go with."""
    name = type(compressor).__name__
    supported = [*supported_collectives(compressor, exempt), "hierarchical"]
    if collective not in ("auto", *supported):
        reasons = {
            "all_reduce": (
                "exempt parameters in bfloat16 cannot be summed"
                if compressor.linear
                else f"the payloads of {name} cannot be summed"
            ),
            "sharded": f"{name} gives each rank its own elements",
        }
        raise ValueError(
            f"collective {collective!r} cannot be used: {reasons[collective]}; "
            f"choose from auto, {', '.join(supported)}"
        )
    if memory and not compressor.bounds_residuals:
        raise ValueError(
            f"{compressor} cannot be used with error feedback: it is not contractive, so the "
            f"residual would grow without bound. Use memory=None; its noise averages out over "
            f"steps" + (" (or RandomK(unbiased=False))" if name == "RandomK" else "")
        )


def check_nodes(ranks_per_node: int | None, world_size: int) -> int:
    """Return ``ranks_per_node``, or raise ``ValueError`` if ranks cannot be divided like that."""
    if ranks_per_node is None:
        raise ValueError(
            "collective 'hierarchical': how many ranks share a node is not known. LOCAL_WORLD_SIZE "
            "is not set (torchrun does that), or the process group does not have equally many "
            "consecutive ranks on each node: pass ranks_per_node"
        )
    if world_size % ranks_per_node:
        raise ValueError(
            f"collective 'hierarchical': {world_size} ranks cannot be divided into nodes of "
            f"{ranks_per_node}: ranks_per_node must divide the number of ranks"
        )
    return ranks_per_node

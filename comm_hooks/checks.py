"""What is refused before anything is sent."""

import torch


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

"""What happens to the aggregate: optimizers that run identically on every rank."""

from comm_hooks.optim.compressed_adam import CompressedAdam

__all__ = ["CompressedAdam"]

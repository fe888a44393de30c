"""What a memory sees of a bucket."""

from dataclasses import dataclass

import torch


@dataclass(eq=False)
class Rows:
    """Equally long vectors as a float32 matrix (n, numel), with the name of each row."""

    names: tuple[str, ...]
    matrix: torch.Tensor

"""A model whose parameters are one."""

from typing import Any

import torch
from torch import nn


class FlatModel(nn.Module):
    """A module whose parameters are all in one, of shape (1, d), in the order of their names.

    So that a compressor gets the whole model as one vector, as papers write it.  An exchange on the
    module itself would send norms and biases exactly: half a percent of the elements, and so more
    bytes than a sketch of 1/1000 has, for the parameters that matter most.

    Args:
        module: whose parameters are copied.  Buffers remain its own.

    Example::

        >>> flat = FlatModel(nn.Linear(3, 2))
        >>> [tuple(p.shape) for p in flat.parameters()], flat(torch.ones(5, 3)).shape
        ([(1, 8)], torch.Size([5, 2]))
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        named = dict(module.named_parameters())
        # In a tuple, where nn.Module does not look for parameters.
        self._hidden = (module,)
        self._shapes = {name: p.shape for name, p in named.items()}
        self.flat = nn.Parameter(torch.cat([p.detach().flatten() for p in named.values()])[None])

    def forward(self, *inputs: Any) -> Any:
        """Apply the module with parameters that are views of the flat one."""
        pieces = self.flat[0].split([shape.numel() for shape in self._shapes.values()])
        named = {
            name: piece.view(shape)
            for (name, shape), piece in zip(self._shapes.items(), pieces, strict=True)
        }
        return torch.func.functional_call(self._hidden[0], named, inputs)

    def train(self, mode: bool = True) -> "FlatModel":
        """Set the mode of the module, too."""
        self._hidden[0].train(mode)
        super().train(mode)
        return self

"""A look at whether samples are independent of each other, as clipping takes them to be."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from comm_hooks.optim.private.errors import PrivacyError


class IndependenceProbe:
    """Refuses a loss of a sample that depends on the other samples of its batch.

    Clipping bounds what a sample does to its own gradient.  Where it also moves the gradients of
    others (a contrastive loss, a normalization over the batch) its influence has no bound.  In the
    first batch of two samples or more that are finite, the derivative of the first one's loss, by
    what the layers with parameters put out for the others, must be exactly zero.

    Args:
        model: whose layers put out one row per sample.

    Not noticed: what a loss is divided by, if that depends on who is in the batch (a mean over all
    tokens), and other influences without a derivative, such as masks.

    Example::

        >>> import torch
        >>> from comm_hooks.optim.private.independence import IndependenceProbe
        >>> probe = IndependenceProbe(model)
        >>> outputs = model(torch.randn(4, 8))
        >>> probe.look((outputs - outputs.mean(0)).square().sum(1))
        Traceback (most recent call last):
        comm_hooks.optim.private.errors.PrivacyError: the loss of a sample depends on other ...
    """

    def __init__(self, model: nn.Module) -> None:
        self._outputs: list[torch.Tensor] = []
        self._hooks = [
            module.register_forward_hook(self._keep)
            for module in model.modules()
            if any(p.requires_grad for p in module.parameters(recurse=False))
        ]

    def _keep(self, module: nn.Module, inputs: Sequence[Any], output: Any) -> None:
        leaves = pytree.tree_leaves(output)
        self._outputs += [t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]

    def look(self, losses: torch.Tensor) -> None:
        """Look at the losses of a batch's samples, (B,), as long as none could be looked at.

        Raises:
            PrivacyError: if the first one depends on another sample.
        """
        outputs, self._outputs = self._outputs, []
        if not self._hooks or len(losses) < 2 or not bool(losses.detach().isfinite().all()):
            return
        rows = [t for t in outputs if t.dim() and len(t) == len(losses)]
        gradients = torch.autograd.grad(losses[0], rows, retain_graph=True, allow_unused=True)
        if any(bool(gradient[1:].any()) for gradient in gradients if gradient is not None):
            raise PrivacyError(
                "the loss of a sample depends on other samples of its batch, so that clipping "
                "bounds nobody's influence: use a model that sees one sample at a time and a loss "
                "that compares it with nothing but its label"
            )
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

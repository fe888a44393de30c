"""Public knowledge for AdaDPS: gradients of public data, and scales from token statistics."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from comm_hooks.optim.private.gradients.clipping import LossFunction
from comm_hooks.optim.private.gradients.per_sample import unwrapped
from comm_hooks.requirements import require_callable, require_kind, require_within


def token_frequency(counts: torch.Tensor, *, floor: float = 0.01) -> torch.Tensor:
    """Return AdaDPS's divisors A from token frequencies: proportional, 1 for the most frequent.

    A_j = max(counts_j / max counts, floor).  Gradients are divided by A, so rare tokens get the
    larger steps.  For option 2 (i) of AdaDPS (Li et al., ICML 2022, Section 4).

    **The counts must be public**: from another corpus, or from a word list.  Counts from the
    training data, which the paper's authors use, are private, and no accountant covers them.

    Args:
        counts: how often each of V tokens occurs in public text, shape (V,); any unit.
        floor: the least A, in (0, 1]: gradients grow by a factor of 1 / floor at most.

    Returns:
        float32, shape (V,).  It fits the columns of a linear layer's weight, (classes, V), as it
        is, and the rows of an embedding's, (V, width), as ``[:, None]``.

    Raises:
        ValueError: for counts that are not a vector, negative, not finite or all zero; for a floor
            out of range.

    Example::

        >>> from comm_hooks.optim.private import token_frequency
        >>> token_frequency(torch.tensor([500, 50, 1, 0]))
        tensor([1.0000, 0.1000, 0.0100, 0.0100])
    """
    require_within("token_frequency", "floor", floor, "(0, 1]")
    shares = _relative("token_frequency: counts", counts)
    return shares.clamp_min(floor)


def tf_idf(scores: torch.Tensor, *, floor: float = 0.01) -> torch.Tensor:
    """Return AdaDPS's divisors A from tokens' TF-IDF scores: inversely proportional to them.

    A_j = min(1, floor max scores / scores_j): ``floor`` for the highest score, and 1 for all below
    ``floor`` times that.  The higher a token scores, the larger its steps.  For option 2 (ii) of
    AdaDPS (Li et al., ICML 2022, Section 6.1.2).  The published code multiplies gradients by 10
    times the scores: the same up to the bound and a factor of learning rate and clipping norm.

    **The scores must be public**, see :func:`token_frequency`; :func:`mean_tf_idf` computes them
    from public documents.

    Args:
        scores: the score of each of V tokens, shape (V,), not negative.
        floor: the least A, in (0, 1].

    Returns:
        float32, shape (V,); see :func:`token_frequency` for how it fits.

    Raises:
        ValueError: for scores that are not a vector, negative, not finite or all zero; for a floor
            out of range.

    Example::

        >>> from comm_hooks.optim.private import tf_idf
        >>> tf_idf(torch.tensor([0.1, 0.2, 5.0, 0.0]), floor=0.02)
        tensor([1.0000, 0.5000, 0.0200, 1.0000])
    """
    require_within("tf_idf", "floor", floor, "(0, 1]")
    shares = _relative("tf_idf: scores", scores)
    return floor / shares.clamp_min(floor)


def mean_tf_idf(documents: torch.Tensor) -> torch.Tensor:
    """Return each token's TF-IDF score, the mean over public documents.

    The term frequency is a token's share of a document's tokens, the inverse document frequency
    ln(D / documents that have it), as in the published code of AdaDPS (up to the logarithm's base).

    Args:
        documents: the count of each of V tokens in each of D documents, shape (D, V).

    Returns:
        float32, shape (V,); zero for tokens that occur nowhere, or everywhere.

    Raises:
        ValueError: for counts that are not a matrix, negative or not finite.

    Example::

        >>> from comm_hooks.optim.private import mean_tf_idf
        >>> mean_tf_idf(torch.tensor([[2, 2, 0], [4, 0, 0]]))
        tensor([0.0000, 0.1733, 0.0000])
    """
    if documents.ndim != 2 or not len(documents):
        raise ValueError(f"mean_tf_idf: documents must be a matrix, got {tuple(documents.shape)}")
    _require_counts("mean_tf_idf: documents", documents)
    counts = documents.double()
    share = counts / counts.sum(1, keepdim=True).clamp_min(1)
    having = (counts > 0).sum(0)
    rarity = math.log(len(counts)) - having.clamp_min(1).log()
    return (share.mean(0) * rarity).float()


def _relative(what: str, values: torch.Tensor) -> torch.Tensor:
    """Return a vector of counts over its largest element; raise ``ValueError`` for other values."""
    if values.ndim != 1 or not len(values):
        raise ValueError(f"{what} must be a vector, got shape {tuple(values.shape)}")
    _require_counts(what, values)
    largest = values.max()
    if largest <= 0:
        raise ValueError(f"{what} must not all be zero")
    return (values.double() / largest).float()


def _require_counts(what: str, values: torch.Tensor) -> None:
    if values.is_complex() or not bool((values.isfinite() & (values >= 0)).all()):
        raise ValueError(f"{what} must be finite and not negative")


class PublicGradients:
    """A function that returns the mean gradient of the next public batch; batches start over.

    Pass it as ``public_gradients`` of :class:`~comm_hooks.optim.private.AdaDPS` or a baseline,
    which call it once per step.  ``p.grad`` and the hooks of DDP are left alone.

    Ranks must see the same batches: let the loader shuffle with a generator of a common seed.
    The data must be public, and similar to the private data; 1 % as much is enough in the paper's
    experiments (Li et al., ICML 2022, Table 10).

    Args:
        model: the model that is trained; may be a ``DistributedDataParallel``.
        loss_function: returns each sample's loss, or the mean, of the unwrapped model and a batch.
        batches: public batches; iterated over again when they end.

    Raises:
        ValueError: in a call, if there are no batches.

    Example::

        >>> from comm_hooks.optim.private import PublicGradients
        >>> gradients = PublicGradients(model, lambda m, x: m(x).mean(), [torch.ones(4, 8)])
        >>> {name: tuple(gradient.shape) for name, gradient in gradients().items()}
        {'weight': (8, 8), 'bias': (8,)}
    """

    def __init__(
        self, model: nn.Module, loss_function: LossFunction, batches: Iterable[Any]
    ) -> None:
        require_kind(self, "model", model, nn.Module)
        require_callable(self, "loss_function", loss_function)
        require_kind(self, "batches", batches, Iterable)
        self._parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        # DDP's forward pass broadcasts buffers and prepares a reduction that would not come.
        self._module = unwrapped(model)
        self._loss_function = loss_function
        self._batches = _forever(batches)

    def __call__(self) -> dict[str, torch.Tensor]:
        """Return the gradient of the next batch by parameter name; zeros for unused parameters."""
        with torch.enable_grad():
            loss = self._loss_function(self._module, next(self._batches))
            gradients = torch.autograd.grad(
                loss.mean(), list(self._parameters.values()), materialize_grads=True
            )
        return dict(zip(self._parameters, gradients, strict=True))


def _forever(batches: Iterable[Any]) -> Iterator[Any]:
    while True:
        empty = True
        for batch in batches:
            empty = False
            yield batch
        if empty:
            raise ValueError(
                "PublicGradients: no public batches: pass a loader, or a list that can be iterated "
                "over again"
            )

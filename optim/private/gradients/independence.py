"""A check that a sample's loss does not depend on other samples, as clipping requires."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils import _pytree as pytree

from comm_hooks.optim.private.errors import PrivacyError
from comm_hooks.optim.private.gradients.clipping import LossFunction
from comm_hooks.optim.private.gradients.model_checks import unwritten_buffers
from comm_hooks.optim.private.gradients.replay import Replay

# The bits of a row's number distinguish every two of so many rows, and a mean over them changes by
# half if half of them are missing, which is more than rounding in any dtype.
_MOST_ROWS = 8
_EXTREME = 1e3


def sample_losses(
    model: nn.Module, loss_function: LossFunction, batch: Any, size: int
) -> torch.Tensor:
    """Return the loss of each sample of a batch.

    Raises:
        ValueError: if the loss function does not return one number per sample.
        PrivacyError: if the forward pass writes to the model; its buffers are restored.
    """
    with unwritten_buffers(model):
        losses = loss_function(model, batch)
    if not isinstance(losses, torch.Tensor) or losses.shape != (size,):
        got = tuple(losses.shape) if isinstance(losses, torch.Tensor) else type(losses).__name__
        raise ValueError(
            f"loss_function must return the loss of each sample, shape ({size},), got {got}: use "
            'reduction="none", and the mean over the parts of a sample'
        )
    return losses


class IndependenceProbe:
    """A test that refuses a loss of a sample that depends on the other samples of its batch.

    Clipping bounds the influence of a sample on its own gradient.  If a sample also changes the
    gradients of others (a contrastive loss, a normalization over the batch, a mean over all tokens)
    its influence has no bound.  In the first batch that has two samples with finite losses, up to
    eight are split into kept and changed ones, by each bit of their row number, so that every two
    are on different sides once.  Neither the losses of the kept samples, nor the gradient of their
    sum with random weights, may change if the changed samples are

    * replaced by kept ones
    * made extreme: multiplied by 1000 and -1000; x becomes 1 - round(x) in tensors within [0, 1]
    * left out (in a random model with dropout or, if needed, all modules in ``eval()`` mode)

    or if the batch's samples after the first eight are left out.  All passes draw the same random
    numbers, and torch's, NumPy's and Python's generators are restored.

    A change of less than sqrt(eps) of the norm passes, for the coarsest dtype that occurs (on GPUs
    TF32 for float32): 0.00035 for float32 on a CPU, 0.09 for bfloat16.

    Args:
        model: the first argument of the loss function.  Its buffers may not change.
        loss_function: ``loss_function(model, batch)`` returns the loss of each sample, ``(B,)``.

    Not detected: dependence that this batch does not show, such as a margin that none of its
    samples reaches, or below the tolerance; in a random model, dependence in training only on
    absent samples; state outside of buffers.  Extreme samples for which the loss function raises
    are left out.
    """

    def __init__(self, model: nn.Module, loss_function: LossFunction) -> None:
        self._model = model
        self._loss_function = loss_function
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._replay = Replay(self._parameters)
        self._has_seen = False

    def look(self, batch: Any) -> bool:
        """Test a batch, unless a batch has been tested before; return whether one has been tested.

        Args:
            batch: tensors with a common leading dimension, in tuples, lists and dicts.

        Raises:
            PrivacyError: if samples depend on each other.
            ValueError: if the loss function does not return one number per sample.
        """
        leaves, self._structure = pytree.tree_flatten(batch)
        if self._has_seen or len(leaves[0]) < 2:
            return self._has_seen
        losses = self._seen(leaves)[0]
        finite = losses.isfinite().nonzero().flatten()
        if len(finite) < 2:
            return False
        leaves = [leaf[finite.to(leaf.device)] for leaf in leaves]
        few = [leaf[:_MOST_ROWS] for leaf in leaves]
        self._compare_replaced(few)
        for modules in ([], dropouts_of(self._model), list(self._model.modules())):
            with evaluated(modules):
                self._seen(few)
                if not self._replay.has_drawn:
                    self._compare_left_out(few, leaves)
                    break
        self._has_seen = True
        return True

    def _compare_replaced(self, rows: list[torch.Tensor]) -> None:
        once, again = (self._seen(rows) for _ in range(2))
        if self._differ(once, again, math.sqrt(self._replay.epsilon)):
            raise PrivacyError(
                "the losses of a batch differ when they are computed again, so samples cannot be "
                "shown to be independent: let the model keep no data of its inputs, and draw "
                "random numbers from the default generators of torch, NumPy or Python"
            )
        for kept, others in _splits(len(rows[0])):
            before = self._seen(rows, kept)
            self._require_same(before, self._seen(_replaced(rows, kept, others), kept))
            for sign in (1.0, -1.0):
                try:
                    extreme = self._seen(_extreme(rows, others, sign), kept)
                except PrivacyError:
                    raise
                except Exception:
                    continue
                self._require_same(before, extreme)

    def _compare_left_out(self, few: list[torch.Tensor], leaves: list[torch.Tensor]) -> None:
        for kept, _ in _splits(len(few[0])):
            alone = self._seen([leaf[kept] for leaf in few])
            self._require_same(self._seen(few, kept), alone)
        if len(leaves[0]) > len(few[0]):
            self._require_same(self._seen(leaves, range(len(few[0]))), self._seen(few))

    def _seen(
        self,
        leaves: list[torch.Tensor],
        kept: Sequence[int] | None = None,
    ) -> list[torch.Tensor]:
        """Return the losses of the ``kept`` rows, and the gradient of their weighted sum.

        The weights are random, the same in every call.
        """
        size = len(leaves[0])
        weights = 1 + torch.rand(size, generator=torch.Generator().manual_seed(0))
        with self._replay.once():
            batch = pytree.tree_unflatten(leaves, self._structure)
            losses = sample_losses(self._model, self._loss_function, batch, size)
            chosen = losses if kept is None else losses[list(kept)]
            weighted = (chosen * weights[: len(chosen)].to(losses)).sum()
            gradient: Sequence[torch.Tensor | None] = []
            if weighted.requires_grad:
                gradient = torch.autograd.grad(weighted, self._parameters, allow_unused=True)
        self._replay.note(losses)
        parts = [torch.zeros(()) if part is None else part for part in gradient]
        return [chosen.detach(), *parts]

    def _require_same(self, before: list[torch.Tensor], after: list[torch.Tensor]) -> None:
        if self._differ(before, after, math.sqrt(self._replay.epsilon)):
            raise PrivacyError(
                "the loss of a sample depends on other samples of its batch, so that clipping does "
                "not bound its influence: use a model that sees one sample at a time, a loss that "
                "compares it with its label only, and no mean over the batch"
            )

    def _differ(
        self, before: list[torch.Tensor], after: list[torch.Tensor], tolerance: float
    ) -> bool:
        if not _distance(before[:1], after[:1]) <= tolerance * norm_of(before[:1]):
            return True
        # 0 x infinity, of samples that do not count, is no difference.
        distance = _distance(before[1:], after[1:])
        return math.isfinite(distance) and distance > tolerance * norm_of(before[1:])


def _splits(rows: int) -> Iterator[tuple[list[int], list[int]]]:
    """Yield splits (kept, others) of row numbers; for all i != j, one split keeps i and not j."""
    for bit in range((rows - 1).bit_length()):
        parts = [[row for row in range(rows) if row >> bit & 1 == value] for value in (0, 1)]
        yield parts[0], parts[1]
        yield parts[1], parts[0]


def _replaced(leaves: list[torch.Tensor], kept: list[int], others: list[int]) -> list[torch.Tensor]:
    rows = list(range(len(leaves[0])))
    for place, other in enumerate(others):
        rows[other] = kept[place % len(kept)]
    return [leaf[rows] for leaf in leaves]


def _extreme(leaves: list[torch.Tensor], others: list[int], sign: float) -> list[torch.Tensor]:
    changed = []
    for leaf in leaves:
        leaf = leaf.clone()
        if leaf.is_floating_point():
            rows = leaf[others]
            # Probabilities and masks must remain in their range.
            is_fraction = bool(((leaf >= 0) & (leaf <= 1)).all())
            leaf[others] = 1 - rows.round() if is_fraction else rows * (sign * _EXTREME)
        changed.append(leaf)
    return changed


def dropouts_of(model: nn.Module) -> list[nn.Module]:
    """Return the modules that draw random numbers in training mode only."""
    return [m for m in model.modules() if isinstance(m, (_DropoutNd, nn.MultiheadAttention))]


@contextmanager
def evaluated(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Put modules, without their submodules, into ``eval()`` mode within the context."""
    modes = [(module, module.training) for module in modules]
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training


def norm_of(tensors: Sequence[torch.Tensor]) -> float:
    return math.hypot(*(float(torch.linalg.vector_norm(t.double())) for t in tensors))


def _distance(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> float:
    return norm_of([a.double() - b.double() for a, b in zip(one, other, strict=True)])

"""A check, throughout the training, that a sample has the gradient that it has alone."""

import math
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations, islice
from typing import Any

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils import _pytree as pytree

from comm_hooks.optim.private.data.tickets import Read
from comm_hooks.optim.private.errors import PrivacyError
from comm_hooks.optim.private.gradients.clipping import sample_norms
from comm_hooks.optim.private.gradients.neighbours import PER_BIT, neighbours
from comm_hooks.optim.private.random_states import Replay, random_states, random_states_kept

RATE = 64
"""One of so many batches is looked at, besides the first of each kind."""

_READINGS = 32
"""So often a sample is read that is not as in its batch, before it is no random one."""

# Roundings of coarser dtypes turn some activations off or on, and with them parts of a gradient.
_COARSE = 1e-4
# The number of samples from which on less passes, and the least part of it that does: roundings
# differ by a sixth of that.
_MANY, _LEAST = 64, 1 / 16
# Where nothing but samples beside it changes, and no rounding of its own.
_LEAST_REPLACED = 3e-4
# A difference of this part of a gradient may be rounding.
_ROUNDING = 0.25
# One of so many batches that are looked at has samples replaced.
_RARELY = 4
# The bits of a row's number distinguish every two of so many rows.
_MOST_ROWS = 8
# Neither the program's generators, whose numbers would change, nor numbers that others know.
_random = random.SystemRandom()


@dataclass(frozen=True)
class Alone:
    """A sample of a batch that was differentiated, alone or in the batch."""

    row: int
    loss: float
    gradient: list[torch.Tensor]


Differentiate = Callable[[Any, int], tuple[torch.Tensor, Sequence[torch.Tensor]]]
"""Returns losses, (B,), and gradients, (B, ...) per parameter, of a batch and its size."""


class AloneCheck:
    """Compares samples of a batch with themselves alone, before anything of it is released.

    Clipping bounds what a sample changes if its row of the per-sample gradients is the gradient of
    its own loss.  It is not if the loss depends on other samples, now or since a warm-up; if a
    layer's rows are in another order; if a weight is used where hooks do not look; or if the model
    keeps something of the samples before.  Nor does it if a data set or collate function computes
    something of the whole batch, such as the length that samples are padded to, and the model does
    not mask it.  All of that changes what a sample gives alone:

    1. some samples are read from the data set and collated again, each alone, and differentiated
       by an ordinary backward pass, the first of them once more after the others: two drawn at
       random, and of the first batch of a kind the first, the longest and the shortest one (by
       elements that are not zero, as padding is) and two that are equal;
    2. they must give the same gradients as in the batch, where they may be in another row, and the
       first one the same as before;
    3. of the first of these batches with two samples up to eight are differentiated together, with
       the same random numbers, after half of them were replaced by :func:`neighbours` of many
       kinds: the others must give the same gradients as before.

    1 and 2 are done with the first batch of every kind (dtypes, and shapes within a factor of two),
    and with one of :data:`RATE` others, drawn at random; with dropout, or if needed all modules, in
    ``eval()`` mode if passes draw random numbers.  A fourth of these batches has 3, too, with one
    replacement; all of them have it if the loss draws random numbers by itself, in place of 1 and
    2, and samples that are read again must then be among the rows of the batch, unless padded.

    A difference d of a gradient of norm n passes if d < 4 sqrt(eps) max(n, C), for the coarsest
    dtype that occurs; of B > 64 samples 64 / B times that, or a 16th.  So does a quarter of n, or
    of the batch's median, if it is rounding: if as many copies of the sample have the gradient that
    it has in the batch.  Of 16 bits (and TF32) half of the norm passes, unless the loss differs by
    4 sqrt(eps) or 3 shows it, in which 4 eps passes, or 0.0003.
    A leak in a share s of the rows, over all batches, is found after 32 / s batches in expectation.

    Args:
        model: the model that is trained.
        losses: returns the loss of each sample, (B,), of a batch and its number of samples.
        differentiate: returns losses and gradients of a batch's samples.
        parameters: the trainable parameters.
        max_grad_norm: returns C, the norm to which gradients are clipped.
        keeps_layers: whether modules with trainable parameters of their own stay in training mode,
            outside of which hooks do not see them.

    Not detected: dependence of a random model on the number of samples, in training mode only;
    dependence on other samples that neither the batches nor their replacements show; and a data
    set that gives random samples, whose rows are compared as they are in the batch.
    """

    def __init__(
        self,
        model: nn.Module,
        losses: Callable[[Any, int], torch.Tensor],
        differentiate: Differentiate,
        parameters: Sequence[nn.Parameter],
        max_grad_norm: Callable[[], float],
        *,
        keeps_layers: bool = False,
    ) -> None:
        self._model = model
        self._keeps_layers = keeps_layers
        self._losses = losses
        self._differentiate = differentiate
        self._parameters = parameters
        self._max_grad_norm = max_grad_norm
        self._kinds: set[Any] = set()
        self._is_comparable: bool | None = None
        self._has_replaced = False
        self._has_warned = False
        self._replay = Replay(parameters)
        self.modules: list[nn.Module] = []
        """The modules that are put into ``eval()`` mode to compare."""

    def differentiate(
        self, batch: Any, size: int, read: Read | None
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """Return losses and gradients of a batch, of which samples were compared if it is its turn.

        Args:
            batch: tensors with a common leading dimension.
            size: the number of samples.
            read: reads one of its samples again, as a batch of its own.

        Raises:
            PrivacyError: if a sample has another gradient alone, after others, or beside others.
        """
        leaves, structure = pytree.tree_flatten(batch)
        kind = tuple((leaf.dtype, *map(int.bit_length, leaf.shape)) for leaf in leaves)
        is_first = kind not in self._kinds
        if not is_first and _random.randrange(RATE):
            return self._differentiate(batch, size)
        rows = _random.sample(range(size), min(size, 2))
        if self._is_comparable is None:
            self._is_comparable = self._find_mode(self._sample(leaves, structure, rows[0], None))
        if is_first:
            rows = list(dict.fromkeys([*_outstanding(leaves), *rows]))
        samples = [self._sample(leaves, structure, row, read) for row in rows]
        self._warn_of_equal(samples)
        found: list[Alone] = []
        if self._is_comparable:
            with evaluated(self.modules):
                pairs = zip((*rows, rows[0]), (*samples, samples[0]), strict=True)
                found = [self._alone(sample, row) for row, sample in pairs]
            _require_same(self._differ(found[-1], found[0]))
        losses, gradients = self._differentiate(batch, size)
        if self._is_comparable:
            with evaluated(self.modules):
                again = self._differentiate(batch, size) if self.modules else (losses, gradients)
                self._compare(found[:-1], samples, leaves, structure, *again)
        else:
            _require_among(samples, leaves)
        if not (self._has_replaced and self._is_comparable) or not _random.randrange(_RARELY):
            self._replace_others(leaves, structure, gradients)
        if self._is_comparable is not None:
            self._kinds.add(kind)  # now, not before: a batch that failed may be tried again
        return losses, gradients

    def _compare(
        self,
        found: Sequence[Alone],
        samples: Sequence[Any],
        leaves: Sequence[torch.Tensor],
        structure: Any,
        losses: torch.Tensor,
        gradients: Sequence[torch.Tensor],
    ) -> None:
        """Raise ``PrivacyError`` if samples alone have another gradient than in a row.

        In their own row, or in any if collate functions have sorted them.
        """
        size = len(losses)
        for each, sample in zip(found, samples, strict=True):
            own = _row(each.row, losses, gradients)
            if not self._differ(each, own, size):
                continue
            row = pytree.tree_unflatten([leaf[each.row, None] for leaf in leaves], structure)
            if _equal(sample, row):
                copies = pytree.tree_map(
                    lambda leaf: leaf.expand(size, *leaf.shape[1:]).clone(), row
                )
                of_copy = _row(each.row, *self._differentiate(copies, size))
                typical = float(sample_norms([g.detach().float() for g in gradients]).nanmedian())
                is_rounding = not _differ(each, own, math.inf, _ROUNDING, typical)
                if is_rounding and not self._differ(of_copy, own, size):
                    continue
            else:
                pairs = zip(gradients, each.gradient, strict=True)
                squares = [
                    (g.detach() - one).float().square().flatten(1).sum(1) for g, one in pairs
                ]
                nearest = int(torch.stack(squares).sum(0).nan_to_num(torch.inf).argmin())
                if not self._differ(each, _row(nearest, losses, gradients), size):
                    continue
            raise PrivacyError(
                f"a sample has a gradient of norm {norm_of(each.gradient):g} alone, and of "
                f"{norm_of(own.gradient):g} in its batch, so it would be clipped wrongly: the "
                "loss of a sample may depend on this sample only, and not on the length that "
                "others are padded to; the data set and collate_fn may compute nothing of the "
                "whole batch, and must give the same sample again, in this process; and every "
                "layer must get the samples in the order of the batch, and use its weights itself"
            )

    def _replace_others(
        self, leaves: Sequence[torch.Tensor], structure: Any, gradients: Sequence[torch.Tensor]
    ) -> None:
        """Raise ``PrivacyError`` if samples change when others of their batch are replaced."""
        norms = sample_norms([gradient.detach().float() for gradient in gradients])
        finite = norms.isfinite().nonzero().flatten().tolist()
        if len(finite) < 2:
            return
        rows = torch.tensor(sorted(_random.sample(finite, min(len(finite), _MOST_ROWS))))
        few = [leaf[rows.to(leaf.device)] for leaf in leaves]
        replacements = neighbours(few)
        if self._has_replaced:
            place = _random.randrange(PER_BIT * (len(rows) - 1).bit_length())
            replacements = islice(replacements, place, place + 1)
        before = self._beside(few, structure)
        for kept, replaced in replacements:
            try:
                after = self._beside(replaced, structure)
            except PrivacyError:
                raise
            except Exception:
                continue  # a loss function may refuse extreme samples
            # As many samples and the same random numbers: with the same roundings.
            tolerance = max(4 * self._replay.epsilon, _LEAST_REPLACED)
            for row in kept:
                one, other = _row(row, *before), _row(row, *after)
                if _differ(one, other, tolerance, tolerance, self._max_grad_norm()):
                    raise PrivacyError(
                        "the loss of a sample depends on other samples of its batch, so that "
                        "clipping does not bound its influence: use a model that sees one sample "
                        "at a time, a loss that compares it with its label only, and no mean over "
                        "the batch"
                    )
        self._has_replaced = True

    def _beside(
        self, leaves: Sequence[torch.Tensor], structure: Any
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        with random_states_kept(self._replay.devices):
            batch = pytree.tree_unflatten(list(leaves), structure)
            return self._differentiate(batch, len(leaves[0]))

    def _sample(
        self, leaves: Sequence[torch.Tensor], structure: Any, row: int, read: Read | None
    ) -> Any:
        """Return a sample as a batch of its own: read again, or its row where that is random."""
        own = pytree.tree_unflatten([leaf[row : row + 1] for leaf in leaves], structure)
        if read is not None:
            with random_states_kept(self._replay.devices):
                before = random_states(self._replay.devices)
                one, again = read(row), read(row)
                if _equal(one, own):
                    return one
                pairs = zip(pytree.tree_leaves(one), pytree.tree_leaves(own), strict=True)
                is_padded = any(a.shape != b.shape for a, b in pairs)
                # A sample that is flipped by chance may come out alike a few times.
                is_sure = is_padded and random_states(self._replay.devices) == before
                more = range(0 if is_sure else _READINGS)
                if _equal(one, again) and all(_equal(one, read(row)) for _ in more):
                    return one
        return own

    def _warn_of_equal(self, samples: Sequence[Any]) -> None:
        """Warn, once, of equal samples; to refuse them would depend on private data."""
        if not self._has_warned and any(_equal(*pair) for pair in combinations(samples, 2)):
            self._has_warned = True
            warnings.warn(
                "two samples of a batch are equal: if both are of one person, they count twice, "
                "and epsilon is for one. Take every person's data into one sample",
                stacklevel=2,
            )

    def _find_mode(self, sample: Any) -> bool | None:
        """Find the modules whose ``eval()`` makes the loss of a sample deterministic.

        Returns:
            whether there are such modules; None if the sample's loss is not finite.
        """
        every = list(self._model.modules())
        if self._keeps_layers:
            every = [m for m in every if not any(p.requires_grad for p in m.parameters(False))]
        for modules in ([], dropouts_of(self._model), every):
            self.modules = modules
            with evaluated(modules):
                one, again = (self._alone(sample, 0) for _ in range(2))
            _require_same(self._differ(one, again))
            if not math.isfinite(norm_of(one.gradient)):
                return None
            # Not whether it changes: one that is rarely dropped may be in the next batch.
            if not self._replay.has_drawn:
                return True
        return False

    def _alone(self, sample: Any, row: int) -> Alone:
        with self._replay.once():
            loss = self._losses(sample, 1).sum()
            self._require_no_others(loss)
            gradient = [torch.zeros_like(parameter) for parameter in self._parameters]
            if loss.requires_grad:
                gradient = [*torch.autograd.grad(loss, self._parameters, materialize_grads=True)]
        return Alone(row, float(loss.detach()), gradient)

    def _require_no_others(self, loss: torch.Tensor) -> None:
        """Raise if a loss trains parameters outside of the model: no step clips or noises them."""
        known, seen = set(self._parameters), set()
        waiting = [loss.grad_fn]
        while waiting:
            node: Any = waiting.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            leaf = getattr(node, "variable", None)
            if isinstance(leaf, nn.Parameter) and leaf not in known:
                raise PrivacyError(
                    f"the loss depends on a parameter of shape {tuple(leaf.shape)} that is not in "
                    "the model, or was unfrozen: its gradient would be neither clipped nor noised. "
                    "Make one module of all that is trained, and freeze the rest"
                )
            waiting += [following for following, _ in node.next_functions]

    def _differ(self, one: Alone, other: Alone, size: int = 1) -> bool:
        """Return whether gradients differ in batches of this size."""
        # Of many samples, each of which might change by as much because of one.
        part = min(1.0, max(_MANY / size, _LEAST))
        tolerance = 4 * math.sqrt(self._replay.epsilon) * part
        if self._replay.epsilon > _COARSE:
            return _differ(one, other, tolerance, 0.5)
        return _differ(one, other, math.inf, tolerance, self._max_grad_norm())


def _differ(
    one: Alone, other: Alone, of_losses: float, of_gradients: float, least: float = 0.0
) -> bool:
    """Return whether losses or gradients differ by these parts of their norms, or of ``least``."""
    distance = abs(one.loss - other.loss)
    if math.isfinite(distance) and distance > of_losses * abs(one.loss):
        return True
    pairs = zip(one.gradient, other.gradient, strict=True)
    distance = norm_of([a.double() - b.double() for a, b in pairs])
    # 0 x infinity, of samples that do not count, is no difference.
    largest = max(norm_of(one.gradient), least)
    return math.isfinite(distance) and distance > of_gradients * largest + 1e-30


def _row(row: int, losses: torch.Tensor, gradients: Sequence[torch.Tensor]) -> Alone:
    return Alone(row, float(losses[row]), [gradient[row] for gradient in gradients])


def _outstanding(leaves: Sequence[torch.Tensor]) -> list[int]:
    """Return the first row, the longest and the shortest (padding is zero), and two equal ones."""
    matrix = torch.cat([leaf.reshape(len(leaf), -1).double().cpu() for leaf in leaves], dim=1)
    lengths = matrix.count_nonzero(1)
    weights = torch.rand(matrix.shape[1], generator=torch.Generator().manual_seed(0)).double()
    values, order = (matrix @ weights).sort()
    equal = [place for i in (values.diff() == 0).nonzero()[:1, 0] for place in order[i : i + 2]]
    return [int(row) for row in (0, lengths.argmax(), lengths.argmin(), *equal)]


def _equal(one: Any, other: Any) -> bool:
    """Return whether two batches are equal but for roundings."""
    pairs = zip(pytree.tree_leaves(one), pytree.tree_leaves(other), strict=True)
    return all(
        a.shape == b.shape and torch.allclose(a.double(), b.double(), rtol=1e-4, equal_nan=True)
        for a, b in pairs
    )


def _require_among(samples: Sequence[Any], leaves: Sequence[torch.Tensor]) -> None:
    """Raise ``PrivacyError`` for a sample that is no row of its batch; it may be padded there."""
    rows = [[leaf[row : row + 1] for leaf in leaves] for row in range(len(leaves[0]))]
    for sample in samples:
        pairs = zip(pytree.tree_leaves(sample), leaves, strict=True)
        is_padded = any(one.shape[1:] != leaf.shape[1:] for one, leaf in pairs)
        if not is_padded and not any(_equal(sample, row) for row in rows):
            raise PrivacyError(
                "a sample that is read alone is none of the rows of its batch: the data set and "
                "collate_fn may compute nothing of the whole batch"
            )


def _require_same(differs: bool) -> None:
    if differs:
        raise PrivacyError(
            "the gradient of a sample changes with the samples before it: let the model keep "
            "nothing of its inputs, in attributes of modules for instance, and draw random "
            "numbers from the default generators of torch, NumPy or Python"
        )


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

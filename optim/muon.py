"""Muon: steps along orthogonalized momenta; matrices of one shape are computed together."""

import math

import torch
from torch.optim.optimizer import ParamsT

from comm_hooks.optim.base import BatchedOptimizer, Group, Tensors, state_dtype, widened
from comm_hooks.optim.moments import zeros

_QUINTIC = (3.4445, -4.7750, 2.0315)
"""a, b, c of Jordan et al.'s polynomial a x + b x^3 + c x^5, steep near x = 0."""
_ITERATIONS = 5
_TINY = 1e-7
_RMS = 0.2
"""The root mean square of AdamW's steps, in learning rates (Liu et al., 2025, section 2.2)."""
_TOGETHER = 1 << 24
"""The largest number of elements in a batch of matrices, which bounds the memory."""


class Muon(BatchedOptimizer):
    r"""Muon: steps along orthogonalized momenta, with all singular values near one.

    With g the gradient of a matrix of n rows and k columns, and m = 0 at first:

    1. m = momentum m + (1 - momentum) g;
    2. u = momentum m + (1 - momentum) g, Nesterov's;
    3. o = :func:`orthogonalized` (u);
    4. theta = theta - lr (0.2 sqrt(max(n, k)) o + weight_decay theta).

    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks", 2024; the
    length of steps, equal to AdamW's, is that of Liu et al., "Muon is Scalable for LLM Training",
    2025, section 2.2.  The same as :class:`torch.optim.Muon` with
    ``adjust_lr_fn="match_rms_adamw"``, which goes through matrices one by one, iterates in bfloat16
    on CPUs as well, and is not in PyTorch 2.6 to 2.8.

    Args:
        params: matrices, named or not, or groups; a group may have its own value of any argument.
        lr: learning rate, on AdamW's scale.
        momentum: decay rate of m, in [0, 1).
        weight_decay: decoupled weight decay, as in AdamW.

    State per matrix: ``momentum_buffer`` (m) in float32.

    Raises:
        ValueError: for hyperparameters out of range, and for parameters that are no matrices.

    Not supported: sparse and complex gradients, a learning rate that is a tensor, sharded matrices.

    Example::

        >>> from comm_hooks.optim.muon import Muon
        >>> layer = torch.nn.Linear(8, 4, bias=False)
        >>> optimizer = Muon(layer.parameters(), lr=1e-3)
        >>> layer(torch.ones(1, 8)).square().sum().backward()
        >>> optimizer.step()
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        *,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})
        for parameter in self._parameters():
            if parameter.ndim != 2:
                shape = tuple(parameter.shape)
                raise ValueError(f"Muon: parameters must be matrices, got one of shape {shape}")

    def _update(self, parameters: Tensors, group: Group) -> None:
        momentum, lr = group["momentum"], group["lr"]
        dtype = state_dtype(parameters[0].dtype)
        momenta = zeros([self.state[p] for p in parameters], "momentum_buffer", parameters, dtype)
        gradients = widened([p.grad for p in parameters], momenta[0].dtype)
        torch._foreach_lerp_(momenta, gradients, 1 - momentum)
        steps = orthogonalized(list(torch._foreach_lerp(gradients, momenta, momentum)))
        lengths = [-lr * _RMS * math.sqrt(max(p.shape)) for p in parameters]
        torch._foreach_mul_(parameters, 1 - lr * group["weight_decay"])
        torch._foreach_mul_(steps, lengths)
        torch._foreach_add_(parameters, steps)


def orthogonalized(matrices: Tensors) -> Tensors:
    r"""Return matrices with the same singular vectors, and all singular values near one.

    By Newton and Schulz's iteration with a polynomial of degree five, which takes singular values
    above a hundredth of the Frobenius norm to between 0.68 and 1.14.  In bfloat16 on accelerators,
    in float32 on CPUs: bfloat16 is several times as slow on many.

    Args:
        matrices: matrices of one device and dtype, of any shapes; those of one shape, transposed or
            not, are computed together.

    Returns:
        New tensors in the order of ``matrices``, with their shapes and dtype.

    Example::

        >>> [once] = orthogonalized([torch.diag(torch.tensor([3.0, -0.5]))])
        >>> (0.6 < once.diag().abs()).all() and (once.diag().abs() < 1.3).all()
        tensor(True)
    """
    found: dict[int, torch.Tensor] = {}
    by_shape: dict[tuple[int, ...], list[int]] = {}
    for place, matrix in enumerate(matrices):
        by_shape.setdefault(tuple(sorted(matrix.shape)), []).append(place)
    for (rows, columns), places in by_shape.items():
        together = max(1, _TOGETHER // max(1, rows * columns))
        for start in range(0, len(places), together):
            part = places[start : start + together]
            members = [matrices[place] for place in part]
            lying = torch.stack([m if m.shape == (rows, columns) else m.T for m in members])
            for place, matrix, result in zip(part, members, _iterate(lying), strict=True):
                whole = result if matrix.shape == result.shape else result.T
                found[place] = whole.to(matrix.dtype)
    return [found[place] for place in range(len(matrices))]


def _iterate(matrices: torch.Tensor) -> torch.Tensor:
    """Orthogonalize matrices of shape (count, rows, columns), of no more rows than columns."""
    a, b, c = _QUINTIC
    x = matrices.to(torch.float32 if matrices.is_cpu else torch.bfloat16)
    x = x / torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True).clamp(min=_TINY)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x

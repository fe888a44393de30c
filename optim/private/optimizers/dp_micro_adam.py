"""Adam on noised gradients in less than one byte per parameter."""

import torch
from torch.optim.optimizer import ParamsT

from comm_hooks.compressors.base import Compressor
from comm_hooks.compressors.identity import Identity
from comm_hooks.compressors.quantize import Quantize
from comm_hooks.compressors.sparse import TopK, require_selection
from comm_hooks.optim.base import Group, Tensors
from comm_hooks.optim.moments import count_step, descend_, values
from comm_hooks.optim.private.optimizers.dp_adam import MomentsOptimizer
from comm_hooks.optim.published.micro_adam import BATCH
from comm_hooks.optim.published.sparse_window import SparseWindow
from comm_hooks.randomness import Draw, derive_keys
from comm_hooks.requirements import require_choice, require_positive

_RESIDUALS: dict[int, Compressor] = {4: Quantize(bits=4, stochastic=True), 32: Identity()}
"""The compressor in which the residual is stored, by ``residual_bits``."""


class DPMicroAdam(MomentsOptimizer):
    r"""Adam on the largest elements of the noised gradient, in less than one byte per parameter.

    Instead of moments it keeps the last ``window`` sparsified gradients and the residual e in 4
    bits (Q: rounding to them).  With g the noised mean of clipped gradients in ``p.grad``, in step
    t and for one parameter:

    1. a = g + Q^-1(e);
    2. V = the ``ceil(density x block)`` elements of a of largest magnitude in each block, the
       others zero; it takes the place of the oldest row of the window;
    3. e = Q(a - V): 4 bits per element between the extremes of its block of 256, rounded at random
       without bias;
    4. m_hat = (sum over rows of beta1^age V) / (sum of beta1^age), age = 0 for the newest row;
       v_hat = (sum over rows of beta2^age V^2) / (sum of beta2^age), the sums of powers being over
       the rows, or with ``bias_correction="published"`` over all t steps;
    5. theta = (1 - lr weight_decay) theta - lr m_hat / (sqrt(v_hat) + eps).

    The fewer elements are kept, the more noise collects in e.  With gradients of noise alone, of
    standard deviation s, that of e settles at 4.7 s with a density of 1 % (after 200 steps), at
    14 s with 0.3 % (1000 steps) and at 47 s with 0.1 % (2000 steps).

    Parameters of at most one dimension or with fewer than ``min_numel`` elements are left to
    :class:`~comm_hooks.optim.private.DPAdam`.

    The gradient must be dense and the same on all ranks, which then compute the same step: the
    rounding is drawn from t and the parameter's place in the optimizer.  Nothing is exchanged and
    no rank has a residual of its own, so the window and the residual may be saved and shown; for a
    MicroAdam that compresses messages see :class:`~comm_hooks.optim.MicroAdam`.

    Source: Hudisteanu, Cyffers & Kalinin, "DP-MicroAdam: Private and Frugal Algorithm for Training
    and Fine-tuning", Algorithms 1 and 2; MicroAdam is Modoranu et al., NeurIPS 2024.  What differs:

    * Step 3 rounds without bias, as the paper's Assumption 3 has it.  Its procedure Q rounds to the
      nearest; its code keeps e in float32, and dense buffers beside it.
    * Step 4 corrects the bias for the rows that are in the window, so that a gradient that does not
      change moves parameters by lr.  Their 1 - beta^t counts gradients that have left it: their
      steps are (1 - beta1^w) sqrt(1 - beta2^t) / ((1 - beta1^t) sqrt(1 - beta2^w)) times ours, with
      w rows in the window; with the defaults 2.01 at t = 100, 5.19 at 1000, and 6.53 in the end.
      To repeat their runs, take ``bias_correction="published"``.
    * Blocks of ``block_size`` are sparsified one by one; their code does so with whole tensors.
    * Their code divides the gradient by the size of the batch that was drawn, which the accountant
      does not cover; here the divisor is the engine's, and public.

    The convergence proof is for Algorithm 3, with all gradients in the moments, AMSGrad's maximum,
    and eps inside the root: neither the paper's Algorithm 1 nor this class has those.

    Args:
        params, lr, betas, eps, weight_decay: see
            :class:`~comm_hooks.optim.private.NoisedOptimizer`.
        density: the fraction of elements that is kept of each block, in (0, 1].
        window: the number of rows of the window, at least 1.
        bias_correction: ``"window"`` or ``"published"``, see step 4.
        value_bits: the bits of each value in the window: 4, 16 (bfloat16) or 32 (float32).  The
            rounding error goes into the residual.
        residual_bits: the bits of each element of the residual: 4, or 32 (float32), not rounded.
        block_size: the number of elements of the largest block, 1 to 65536.
        min_numel: the number of elements below which parameters have dense moments.

    State per parameter that is sparsified: ``step``, ``window``, uint8 (window, bytes of a row),
    and ``residual``, uint8; per other parameter that of ``DPAdam``.  A checkpoint brings its
    ``density``, ``window`` and so on along, as it does the learning rate.

    Bytes per parameter of a large matrix with the defaults: 0.53 for the residual (4 with
    ``residual_bits=32``), and 0.17, 0.31 or 0.51 for the window with 4, 16 or 32 ``value_bits``.  A
    step also takes some float32 copies of at most ``BATCH`` elements, or of one parameter.

    Not supported: AMSGrad.  A gradient that is not finite would stay in the residual.

    Example::

        >>> from comm_hooks.optim.private import DPMicroAdam
        >>> optimizer = DPMicroAdam(model.named_parameters(), lr=1e-3, density=0.05, min_numel=64)
        >>> for p in model.parameters():  # the engine does this
        ...     p.grad = 0.01 * torch.randn_like(p)
        >>> optimizer.step()
        >>> optimizer.state[model.weight]["window"].dtype
        torch.uint8
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        density: float = 0.01,
        window: int = 10,
        bias_correction: str = "window",
        value_bits: int = 16,
        residual_bits: int = 4,
        block_size: int = 4096,
        min_numel: int = 1024,
    ) -> None:
        super().__init__(
            params,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            density=density,
            window=window,
            bias_correction=bias_correction,
            value_bits=value_bits,
            residual_bits=residual_bits,
            block_size=block_size,
            min_numel=min_numel,
        )

    def _check_group(self, settings: Group) -> None:
        super()._check_group(settings)
        require_selection(self, settings["density"], settings["block_size"], settings["value_bits"])
        require_choice(self, "value_bits", settings["value_bits"], (4, 16, 32))
        require_choice(self, "residual_bits", settings["residual_bits"], tuple(_RESIDUALS))
        require_positive(self, "window", settings["window"])
        require_choice(
            self, "bias_correction", settings["bias_correction"], ("window", "published")
        )
        require_positive(self, "min_numel", settings["min_numel"])

    def _move(self, x: Tensors, gradients: Tensors, parameters: Tensors, group: Group) -> None:
        dense: list[int] = []
        batches: dict[tuple[int, int], list[int]] = {}
        for index, parameter in enumerate(parameters):
            numel = parameter.numel()
            if parameter.dim() <= 1 or numel < group["min_numel"]:
                dense.append(index)
                continue
            state = self.state[parameter]
            if not state:
                octets = torch.zeros(0, dtype=torch.uint8, device=parameter.device)
                state["step"] = torch.tensor(0.0, dtype=torch.float32)
                state["window"] = octets.new_zeros(group["window"], _code(numel, group).nbytes)
                # All zero, it stands for zeros.
                nbytes = _RESIDUALS[group["residual_bits"]].payload_nbytes(numel)
                state["residual"] = octets.new_zeros(nbytes)
            batches.setdefault((numel, int(state["step"])), []).append(index)

        def of(places: list[int]) -> tuple[Tensors, Tensors, Tensors]:
            chosen = [[every[place] for place in places] for every in (x, gradients, parameters)]
            return chosen[0], chosen[1], chosen[2]

        if dense:
            super()._move(*of(dense), group)
        for (numel, steps), members in batches.items():
            count = max(1, BATCH // numel)
            for first in range(0, len(members), count):
                self._move_sparsified(*of(members[first : first + count]), steps, group)

    def _move_sparsified(
        self, x: Tensors, gradients: Tensors, members: Tensors, steps: int, group: Group
    ) -> None:
        """Update parameters of equal ``numel`` and equal ``steps`` by the class's algorithm."""
        states = [self.state[p] for p in members]
        windows, residuals = values(states, "window"), values(states, "residual")
        code, residual = _code(members[0].numel(), group), _RESIDUALS[group["residual_bits"]]
        a = torch.stack([gradient.flatten().float() for gradient in gradients])
        residual.decode(a, torch.stack(residuals), Draw((0,) * len(a)), add=True)

        rows = code.encode(a)
        places, kept = code.decode(rows)
        torch._foreach_copy_([window[steps % len(window)] for window in windows], list(rows))
        a.scatter_add_(1, places, -kept)
        place = {parameter: str(index) for index, parameter in enumerate(self._parameters())}
        keys = derive_keys(0, steps, tuple(place[member] for member in members))
        coded = residual.encode(a, Draw(keys)).view(torch.uint8)
        torch._foreach_copy_(residuals, list(coded))
        del a, coded

        count_step(states)
        betas, eps = group["betas"], group["eps"]
        update = code.directions(windows, steps + 1, betas, eps, group["bias_correction"])
        shaped = [u.view(p.shape) for u, p in zip(update.to(x[0].dtype), members, strict=True)]
        descend_(x, shaped, group)


def _code(numel: int, group: Group) -> SparseWindow:
    top_k = TopK(group["density"], group["block_size"], group["value_bits"])
    return SparseWindow.of(top_k, numel, ranks=1)

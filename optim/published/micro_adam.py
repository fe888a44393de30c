"""MicroAdam: Adam with moments that are rebuilt in each step from the last few sparse gradients."""

import torch
from torch.optim.optimizer import ParamsT

from comm_hooks.compressors.sparse import TopK
from comm_hooks.exchange import Exchange
from comm_hooks.memory.error_feedback import ErrorFeedback
from comm_hooks.optim.base import Group, Tensors, block, held
from comm_hooks.optim.exchanging import ExchangingOptimizer
from comm_hooks.optim.moments import adamw_, averages_, count_step, descend_, prepared, values
from comm_hooks.optim.published.sparse_window import SparseWindow
from comm_hooks.requirements import require_choice, require_positive

# Elements that are rebuilt at a time: 12 bytes of temporary memory each.
BATCH = 1 << 24
Pair = tuple[torch.Tensor, torch.Tensor]
"""A parameter and the mean message for it."""


class MicroAdam(ExchangingOptimizer):
    r"""Adam in less than one byte per parameter: it keeps the last few sparse messages.

    MicroAdam (Modoranu et al., NeurIPS 2024, algorithm 1) keeps no moments, only the last
    ``window`` sparsified gradients and the residual, in 4 bits.  There the gradient is exact and
    sparsified to save memory; here each rank sparsifies its own gradient, and only the sparse
    vectors are sent.  Per step and parameter:

    1. each rank adds its gradient and residual: a_i = g_i + e_i;
    2. each rank sends T_i, the largest elements of each block of a_i, and keeps e_i = Q(a_i - T_i)
       (:class:`~comm_hooks.TopK` and :class:`~comm_hooks.memory.ErrorFeedback`);
    3. V = the exchange's mean of T_i takes the place of the oldest row of the window;
    4. m = (sum over rows of beta1^age V) / (sum of beta1^age), age = 0 for the newest row;
       v = (sum over rows of beta2^age V^2) / (sum of beta2^age), the sums of powers being over the
       rows, or with ``bias_correction="published"`` over all t steps;
    5. theta = (1 - lr weight_decay) theta - lr m / (sqrt(v) + eps).

    Differences to the authors' code: step 4 corrects the bias for the rows in the window, where
    theirs divides by 1 - beta^t, as if all t gradients were there; with ``window=10`` and the
    default betas their steps are 3.75 times as large at t = 400 and in the end (1 - beta1^10) /
    sqrt(1 - beta2^10) = 6.53 times: to repeat their runs, take ``bias_correction="published"``.
    Their residual is rounded to nearest; ``ErrorFeedback(bits=4, stochastic=True)`` rounds without
    bias, as their theory assumes.  Places take 2 + log2(1/density) bits instead of 16.

    Exempt parameters are averaged densely and have Adam's ordinary moments.

    Args:
        params, lr, betas, eps, weight_decay: see
            :class:`~comm_hooks.optim.exchanging.ExchangingOptimizer`.
        exchange: an exchange with TopK, error feedback (``bits=4`` to save memory), and
            ``collective="all_gather"`` or ``"sharded"``.
        window: the number of rows of the window, at least 1.
        bias_correction: ``"window"`` or ``"published"``, see step 4.

    State per compressed parameter: ``step`` and ``window``, uint8 (window, bytes of a row); per
    exempt parameter ``step``, ``exp_avg``, ``exp_avg_sq``.

    Bytes per parameter at density 1 %, ``window=10`` and N ranks, with 4-bit residuals:

    ===========================================  ========  =========  =========  ======
    exchange                                     window    residual   of shard   in all
    ===========================================  ========  =========  =========  ======
    ``value_bits=4``, N = 1                      0.17      0.53                  0.70
    ``value_bits=16``, N = 1                     0.31      0.53                  0.84
    ``"sharded"``, ``value_bits=4``, N = 2       0.17      0.53       0.27       0.96
    ``"sharded"``, ``value_bits=16``, N = 2      0.31      0.53       0.27       1.10
    ``"all_gather"``, ``value_bits=16``, N = 2   0.59      0.53                  1.12
    ===========================================  ========  =========  =========  ======

    All-gathered, the mean of N ranks has up to N times as many elements as one rank sends; there is
    room for all of them, in which values are rounded to bfloat16 unless ``value_bits=32``.  Not
    counted is the temporary memory of a step: float32 copies of the gradients, the exchange's
    workspace, and the moments of at most ``BATCH`` elements, or one parameter, at a time.

    Cost: rebuilding the moments scatters ``window`` x density elements per parameter.

    Not supported: compressors but TopK, ``granularity="bucket"``, ``collective="auto"``, AMSGrad.

    Example::

        >>> from comm_hooks import skip_hook
        >>> ddp_model.register_comm_hook(None, skip_hook)
        >>> exchange = Exchange(
        ...     TopK(density=0.01, value_bits=4), ErrorFeedback(bits=4, stochastic=True), "sharded"
        ... )
        >>> optimizer = MicroAdam(ddp_model.named_parameters(), exchange, lr=1e-3)
    """

    published = block(
        compressor="topk",
        density=0.01,
        value_bits=4,
        memory={"type": "error_feedback", "bits": 4, "stochastic": True},
        collective="sharded",
    )
    needs = ("memory", "collective")

    def __init__(
        self,
        params: ParamsT,
        exchange: Exchange,
        *,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        window: int = 10,
        bias_correction: str = "window",
    ) -> None:
        require_positive(self, "window", window)
        require_choice(self, "bias_correction", bias_correction, ("window", "published"))
        super().__init__(
            params,
            exchange,
            {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay},
            window=window,
            bias_correction=bias_correction,
        )
        granularity = exchange.settings.granularity
        if not isinstance(exchange.compressor, TopK) or granularity != "parameter":
            raise ValueError(
                "MicroAdam: the exchange must have TopK with granularity 'parameter', got "
                f"{exchange.compressor} with granularity {granularity!r}"
            )
        if exchange.memory is not None and not isinstance(exchange.memory, ErrorFeedback):
            raise ValueError(
                f"MicroAdam: memory must be ErrorFeedback (or None), got {exchange.memory}"
            )
        if exchange.settings.collective not in ("all_gather", "sharded"):
            raise ValueError(
                "MicroAdam: collective must be 'all_gather' or 'sharded', on which the size of the "
                f"window depends, got {exchange.settings.collective!r}"
            )
        self.window = window
        self.bias_correction = bias_correction

    def _step(self, gradients: Tensors) -> None:
        self._prepare_states()
        if not self._average(self._named(gradients)):
            return
        for own, group in self._groups():
            exempt: list[Pair] = []
            by_length: dict[int, list[Pair]] = {}
            for parameter, aggregate in zip(held(group), gradients[own], strict=True):
                is_exempt = self.exchange.settings.exempts(parameter.shape)
                members = exempt if is_exempt else by_length.setdefault(parameter.numel(), [])
                members.append((parameter, aggregate))
            if exempt:
                self._update_exempt(exempt, group)
            for numel, members in by_length.items():
                count = max(1, BATCH // numel)
                for first in range(0, len(members), count):
                    self._update_compressed(members[first : first + count], numel, group)

    def _update_compressed(self, members: list[Pair], numel: int, group: Group) -> None:
        """Update parameters of ``numel`` elements each: store means, rebuild m and v, and step."""
        parameters = [parameter for parameter, _ in members]
        code = self._code(numel)
        states = [self.state[p] for p in parameters]
        windows = values(states, "window")
        count_step(states)
        t = int(states[0]["step"])
        octets = code.encode(torch.stack([aggregate.flatten() for _, aggregate in members]))
        torch._foreach_copy_([w[(t - 1) % self.window] for w in windows], list(octets))
        update = code.directions(windows, t, group["betas"], group["eps"], self.bias_correction)
        shaped = [u.view(p.shape) for u, p in zip(update, parameters, strict=True)]
        descend_(parameters, shaped, group)

    def _update_exempt(self, members: list[Pair], group: Group) -> None:
        states = [self.state[parameter] for parameter, _ in members]
        count_step(states)
        m, v = averages_(states, [aggregate for _, aggregate in members], group["betas"])
        adamw_([parameter for parameter, _ in members], m, v, group, int(states[0]["step"]))

    def _code(self, numel: int) -> SparseWindow:
        exchange = self.exchange
        assert isinstance(exchange.compressor, TopK)
        return SparseWindow.of(
            exchange.compressor,
            numel,
            exchange.transport.world_size,
            sharded=exchange.settings.collective == "sharded",
        )

    def _prepare_states(self) -> None:
        """Make missing states, and raise ``ValueError`` for a loaded window of another shape."""
        nbytes: dict[int, int] = {}
        for parameter in self._parameters():
            state = self.state[parameter]
            if self.exchange.settings.exempts(parameter.shape):
                prepared([state], [parameter], torch.float32, "exp_avg", "exp_avg_sq")
                continue
            numel = parameter.numel()
            if numel not in nbytes:
                nbytes[numel] = self._code(numel).nbytes
            shape = (self.window, nbytes[numel])
            if not state:
                state["step"] = torch.tensor(0.0, dtype=torch.float32)
                state["window"] = torch.zeros(shape, dtype=torch.uint8, device=parameter.device)
            elif state["window"].shape != shape:
                raise ValueError(
                    f"MicroAdam: a loaded window has the shape {tuple(state['window'].shape)}, but "
                    f"{shape} is needed: it was saved with other settings or another number of "
                    "ranks"
                )

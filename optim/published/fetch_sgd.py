"""FetchSGD: ranks send sketches of gradients; momentum and residual are sketches as well."""

import math

import torch
from torch.optim.optimizer import ParamsT

from comm_hooks.compressors.identity import Identity
from comm_hooks.compressors.sketch import CountSketch
from comm_hooks.compressors.sparse import RandomK
from comm_hooks.exchange import Exchange
from comm_hooks.optim.base import Tensors, block, held
from comm_hooks.optim.exchanging import ExchangingOptimizer
from comm_hooks.optim.moments import decay_, momentum_, zeros
from comm_hooks.randomness import derive_key, fork_all
from comm_hooks.requirements import require_flag, require_positive, require_within

# Far more than a median needs; each takes as much memory as a sketch of one.
_MOST_ROWS = 1000
# Travels with the exempt gradients, under a name that no parameter has.
SKETCH = "<sketch of all gradients>"


class FetchSGD(ExchangingOptimizer):
    r"""Top-k SGD with momentum; ranks send sketches of gradients, and keep no residuals.

    FetchSGD (Rothchild et al., ICML 2020, algorithm 1).  All parameters that are not exempt are one
    vector w of d elements.  sk is the exchange's compressor, unsk its decompression, with one key
    for all steps, because momentum S_u and error S_e, zero at first, are sketches.  Per step:

    1. each rank sends the sketch of its gradient; S = mean_i sk(g_i), exactly, since sk is linear;
    2. S_u = momentum S_u + S;
    3. S_e = S_e + lr S_u;
    4. Delta = the ceil(density d) largest elements of unsk(S_e);
    5. S_e = S_e - sk(Delta); with ``masking`` instead S_e = S_u = 0 wherever sk(Delta) is not 0;
    6. w = (1 - lr weight_decay) w - Delta.

    With ``rows`` r, sk is r independent sketches, and unsk is the median of their estimates.

    Exempt parameters are averaged exactly and take steps of SGD with the same momentum.

    What to choose: step 5 as published can diverge, as its authors say in their code, which masks.
    In a Count-Sketch of one row all elements of a cell have the same estimate; they are among the
    largest together, and subtracting all of them overshoots.  With one row that diverges whatever
    the ratio, masking gets stuck, and both are refused.  With 3 or 5 rows subtracting still needs a
    sketch that is large in comparison with ``density``, masking does not.  But masking forgets the
    momentum of the sent elements, so that steps are up to 1/(1 - momentum) times shorter.  Where
    the sketch is exact (Identity, CountSketch(ratio=1)), this is u = momentum u + g, e = e + lr
    u, Delta = top-k(e), e = e - Delta.

    Differences to the authors' code: the learning rate is applied in step 3, as in the paper, not
    to Delta; cells are hashed by rotations (:class:`~comm_hooks.CountSketch`); for an even number
    of rows the median is the mean of the middle two; the weight decay is decoupled.

    Args:
        params, lr, momentum, weight_decay: see
            :class:`~comm_hooks.optim.exchanging.ExchangingOptimizer`; groups share ``lr`` and
            ``momentum``, since they share a sketch.
        exchange: an exchange with CountSketch, SRHT, GaussianSketch or Identity, and memory=None.
        density: the fraction of elements that is updated in a step, in (0, 1].
        rows: the number of independent sketches of ``ratio`` each; 3 or 5 for CountSketch.
        masking: whether step 5 zeroes the touched cells; for CountSketch and Identity.

    State: of the first parameter that is not exempt ``sketch_momentum`` (S_u) and ``sketch_error``
    (S_e), float32 (rows, width of a sketch); of each exempt parameter ``momentum_buffer``.

    Cost: one all-reduce per step, whatever the exchange's ``collective`` and ``exempt_bits`` are.
    Temporary memory: rows + 3 float32 per element.

    Example::

        >>> from comm_hooks import skip_hook
        >>> ddp_model.register_comm_hook(None, skip_hook)
        >>> optimizer = FetchSGD(
        ...     ddp_model.named_parameters(), Exchange(CountSketch(ratio=0.01)), lr=0.1,
        ...     density=0.002, rows=5, masking=True,
        ... )
    """

    _grows = False

    published = block(compressor="count_sketch", ratio=0.01)

    def __init__(
        self,
        params: ParamsT,
        exchange: Exchange,
        *,
        lr: float,
        momentum: float = 0.9,
        density: float,
        rows: int = 5,
        masking: bool = False,
        weight_decay: float = 0.0,
    ) -> None:
        require_within(self, "density", density, "(0, 1]")
        require_positive(self, "rows", rows)
        require_within(self, "rows", rows, f"[1, {_MOST_ROWS}]")
        require_flag(self, "masking", masking)
        super().__init__(
            params,
            exchange,
            {"lr": lr, "momentum": momentum, "weight_decay": weight_decay},
            density=density,
            rows=rows,
            masking=masking,
        )
        _check_sketch(exchange, rows, masking)
        self.density = density
        self.rows = rows
        self.masking = masking
        # One key for all steps: sketches of different steps are added up.
        key = derive_key(exchange.settings.seed, 0, SKETCH)
        self._keys = fork_all([key], range(rows))[:, 0].tolist()

    def _step(self, gradients: Tensors) -> None:
        lr, momentum = self._shared("lr"), self._shared("momentum")
        named = self._named(gradients)
        exempt = {n: g for n, g in named.items() if self.exchange.settings.exempts(g.shape)}
        sketched = [g.flatten() for n, g in named.items() if n not in exempt]
        message = exempt
        if sketched:
            vector = torch.cat(sketched)
            sketch = self._sketch(vector)
            u, e = self._sketch_state(sketch)
            # One-dimensional, and by compress=False it travels exactly in any case.
            message = {SKETCH: sketch.flatten(), **exempt}
        if not self._average(message, compress=False):
            return
        for _, group in self._groups():
            decay_(held(group), group)
        if sketched:
            u.mul_(momentum).add_(message[SKETCH].view_as(u))
            e.add_(u, alpha=lr)
            delta = self._largest(e, vector.numel())
            self._remove(delta, u, e)
            targets = self._sketched()
            pieces = delta.split([p.numel() for p in targets])
            shaped = [d.view(p.shape) for d, p in zip(pieces, targets, strict=True)]
            torch._foreach_sub_(targets, shaped)
        if exempt:
            self._update_exempt(list(exempt.values()), lr, momentum)

    def _largest(self, sketches: torch.Tensor, numel: int) -> torch.Tensor:
        """Return Delta of step 4, a dense vector: the largest elements of unsk(``sketches``)."""
        decompress = self.exchange.compressor.decompress
        rows = zip(sketches, self._keys, strict=True)
        estimate = median([decompress(sketch, numel, key=key) for sketch, key in rows])
        places = estimate.abs().topk(math.ceil(self.density * numel), sorted=False).indices
        return torch.zeros_like(estimate).index_copy_(0, places, estimate[places])

    def _remove(self, delta: torch.Tensor, u: torch.Tensor, e: torch.Tensor) -> None:
        """Remove Delta from the momentum and error sketches in place (step 5 of the class)."""
        sent = self._sketch(delta)
        if self.masking:
            touched = sent != 0
            u.masked_fill_(touched, 0)
            e.masked_fill_(touched, 0)
        else:
            e.sub_(sent)

    def _sketched(self) -> Tensors:
        return [p for p in self._parameters() if not self.exchange.settings.exempts(p.shape)]

    def _sketch_state(self, sketch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sketches of momentum and error, S_u and S_e; zeros in the first step."""
        state = self.state[self._sketched()[0]]
        for key in ("sketch_momentum", "sketch_error"):
            if key not in state:
                state[key] = torch.zeros_like(sketch)
            elif state[key].shape != sketch.shape:
                raise ValueError(
                    f"FetchSGD: the loaded {key} has the shape {tuple(state[key].shape)}, but "
                    f"{tuple(sketch.shape)} is needed: saved with another ratio, rows or model"
                )
        return state["sketch_momentum"], state["sketch_error"]

    def _update_exempt(self, gradients: Tensors, lr: float, momentum: float) -> None:
        parameters = [p for p in self._parameters() if self.exchange.settings.exempts(p.shape)]
        buffers = zeros([self.state[p] for p in parameters], "momentum_buffer", gradients)
        torch._foreach_add_(parameters, momentum_(buffers, gradients, momentum), alpha=-lr)

    def _sketch(self, vector: torch.Tensor) -> torch.Tensor:
        compressor = self.exchange.compressor
        return torch.stack([compressor.compress(vector, key=key) for key in self._keys])

    def _shared(self, name: str) -> float:
        values = {group[name] for group in self.param_groups}
        if len(values) > 1:
            raise ValueError(
                f"FetchSGD: parameter groups share one sketch and need the same {name}, got "
                f"{sorted(values)}"
            )
        return values.pop()


def median(estimates: list[torch.Tensor]) -> torch.Tensor:
    """Return the median of tensors, element by element; of an even number the middle two's mean.

    Overwrites the tensors.  A sorting network (odd-even transposition) of whole tensors takes a
    quarter of the time of ``torch.median``, which reads rows that lie far apart in memory.
    """
    count = len(estimates)
    spare = torch.empty_like(estimates[0])
    for turn in range(count):
        for index in range(turn % 2, count - 1, 2):
            low, high = estimates[index : index + 2]
            torch.minimum(low, high, out=spare)
            torch.maximum(low, high, out=high)
            estimates[index], spare = spare, low
    if count % 2:
        return estimates[count // 2]
    return torch.lerp(estimates[count // 2 - 1], estimates[count // 2], 0.5)


def _check_sketch(exchange: Exchange, rows: int, masking: bool) -> None:
    compressor = exchange.compressor
    if not compressor.linear or isinstance(compressor, RandomK):
        raise ValueError(
            "FetchSGD: the exchange needs a linear sketch with which every element can be seen in "
            f"every step: CountSketch, SRHT, GaussianSketch or Identity(32); got {compressor}"
        )
    if exchange.memory is not None:
        raise ValueError(
            f"FetchSGD: errors are kept in the sketch; use memory=None, not {exchange.memory}"
        )
    if isinstance(compressor, CountSketch) and compressor.ratio < 1 and rows == 1:
        raise ValueError(
            "FetchSGD: a Count-Sketch of one row, whatever its ratio, cannot tell the elements of "
            "a cell apart and diverges; use rows=3 or rows=5"
        )
    if masking and not isinstance(compressor, CountSketch | Identity):
        raise ValueError(
            f"FetchSGD: masking=True would clear all of the sketch, since {compressor} mixes all "
            "elements into each number; use CountSketch, or masking=False"
        )

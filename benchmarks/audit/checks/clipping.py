"""Is the contribution of a sample to a sum bounded, for any sample in any batch?"""

import math

import numpy as np
import torch
from torch import nn

from benchmarks.audit.configuration import Stages
from benchmarks.audit.world import Shapes, user_seed
from comm_hooks.optim.private.gradients.clipping import ClippedGradients

_SMALL: Shapes = {
    "stem.weight": (4, 3, 2, 2),
    "stem.bias": (4,),
    "scale": (1,),
    "block.weight": (12, 10),
    "mix.weight": (3, 2, 5),
    "head.weight": (6, 7),
}
_LARGE: Shapes = {"embedding.weight": (300, 240), "norm.weight": (5,), "head.weight": (10, 8)}
_DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.float64, torch.float16)
_SIZES = (0.0, 0.5, 0.999, 1.01, 1.5, 3.0, 12.0, 70.0, 150.0, 1.2e3, 2e4, 1e6, 1e12, 1e30)
_NOT_FINITE = (math.inf, math.nan)
_OTHERS = (0, 1, 2, 3, 4, 7, 15, 31, 70, 200)
_DIRECTIONS = {
    "dense": "all coordinates",
    "even": "all parameters evenly",
    "equal": "all coordinates equally",
    "elements": "one element of each parameter",
    "parameter": "all of one parameter",
    "element": "one element of one parameter",
}
_STEPS = 22
_STEPS_LARGE = 16
_WORLDS = 4
# The effect of rounding in float32 and smaller types on a norm.
_SLACK = 1e-3


def audit_clipping(stages: Stages) -> tuple[float, list[str]]:
    """Add samples to batches and compare clipped sums, which may change by C at most.

    Samples point along all coordinates, one parameter or one element, and are from half of C to
    1e30 C long, or not finite; the others, of 0 to 200, point the same way or the opposite one.
    Batches are passed whole or in parts, in models of several dtypes.  Two clippers take the same
    steps, one of them with the sample in three steps of four: a difference in the fourth comes
    from state that clipping keeps.

    Returns:
        The largest change of a clipped sum by one sample, over C (the claim is 1), and the faults,
        one line each.
    """
    rng = np.random.default_rng()
    worst, remembered = (0.0, ""), (0.0, "")
    for number, dtype in enumerate(_DTYPES * _WORLDS):
        is_large = number == 0
        pair = _Pair(stages, _LARGE if is_large else _SMALL, dtype)
        for step in range(_STEPS_LARGE if is_large else _STEPS):
            batch, sample, what = pair.invent(rng, 7 if is_large else 200)
            is_in = step % 4 != 3
            change = pair.change(rng, batch, sample if is_in else None)
            where = f"step {step + 1} of a {str(dtype).split('.')[1]} model"
            found = change / stages.configuration.max_grad_norm
            if is_in:
                worst = max(worst, (found, f"{what}, {where}"))
            else:
                remembered = max(remembered, (found, where))
        if worst[0] > 1 + _SLACK:
            break  # one fault is enough
    problems = []
    if worst[0] > 1 + _SLACK:
        problems.append(
            f"one sample changes a clipped sum by {worst[0]:.3g} C, and the noise is made for C: "
            "clip every sample's gradient separately, by its norm over all parameters "
            f"({worst[1]})"
        )
    if remembered[0] > _SLACK:
        problems.append(
            f"a sample of earlier steps changes a clipped sum by {remembered[0]:.3g} C: clipping "
            f"must keep no state from step to step ({remembered[1]})"
        )
    return worst[0], problems


class _Canary(nn.Module):
    """A model for which the gradient of each sample is the sample."""

    def __init__(self, shapes: Shapes, dtype: torch.dtype) -> None:
        super().__init__()
        for name, shape in shapes.items():
            module: nn.Module = self
            *path, last = name.split(".")
            for part in path:
                if not hasattr(module, part):
                    module.add_module(part, nn.Module())
                module = getattr(module, part)
            module.register_parameter(last, nn.Parameter(torch.zeros(shape, dtype=dtype)))

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        return samples @ torch.cat([p.flatten() for p in self.parameters()])


def _loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    outputs: torch.Tensor = model(batch)
    return outputs.mean()


class _Pair:
    """Two clippers of the same batches, one of them with one more sample."""

    def __init__(self, stages: Stages, shapes: Shapes, dtype: torch.dtype) -> None:
        self._norm = stages.configuration.max_grad_norm
        self._dtype = dtype
        model = _Canary(shapes, dtype)
        self._sizes = [p.numel() for p in model.parameters()]
        self._both: list[ClippedGradients] = []
        for _ in range(2):
            with user_seed():
                self._both.append(stages.gradients(model, _loss))

    def invent(
        self, rng: np.random.Generator, most_others: int
    ) -> tuple[torch.Tensor, torch.Tensor, str]:
        """Return a batch (B, d), one sample (d,) and a description of it."""
        kind = str(rng.choice(list(_DIRECTIONS)))
        direction = self._direction(rng, kind)
        size = float(rng.choice([*_SIZES, *_NOT_FINITE]))
        sample = direction * (size if math.isfinite(size) else 1.0) * self._norm
        if not math.isfinite(size):
            sample[int(rng.choice(np.flatnonzero(direction.numpy())))] = size
        others = int(rng.choice([count for count in _OTHERS if count <= most_others]))
        toward = str(rng.choice(["with it", "against it", "anywhere"]))
        length = float(rng.choice([0.3, 1.0, 3.0, 100.0]))
        ways = [-direction if toward == "against it" else direction]
        if toward == "anywhere":
            ways = [self._direction(rng, kind) for kind in _DIRECTIONS]
        chosen = rng.integers(len(ways), size=others).tolist()
        batch = torch.stack(ways)[chosen] * (length * self._norm)
        named = f"{size:g} C" if math.isfinite(size) else f"with {size}"
        what = f"a sample {named} along {_DIRECTIONS[kind]}, {others} others {toward}"
        return batch.to(self._dtype), sample.to(self._dtype), what

    def change(
        self, rng: np.random.Generator, batch: torch.Tensor, sample: torch.Tensor | None
    ) -> float:
        """Take a step of both, and return the norm of the difference; infinite for NaN."""
        changed, place = batch, int(rng.integers(0, len(batch) + 1))
        if sample is not None:
            changed = torch.cat([batch[:place], sample[None], batch[place:]])
        parts = 2 if rng.random() < 0.25 else 1
        sums = []
        for clipper, rows in zip(self._both, (batch, changed), strict=True):
            with user_seed():
                for part in rows.tensor_split(parts):
                    clipper.backward(part)
                sums.append(torch.cat([t.flatten().double() for t in clipper.take().tensors]))
        found = float(torch.linalg.vector_norm(sums[1] - sums[0]))
        return found if math.isfinite(found) else math.inf

    def _direction(self, rng: np.random.Generator, kind: str) -> torch.Tensor:
        """Return a vector of norm 1."""
        chosen = int(rng.integers(len(self._sizes)))
        parts = []
        for number, numel in enumerate(self._sizes):
            part = torch.zeros(numel, dtype=torch.float64)
            normal = torch.from_numpy(rng.standard_normal(numel))
            is_chosen = number == chosen
            if kind == "dense":
                part = normal
            elif kind == "even" or (kind == "parameter" and is_chosen):
                part = normal / normal.norm()
            elif kind == "equal":
                part.fill_(1.0)
            elif kind == "elements" or (kind == "element" and is_chosen):
                part[-1 if rng.random() < 0.5 else int(rng.integers(numel))] = 1.0
            parts.append(part)
        vector = torch.cat(parts)
        return vector / vector.norm()

"""Is a sample's part of a sum bounded, whatever the sample and whoever is in the batch with it?"""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from benchmarks.audit.stages import Stages
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
_STEPS = 90
_STEPS_LARGE = 16
_WORLDS = 4
# By how much roundings, of float32 and smaller, may change a norm.
_SLACK = 1e-3


def audit_clipping(stages: Stages) -> tuple[float, list[str]]:
    """Add samples to batches and compare clipped sums, which may change by C at most.

    Samples point along all coordinates, one parameter or one element, and are from half of C to
    1e30 C long, or not finite; the others, of 0 to 200, go with them or against them.  Batches are
    passed whole or in parts, in models of several dtypes.  Two of what clips go through the same
    steps, with the sample in three steps of four of one of them: whatever differs in the other
    steps was remembered.

    Returns:
        The largest change of a clipped sum by one sample, over C (claimed is 1), and what is wrong,
        in words.
    """
    rng = np.random.default_rng()
    worst, remembered = (0.0, ""), (0.0, "")
    for number, dtype in enumerate(_DTYPES * _WORLDS):
        is_large = number == 0
        world = _Pair(stages, _LARGE if is_large else _SMALL, dtype)
        steps = _STEPS_LARGE if is_large else _STEPS // _WORLDS
        for step in range(steps):
            batch, sample, what = world.invent(rng, 7 if is_large else 200)
            is_in = step % 4 != 3
            change = world.change(rng, batch, sample if is_in else None)
            where = f"{what}, step {step + 1} of a {str(dtype).split('.')[1]} model"
            found = (change / stages.configuration.max_grad_norm, where)
            if is_in:
                worst = max(worst, found)
            else:
                remembered = max(remembered, found)
    problems = []
    if worst[0] > 1 + _SLACK:
        problems.append(
            f"one sample changes a clipped sum by {_times(worst[0])}, where the noise is for C: "
            "clip every sample's gradient by itself, by its norm over all parameters "
            f"({worst[1]})"
        )
    if remembered[0] > _SLACK:
        problems.append(
            f"a sample of earlier steps changes a clipped sum by {_times(remembered[0])}: what "
            "clips must keep nothing from step to step "
            f"(step {remembered[1].rsplit(', step ', 1)[1]})"
        )
    return worst[0], problems


def _times(change: float) -> str:
    return f"{change:.3g} C" if math.isfinite(change) else "what is not finite"


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
        flat = torch.cat([p.flatten() for p in self.parameters()])
        return samples @ flat


def _loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    outputs: torch.Tensor = model(batch)
    return outputs.mean()


class _Pair:
    """Two of what clips, which see the same batches, but for one sample."""

    def __init__(self, stages: Stages, shapes: Shapes, dtype: torch.dtype) -> None:
        self._norm = stages.configuration.max_grad_norm
        self._dtype = dtype
        model = _Canary(shapes, dtype)
        self._shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        self._both: list[ClippedGradients] = []
        for _ in range(2):
            with user_seed():
                self._both.append(stages.gradients(model, _loss))

    def invent(
        self, rng: np.random.Generator, most_others: int
    ) -> tuple[torch.Tensor, torch.Tensor, str]:
        """Return a batch (B, d), one sample (d,) and what that is."""
        direction, along = self._direction(rng)
        size = float(rng.choice([*_SIZES, *_NOT_FINITE]))
        if math.isfinite(size):
            sample = direction * (size * self._norm)
        else:
            sample = direction * self._norm
            sample[int(rng.choice(np.flatnonzero(direction.numpy())))] = size
        others = int(rng.choice([count for count in _OTHERS if count <= most_others]))
        toward = rng.choice(["with it", "against it", "anywhere"])
        length = float(rng.choice([0.3, 1.0, 3.0, 100.0]))
        batch = torch.zeros(others, len(direction), dtype=torch.float64)
        for row in batch:
            sign = -1.0 if toward == "against it" else 1.0
            one = sign * direction if toward != "anywhere" else self._direction(rng)[0]
            row.copy_(one * (length * self._norm))
        named = f"{size:g} C" if math.isfinite(size) else f"with {size}"
        what = f"a sample {named} along {along}, {others} others {toward}"
        return batch.to(self._dtype), sample.to(self._dtype), what

    def change(
        self, rng: np.random.Generator, batch: torch.Tensor, sample: torch.Tensor | None
    ) -> float:
        """Take a step of both, and return the norm of the difference; infinite if not a number."""
        changed, place = batch, int(rng.integers(0, len(batch) + 1))
        if sample is not None:
            changed = torch.cat([batch[:place], sample[None], batch[place:]])
        in_parts = bool(rng.random() < 0.25)
        sums = [
            _clipped(clipper, rows, in_parts)
            for clipper, rows in zip(self._both, (batch, changed), strict=True)
        ]
        found = float(torch.linalg.vector_norm(sums[1] - sums[0]))
        return found if math.isfinite(found) else math.inf

    def _direction(self, rng: np.random.Generator) -> tuple[torch.Tensor, str]:
        """Return a vector of norm 1, and its name."""
        kind = rng.choice(["dense", "even", "equal", "parameter", "element", "elements"])
        chosen = str(rng.choice(list(self._shapes)))
        parts = {}
        for name, shape in self._shapes.items():
            part = torch.zeros(int(np.prod(shape)), dtype=torch.float64)
            normal = torch.from_numpy(rng.standard_normal(len(part)))
            if kind in ("dense", "even") or (kind == "parameter" and name == chosen):
                part = normal / normal.norm() if kind != "dense" else normal
            elif kind == "equal":
                part.fill_(1.0)
            elif kind == "elements" or (kind == "element" and name == chosen):
                part[-1 if rng.random() < 0.5 else int(rng.integers(len(part)))] = 1.0
            parts[name] = part
        vector = torch.cat(list(parts.values()))
        along = {
            "dense": "all coordinates",
            "even": "all parameters alike",
            "equal": "all coordinates alike",
            "elements": "one element of each parameter",
            "parameter": f"all of {chosen}",
            "element": f"one element of {chosen}",
        }[kind]
        return vector / vector.norm(), along


def _clipped(clipper: ClippedGradients, batch: torch.Tensor, in_parts: bool) -> torch.Tensor:
    parts: Sequence[torch.Tensor] = batch.tensor_split(2) if in_parts else [batch]
    with user_seed():
        for part in parts:
            clipper.backward(part)
        return torch.cat([tensor.flatten().double() for tensor in clipper.take().tensors])

"""The input of a prediction: the shapes of a model's parameters, and the time of its step."""

import json
import math
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

_DTYPES = ("float32", "bfloat16", "float16")
_LEAST_SIDE, _LEAST_MATRICES = 32, 64
_WARM_UP = 2


@dataclass(frozen=True)
class Step:
    """The shapes of a model's parameters, their dtype, and the milliseconds of one step.

    A step is forward, backward and optimizer on one rank, without an exchange.

    Raises:
        ValueError: for negative dimensions, no parameters, a time that is not positive and finite,
            or an unknown dtype.

    Example::

        >>> Step.of_numel(3_000_000, milliseconds=350.0).numel
        3000000
    """

    shapes: tuple[tuple[int, ...], ...]
    milliseconds: float
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if any(dimension < 0 for shape in self.shapes for dimension in shape):
            raise ValueError("the dimensions of a parameter must not be negative")
        if not self.numel:
            raise ValueError("there is nothing to exchange: the model has no trainable parameters")
        if not 0 < self.milliseconds < math.inf:
            raise ValueError(
                "the time of a step (--step-ms) must be positive and finite, got "
                f"{self.milliseconds:g} ms"
            )
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(_DTYPES)}, got {self.dtype!r}")

    @property
    def numel(self) -> int:
        """The number of parameters."""
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def element_bytes(self) -> int:
        """The number of bytes of one element of a gradient."""
        return 4 if self.dtype == "float32" else 2

    @classmethod
    def of_numel(cls, numel: int, milliseconds: float, dtype: str = "float32") -> "Step":
        """Return a step with ``numel`` parameters, most of them in equal square matrices."""
        side = _LEAST_SIDE
        while (2 * side) ** 2 * _LEAST_MATRICES <= numel:
            side *= 2
        matrices, rest = divmod(numel, side * side)
        rows, rest = divmod(rest, side)
        shapes: list[tuple[int, ...]] = [(side, side)] * matrices
        shapes += [(rows, side)] if rows else []
        shapes += [(rest,)] if rest else []
        return cls(tuple(shapes), milliseconds, dtype)

    def save(self, path: str | Path) -> None:
        """Write the step as JSON, for ``comm-hooks advise --step``."""
        Path(path).write_text(json.dumps(asdict(self)) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> "Step":
        """Return the step in a file that :meth:`save` wrote.

        Raises:
            ValueError: if the file cannot be read or holds no step.
        """
        try:
            values = json.loads(Path(path).read_text())
            shapes = tuple(tuple(map(int, shape)) for shape in values["shapes"])
            return cls(shapes, float(values["milliseconds"]), str(values["dtype"]))
        except OSError as error:
            raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
        except (KeyError, TypeError, json.JSONDecodeError):
            raise ValueError(f"{path}: not a step that measure_step(...).save() wrote") from None


def measure_step(model: nn.Module, step: Callable[[], object], *, repeat: int = 10) -> Step:
    """Time training steps of a model, without exchange, and return what ``advise`` needs.

    Takes real steps: the model and the optimizer change.

    Args:
        model: the trained model.  DDP's exchange is left out (``no_sync``).
        step: a function that takes one step: forward, backward, optimizer.
        repeat: the number of timed steps, after two others; the result is their median.

    Raises:
        ValueError: if ``repeat`` is below 1 or nothing in the model is trainable.

    Example::

        >>> from comm_hooks.launchers.advise import measure_step
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> def step() -> None:
        ...     model(torch.ones(4, 8)).square().mean().backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        >>> measure_step(model, step).shapes
        ((8, 8), (8,))
    """
    if repeat < 1:
        raise ValueError(f"measure_step: repeat must be at least 1, got {repeat}")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    device = trained[0].device if trained else torch.device("cpu")
    durations = []
    for index in range(_WARM_UP + repeat):
        with _without_exchange(model):
            synchronize(device)
            started = time.perf_counter()
            step()
            synchronize(device)
        if index >= _WARM_UP:
            durations.append(time.perf_counter() - started)
    dtype = str(trained[0].dtype).removeprefix("torch.") if trained else "float32"
    shapes = tuple(tuple(parameter.shape) for parameter in trained)
    return Step(shapes, 1e3 * statistics.median(durations), dtype)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _without_exchange(model: nn.Module) -> AbstractContextManager[None]:
    if isinstance(model, DistributedDataParallel):
        return model.no_sync()
    return nullcontext()

"""The sources of a data set: does anything depend on several samples before training begins?"""

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from benchmarks.audit.script.watched import digest

_LOADING = {"load", "loadtxt", "genfromtxt", "from_numpy", "as_tensor", "tensor"}
_MAKING = {"rand", "randint", "randn", "rand_like", "randn_like", "normal", "tensor", "as_tensor"}
_PATCHED = ((torch, "load from_numpy"), (np, "load loadtxt genfromtxt"))
_MOST_ROWS = 20_000


VARIED_ROWS = 5


class Sources(TorchFunctionMode):
    """Records the first tensors and arrays of a script, and can change some rows of one.

    Args:
        varied: the number of the changed one; None for none.
        where: returns the current line of the script.
        seed: sets the generators, which happens after each source: changed lengths then do not
            shift what is drawn later.

    Attributes:
        found: in ``"made"`` the place, function and shape of each; in ``"rows"`` digests of the
            samples of the first private data set; in ``"others"`` digests of the model and of the
            values in its loss function and optimizer, by name.
    """

    def __init__(
        self, varied: int | None, where: Callable[[], str], seed: Callable[[int], None]
    ) -> None:
        super().__init__()
        self._varied, self._where, self._seed = varied, where, seed
        self._exits = ExitStack()
        self.found: dict[str, Any] = {"made": [], "rows": None, "others": {}}

    def start(self) -> None:
        """Begin to record."""
        for owner, names in _PATCHED:
            for name in names.split():
                recording = self._recording(name, getattr(owner, name))
                self._exits.enter_context(mock.patch.object(owner, name, recording))
        self._exits.enter_context(self)

    def stop(self) -> None:
        """End recording; may be called again."""
        self._exits.close()

    def read(self, dataset: Any, model: Any, loss_function: Any, optimizer: Any) -> None:
        """Record the samples of the first data set, its model, loss function and optimizer."""
        if self.found["rows"] is None:
            rows = range(min(len(dataset), _MOST_ROWS))
            self.found["rows"] = [digest(dataset[row]) for row in rows]
            others = {**_state(model, "parameter"), **_referred(loss_function), **_held(optimizer)}
            self.found["others"] = {name: digest(value) for name, value in others.items()}

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        name = getattr(function, "__name__", "")
        if name in _MAKING and "generator" not in (kwargs or {}):
            self._record(name, result)
        return result

    def _recording(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def recording(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self._record(name, result)
            return result

        return recording

    def _record(self, name: str, result: Any) -> None:
        for leaf in pytree.tree_leaves(result):
            if not isinstance(leaf, torch.Tensor | np.ndarray) or not leaf.ndim or not len(leaf):
                continue
            made = self.found["made"]
            made.append((self._where(), name, tuple(leaf.shape), name in _LOADING))
            if self._varied == len(made) - 1:
                for place in range(VARIED_ROWS):
                    _vary(leaf, (2 * place + 1) * len(leaf) // (2 * VARIED_ROWS))
            self._seed(len(made))


def _vary(values: Any, row: int) -> None:
    with torch.no_grad():
        if str(values.dtype).endswith("uint8"):  # an image
            values[row] = 255 - values[row]
        elif "float" in str(values.dtype):
            values[row] = values[row] * -1000 + 1  # so that extremes move, and signs
        else:  # a label or a token becomes another existing one
            others = (other for other in values if bool((other != values[row]).any()))
            if (other := next(others, None)) is not None:
                values[row] = other.clone() if isinstance(other, torch.Tensor) else other


def _state(model: Any, kind: str) -> dict[str, Any]:
    if not isinstance(model, torch.nn.Module):
        return {}
    return {f"{kind} {name}": value for name, value in model.state_dict().items()}


def _held(optimizer: Any) -> dict[str, Any]:
    """Return the tensors that an optimizer was given, and the numbers in its groups, by name."""
    found: dict[str, Any] = {}
    for name, value in vars(optimizer).items():
        values = value.values() if isinstance(value, dict) and name != "state" else [value]
        tensors = [each for each in values if isinstance(each, torch.Tensor | np.ndarray)]
        found.update({f"the optimizer's {name} {i}": each for i, each in enumerate(tensors)})
    for place, group in enumerate(optimizer.param_groups):
        numbers = {name: value for name, value in group.items() if isinstance(value, float)}
        found.update({f"the optimizer's {name} {place}": value for name, value in numbers.items()})
    return found


def _referred(function: Any, depth: int = 3) -> dict[str, Any]:
    """Return the tensors and numbers outside of a loss function that it refers to, by name."""
    if not inspect.isfunction(function):
        return _state(function, "the loss function's")
    outside = inspect.getclosurevars(function)
    found = {}
    for name, value in {**outside.globals, **outside.nonlocals}.items():
        if isinstance(value, torch.Tensor | np.ndarray | float):
            found[f"the loss function's {name}"] = value
        elif isinstance(value, torch.nn.Module):
            found.update(_state(value, f"the loss function's {name}:"))
        elif inspect.isfunction(value) and depth:
            found.update(_referred(value, depth - 1))
    return found

"""What a data set was made of: what depends on several samples before training has begun?"""

import hashlib
import inspect
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

_LOADING = {"load", "loadtxt", "genfromtxt", "from_numpy", "as_tensor", "tensor"}
_MAKING = {"rand", "randn", "rand_like", "randn_like", "normal"}
_MOST_ROWS = 20_000


VARIED_ROWS = 5


class Sources(TorchFunctionMode):
    """Notes the tensors and arrays that a script begins with, and can change some rows of one.

    Args:
        varied: which one, by its number; None: none.
        where: says which line of the script runs.

    Attributes:
        found: in ``"made"`` the place, function and shape of each; in ``"rows"`` digests of the
            samples of the first data set that was to be trained on privately; in ``"others"``
            digests of the model and of what its loss function refers to, by name.
    """

    def __init__(self, varied: int | None, where: Callable[[], str]) -> None:
        super().__init__()
        self._varied, self._where = varied, where
        self._exits = ExitStack()
        self.found: dict[str, Any] = {"made": [], "rows": None, "others": {}}

    def start(self) -> None:
        """Begin to look."""
        for owner, names in (
            (torch, ("load", "from_numpy")),
            (np, ("load", "loadtxt", "genfromtxt")),
        ):
            for name in names:
                noting = self._noting(name, getattr(owner, name))
                self._exits.enter_context(mock.patch.object(owner, name, noting))
        self._exits.enter_context(self)

    def stop(self) -> None:
        """End it; may be called again."""
        self._exits.close()

    def look(self, dataset: Any, model: Any, loss_function: Any) -> None:
        """Note the samples of a data set and what they meet, the first time."""
        if self.found["rows"] is None:
            rows = range(min(len(dataset), _MOST_ROWS))
            self.found["rows"] = [_digest(dataset[row]) for row in rows]
            others = {**_state(model, "parameter"), **_referred(loss_function)}
            self.found["others"] = {name: _digest(value) for name, value in others.items()}

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        name = getattr(function, "__name__", "")
        if name in _MAKING or name in ("tensor", "as_tensor"):
            self._note(name, result)
        return result

    def _noting(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            self._note(name, result)
            return result

        return noting

    def _note(self, name: str, result: Any) -> None:
        for leaf in pytree.tree_leaves(result):
            if not isinstance(leaf, torch.Tensor | np.ndarray) or not leaf.ndim or not len(leaf):
                continue
            made = self.found["made"]
            made.append((self._where(), name, tuple(leaf.shape), name in _LOADING))
            if self._varied == len(made) - 1:
                for place in range(VARIED_ROWS):
                    _vary(leaf, (2 * place + 1) * len(leaf) // (2 * VARIED_ROWS))


def _vary(values: Any, row: int) -> None:
    is_image = str(values.dtype).endswith("uint8")
    with torch.no_grad():
        if is_image:
            values[row] = 255 - values[row]
        elif "float" in str(values.dtype):
            values[row] = values[row] * 1000 + 1  # so that extremes move, too
        else:  # a label or a token: another one that there is
            others = (other for other in values if bool((other != values[row]).any()))
            if (other := next(others, None)) is not None:
                values[row] = other.clone() if isinstance(other, torch.Tensor) else other


def _state(model: Any, kind: str) -> dict[str, Any]:
    if not isinstance(model, torch.nn.Module):
        return {}
    return {f"{kind} {name}": value for name, value in model.state_dict().items()}


def _referred(function: Any, depth: int = 3) -> dict[str, Any]:
    """Return the tensors and numbers that a loss function takes from elsewhere, by name."""
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


def _digest(sample: Any) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for leaf in pytree.tree_leaves(sample):
        values = leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf
        digest.update(np.asarray(values).tobytes())
    return digest.hexdigest()

"""What a data set was made of: does a sample depend on others before training has begun?"""

import hashlib
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


class Sources(TorchFunctionMode):
    """Notes the tensors and arrays that a script begins with, and can change a row of one.

    Args:
        varied: which one, by its number; None: none.
        where: says which line of the script runs.

    Attributes:
        found: in ``"made"`` the place, function and shape of each; in ``"rows"`` digests of the
            samples of the first data set that was to be trained on privately.
    """

    def __init__(self, varied: int | None, where: Callable[[], str]) -> None:
        super().__init__()
        self._varied, self._where = varied, where
        self._exits = ExitStack()
        self.found: dict[str, Any] = {"made": [], "rows": None}

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

    def look(self, dataset: Any) -> None:
        """Note the samples of a data set, the first time."""
        if self.found["rows"] is None:
            rows = range(min(len(dataset), _MOST_ROWS))
            self.found["rows"] = [_digest(dataset[row]) for row in rows]

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
                _vary(leaf, len(leaf) // 2)


def _vary(values: Any, row: int) -> None:
    is_image = str(values.dtype).endswith("uint8")
    with torch.no_grad():
        if is_image:
            values[row] = 255 - values[row]
        elif "float" in str(values.dtype):
            values[row] = values[row] * 2 + 1


def _digest(sample: Any) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for leaf in pytree.tree_leaves(sample):
        values = leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf
        digest.update(np.asarray(values).tobytes())
    return digest.hexdigest()

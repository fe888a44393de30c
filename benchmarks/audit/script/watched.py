"""Digests of a model and of its optimizers, and lines of a script, which two runs can compare."""

import hashlib
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

import comm_hooks

_PACKAGE = str(Path(comm_hooks.__file__).parent)
_LIBRARIES = (_PACKAGE, str(Path(_PACKAGE).resolve()), str(Path(torch.__file__).parents[1]))


class Places:
    """Names the lines of a script and of the modules in its folder.

    Args:
        script: its path.
    """

    def __init__(self, script: Path) -> None:
        self._script = script

    def now(self) -> str:
        """Return the current line, such as ``"train.py:41"``."""
        return self._first(traceback.walk_stack(sys._getframe(1)))

    def of(self, error: BaseException) -> str:
        """Return the line that raised an exception."""
        return self._first(reversed([*traceback.walk_tb(error.__traceback__)]))

    def _first(self, lines: Iterable[tuple[FrameType, int]]) -> str:
        for frame, line in lines:
            if self._is_own(frame.f_code.co_filename):
                return f"{Path(frame.f_code.co_filename).name}:{line}"
        return self._script.name

    def _is_own(self, filename: str) -> bool:
        if filename == str(self._script):
            return True
        inside = filename.startswith(str(self._script.parent) + os.sep)
        return inside and not filename.startswith(_LIBRARIES) and "site-packages" not in filename


class Watched:
    """The parameters, buffers and optimizer settings that a training may change."""

    def __init__(self) -> None:
        self._states: dict[str, Callable[[], Any]] = {}
        # Kept alive, so that no other object gets their ids.
        self._known: dict[int, object] = {}

    def add(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Watch tensors that are not watched yet."""
        for name, tensor in named:
            if id(tensor) not in self._known:
                self._known[id(tensor)] = tensor
                self._states[name] = partial(digest, tensor)

    def add_model(self, module: nn.Module) -> None:
        """Watch a model's parameters and buffers."""
        self.add(("parameter " + name, p) for name, p in module.named_parameters())
        for name, _ in module.named_buffers():
            self._states["buffer " + name] = partial(_buffer, module, name)

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Watch an optimizer's settings, and its parameters."""
        if id(optimizer) in self._known:
            return
        self._known[id(optimizer)] = optimizer
        kind = type(optimizer).__name__
        number = sum(name.startswith(f"settings of {kind} ") for name in self._states) + 1
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        self.add((f"parameter {i} of {kind} {number}", p) for i, p in enumerate(parameters))
        self._states[f"settings of {kind} {number}"] = partial(_settings, optimizer)

    def state(self) -> dict[str, Any]:
        """Return a digest, or the settings, of everything, by name."""
        return {name: state() for name, state in self._states.items()}


def flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return a copy of all elements of some tensors in one row, float32."""
    return torch.cat([t.detach().float().cpu().reshape(-1) for t in tensors])


def digest(tree: Any) -> str:
    """Return a short digest of the bits of tensors, arrays, numbers and bytes."""
    found = hashlib.blake2b(digest_size=8)
    for leaf in (leaf for leaf in pytree.tree_leaves(tree) if leaf is not None):
        if isinstance(leaf, torch.Tensor):
            leaf = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        found.update(leaf if isinstance(leaf, bytes) else np.asarray(leaf).tobytes())
    return found.hexdigest()


def _buffer(module: nn.Module, name: str) -> str:
    # Looked up each time: it may be another tensor after a step.
    return digest(dict(module.named_buffers()).get(name))


def _settings(optimizer: Optimizer) -> list[dict[str, str]]:
    return [
        {key: repr(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]

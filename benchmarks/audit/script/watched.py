"""All of a model and of its optimizers, as digests that two runs can compare."""

import hashlib
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


class Watched:
    """What a script's training may change: parameters, buffers, and settings of optimizers."""

    def __init__(self) -> None:
        self._looks: dict[str, Callable[[], Any]] = {}
        # Kept alive, so that nothing else gets their numbers.
        self._known: dict[int, object] = {}

    def add(self, named: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Watch tensors that are not watched yet."""
        for name, tensor in named:
            if id(tensor) not in self._known:
                self._known[id(tensor)] = tensor
                self._looks[name] = partial(digest, tensor)

    def add_model(self, module: nn.Module) -> None:
        """Watch a model's parameters and buffers."""
        self.add(("parameter " + name, p) for name, p in module.named_parameters())
        for name, _ in module.named_buffers():
            self._looks["buffer " + name] = partial(_digest_buffer, module, name)

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Watch an optimizer's settings, and parameters of its own."""
        if id(optimizer) in self._known:
            return
        self._known[id(optimizer)] = optimizer
        kind = type(optimizer).__name__
        number = sum(name.startswith(f"settings of {kind} ") for name in self._looks) + 1
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        self.add((f"parameter {i} of {kind} {number}", p) for i, p in enumerate(parameters))
        self._looks[f"settings of {kind} {number}"] = partial(_settings, optimizer)

    def state(self) -> dict[str, Any]:
        """Return a digest, or the settings, of everything, by name."""
        return {name: look() for name, look in self._looks.items()}


def flat(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return a copy of all elements of some tensors in one row, float32."""
    return torch.cat([t.detach().float().cpu().reshape(-1) for t in tensors])


def digest(tensor: torch.Tensor) -> str:
    """Return a digest of a tensor's bits."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return digest_of(flat.view(torch.uint8).numpy().tobytes())


def digest_of(content: bytes) -> str:
    """Return a short digest."""
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def _digest_buffer(module: nn.Module, name: str) -> str | None:
    # Looked up each time: it may be another tensor after a step.
    buffer = dict(module.named_buffers()).get(name)
    return None if buffer is None else digest(buffer)


def _settings(optimizer: Optimizer) -> list[dict[str, str]]:
    return [
        {key: repr(value) for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]

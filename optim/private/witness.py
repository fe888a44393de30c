"""A witness of what only private steps may change: the parameters and buffers of a model."""

import random
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from comm_hooks.optim.private.gradients.alone import RATE
from comm_hooks.warnings import warn_program
from comm_hooks.wire.checksum import fingerprint

WRITTEN = (
    "private training: parameters or buffers have changed since the last private step, by "
    "something else: epsilon covers that only if it used no private data, as loading a checkpoint "
    "or an average of earlier weights does"
)
_random = random.SystemRandom()
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_witnesses: Any = WeakIdKeyDictionary()
"""The witness of each parameter, which lives as long as one of its parameters."""


class Witness:
    """Warns, once, if something else has written to a model since the last private step.

    1. Trained parameters must have the versions and the bits that they had after the last step:
       a sum of all bits, which any change of one element changes.
    2. Buffers and frozen parameters must have the values that they had at the first step; looked
       at after the first two steps, one of 64 others and at the end.

    It lives as long as the model does, or until another training of it begins.
    """

    def __init__(self) -> None:
        self._parameters: list[weakref.ref[torch.Tensor]] = []
        self._module: weakref.ref[nn.Module] | None = None
        self._versions: list[int] | None = None
        self._fixed: list[int] = []
        self._bits: list[torch.Tensor] = []
        self._steps = 0
        self._is_over = False

    def watch(self, parameters: Sequence[torch.Tensor], module: nn.Module | None = None) -> None:
        """Begin to watch, in place of witnesses of earlier trainings.

        Args:
            parameters: the trained parameters.
            module: the model; None: only the parameters are looked at.
        """
        # Weakly: a strong reference would keep them, and so this object, for ever.
        self._parameters = [weakref.ref(parameter) for parameter in parameters]
        self._module = None if module is None else weakref.ref(module)
        every = {*parameters, *(() if module is None else module.parameters())}
        for earlier in filter(None, map(_witnesses.get, every)):
            earlier._is_over = True
        _witnesses.update(dict.fromkeys(every, self))

    def note(self) -> None:
        """Note the state of the model after a private step."""
        trained = self._trained()
        if self._versions is None:
            self._fixed = self._fingerprints_of_fixed()
        self._versions = [parameter._version for parameter in trained]
        self._bits = _bits(trained)
        self._steps += 1

    def look(self, before: Literal["backward", "step", "the end"] = "the end") -> None:
        """Warn if the model has changed since :meth:`note`.

        Args:
            before: what comes next; before most steps only versions are read.
        """
        trained = self._trained()
        if self._versions is None or self._is_over or len(trained) < len(self._parameters):
            return
        is_due = before == "the end" or self._steps < 3 or not _random.randrange(RATE)
        if (
            [parameter._version for parameter in trained] != self._versions
            or ((is_due or before == "backward") and _read(_bits(trained)) != _read(self._bits))
            or (is_due and self._fingerprints_of_fixed() != self._fixed)
        ):
            self._warn(WRITTEN)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Return the context of the step that uses released gradients; warn if these change."""
        before = self._gradients()
        yield
        pairs = zip(self._gradients(), before, strict=True)
        if not self._is_over and any(now[0] and now != was for now, was in pairs):
            self._warn(
                "private training: p.grad has changed after its release, by the optimizer inside "
                "or its hooks: epsilon covers that only if it used no private data, as clipping "
                "does"
            )

    def _warn(self, problem: str) -> None:
        self._is_over = True
        warn_program(problem)

    def _trained(self) -> list[torch.Tensor]:
        return [parameter for ref in self._parameters if (parameter := ref()) is not None]

    def _gradients(self) -> list[tuple[int, int]]:
        """Return the identity and version of each gradient; zeros for none."""
        found = [parameter.grad for parameter in self._trained()]
        return [(0, 0) if grad is None else (id(grad), grad._version) for grad in found]

    def _fingerprints_of_fixed(self) -> list[int]:
        module = None if self._module is None else self._module()
        if module is None:
            return self._fixed
        trained = {id(parameter) for parameter in self._trained()}
        fixed = [t for t in (*module.parameters(), *module.buffers()) if id(t) not in trained]
        return [int(fingerprint(part)) for part in _by_device(fixed)]


def _bits(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return, by device, the sums of tensors' elements, their bits taken for integers, mod 2^32."""
    return [
        torch.stack([t.detach().view(_WORDS[t.itemsize]).sum(dtype=torch.int32) for t in part])
        for part in _by_device(tensors)
    ]


def _read(sums: Sequence[torch.Tensor]) -> list[list[int]]:
    return [part.tolist() for part in sums]  # waits for an accelerator


def _by_device(tensors: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
    parts: dict[torch.device, list[torch.Tensor]] = {}
    for tensor in tensors:
        parts.setdefault(tensor.device, []).append(tensor)
    return list(parts.values())

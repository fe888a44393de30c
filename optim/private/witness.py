"""A witness of what only private steps may change: the parameters and buffers of a model."""

import random
from collections.abc import Sequence

import torch

from comm_hooks.optim.private.gradients.alone import RATE
from comm_hooks.registered_model import RegisteredModel
from comm_hooks.warnings import warn_program
from comm_hooks.wire.checksum import fingerprint

_ALWAYS = 2
_random = random.SystemRandom()


class Witness:
    """Warns, once, if something else has written to a model since the last private step.

    Versions of parameters are compared each time.  Writes to ``p.data`` and by some kernels do not
    count; so a fingerprint of all parameters and buffers, also of frozen ones, is taken after the
    first two steps and after one of 64 others.

    Args:
        parameters: the trained parameters.
        model: the model; None: only the parameters are looked at.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], model: RegisteredModel | None) -> None:
        self._parameters = parameters
        self._model = model
        self._versions: list[int] | None = None
        self._values: list[int] = []
        self._steps = 0
        self._has_warned = False
        self._released: list[tuple[int, int]] = []

    def note(self) -> None:
        """Note the state of the model after a private step."""
        self._versions = [parameter._version for parameter in self._parameters]
        is_due = self._steps < _ALWAYS or not _random.randrange(RATE)
        self._values = self._fingerprints() if is_due else []
        self._steps += 1

    def note_gradients(self) -> None:
        """Note the released gradients, before the step of the optimizer that gets them."""
        self._released = self._gradients()

    def look(self) -> None:
        """Warn if the model has changed since :meth:`note`."""
        if self._versions is None or self._has_warned:
            return
        now = [parameter._version for parameter in self._parameters]
        if now != self._versions or (self._values and self._values != self._fingerprints()):
            self._warn(
                "parameters or buffers have changed since the last private step, by something "
                "else: epsilon covers that only if it used no private data, as loading a "
                "checkpoint or an average of weights does"
            )

    def look_at_gradients(self) -> None:
        """Warn if the gradients have changed since :meth:`note_gradients`."""
        pairs = zip(self._gradients(), self._released, strict=True)
        changed = any(now[0] and now != was for now, was in pairs)
        if changed and not self._has_warned:
            self._warn(
                "p.grad has changed after its release, by the optimizer inside or its hooks: "
                "epsilon covers that only if it used no private data, as clipping does"
            )

    def _warn(self, problem: str) -> None:
        self._has_warned = True
        warn_program(f"DPOptimizer: {problem}")

    def _gradients(self) -> list[tuple[int, int]]:
        """Return the identity and version of each gradient; zeros for none."""
        found = [parameter.grad for parameter in self._parameters]
        return [(0, 0) if grad is None else (id(grad), grad._version) for grad in found]

    def _fingerprints(self) -> list[int]:
        tensors = [*self._parameters] if self._model is None else self._model.tensors()
        devices = dict.fromkeys(tensor.device for tensor in tensors)
        parts = [[t for t in tensors if t.device == device] for device in devices]
        return [int(fingerprint(part)) for part in parts]

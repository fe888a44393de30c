"""The buffers that forward passes change, such as running means, averaged over ranks."""

import math
from collections.abc import Collection, Iterator, Mapping
from weakref import WeakKeyDictionary

import torch
from torch import nn

Tensors = dict[str, torch.Tensor]


class SharedBuffers:
    """The floating-point buffers of a model, this rank's and those that all ranks share.

    Ranks have other data, so running means and the like differ between them.  Those that have
    changed by the first exchange are averaged from then on, in full precision, in so few exchanges
    that they need at most a sixteenth of ``budget``.

    Args:
        module: the model; None: there are no buffers.

    Attributes:
        budget: the bytes that a rank may send in an exchange; None for no limit.
    """

    def __init__(self, module: nn.Module | None = None) -> None:
        self._names: WeakKeyDictionary[nn.Module, dict[str, str]] = WeakKeyDictionary()
        for prefix, part in () if module is None else module.named_modules():
            named = part.named_buffers(recurse=False)
            own = [key for key, buffer in named if buffer.is_floating_point()]
            self._names[part] = {key: f"{prefix}.{key}".lstrip(".") for key in own}
        self._shared = {name: b.detach().clone() for name, b in self._all()}
        self._is_fixed = False
        self._hidden: Tensors | None = None
        self.budget: float | None = None

    @property
    def names(self) -> list[str]:
        """The names of the shared buffers."""
        return list(self._shared)

    @property
    def live(self) -> Tensors:
        """This rank's buffers that are shared, by name."""
        return {name: buffer for name, buffer in self._all() if name in self._shared}

    def due(self, exchange: int) -> Tensors:
        """Return copies of the buffers in float32 if exchange number ``exchange`` averages them."""
        if not self._is_fixed:
            self._is_fixed = True
            for name, buffer in self.live.items():
                if torch.equal(buffer, self._value(name, buffer)):
                    del self._shared[name]
        size = 4 * sum(value.numel() for value in self._shared.values())
        period = max(1, math.ceil(16 * size / self.budget)) if self.budget else 1
        if exchange % period:
            return {}
        return {f"buffer {name}": b.detach().clone().float() for name, b in self.live.items()}

    @torch.no_grad()
    def set(self, means: Mapping[str, torch.Tensor]) -> None:
        """Set the buffers, and the shared values, to the means of what :meth:`due` returned."""
        for name, buffer in self.live.items():
            if (mean := means.get(f"buffer {name}")) is not None:
                buffer.copy_(mean)
                self._shared[name] = buffer.detach().clone()

    @torch.no_grad()
    def adopt(self, chosen: Collection[int] | None = None, own: Tensors | None = None) -> None:
        """Share the present values; go on with ``own`` where they are shared already.

        Args:
            chosen: ``id()`` of the buffers; None for all of them.
            own: this rank's values, by name.
        """
        for name, buffer in self.live.items():
            if chosen is not None and id(buffer) not in chosen:
                continue
            if own is None or not torch.equal(buffer, self._value(name, buffer)):
                self._shared[name] = buffer.detach().clone()
                if self._hidden is not None:
                    self._hidden[name] = buffer.detach().clone()
            elif self._hidden is None:
                buffer.copy_(own[name])

    def copies(self) -> Tensors:
        """Return copies of this rank's buffers, also while others are shown."""
        own = self.live if self._hidden is None else {n: self._hidden[n] for n in self.live}
        return {name: buffer.detach().clone() for name, buffer in own.items()}

    def values(self) -> dict[int, torch.Tensor]:
        """Return copies of the shared values by ``id()`` of the buffer."""
        return {id(b): self._value(name, b).clone() for name, b in self.live.items()}

    def show(self) -> None:
        """Give the buffers the shared values until :meth:`unshow`."""
        with torch.inference_mode(False), torch.no_grad():
            self._hidden = self.copies()
            for name, buffer in self.live.items():
                buffer.copy_(self._shared[name])

    def unshow(self) -> None:
        """Give the buffers this rank's values again, unless other code has set others."""
        own, self._hidden = self._hidden, None
        self.adopt(own=own)

    def state_dict(self) -> dict[str, Tensors]:
        """Return this rank's buffers, and the shared values."""
        shared = {name: value.clone() for name, value in self._shared.items()}
        return {"own": self.copies(), "shared": shared}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensors]) -> None:
        """Restore the result of :meth:`state_dict`; without ``own``, go on with what is shared."""
        shared = state["shared"]
        self._shared = {name: shared[name].clone() for name, _ in self._all() if name in shared}
        for name, buffer in self.live.items():
            buffer.copy_(state["own"].get(name, shared[name]))
        self._is_fixed = True

    def value(self, module: nn.Module, key: str) -> torch.Tensor | None:
        """Return the shared value of a module's own buffer; None if it is not shared."""
        name = self._names.get(module, {}).get(key)
        return self._value(name, module._buffers[key]) if name and name in self._shared else None

    def _all(self) -> Iterator[tuple[str, torch.Tensor]]:
        for module, names in self._names.items():
            for key, name in names.items():
                if (buffer := module._buffers[key]) is not None:
                    yield name, buffer

    def _value(self, name: str, buffer: torch.Tensor | None) -> torch.Tensor:
        assert buffer is not None
        return self._shared[name].to(buffer)  # frameworks move a model's buffers

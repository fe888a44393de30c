"""Operators with a plain reference and faster versions for some devices."""

import functools
import importlib
from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

from torch import Tensor

from comm_hooks.kernels.triton import available

_P = ParamSpec("_P")
_R = TypeVar("_R")


class Operator(Generic[_P, _R]):
    """A function with several versions: it runs the fastest for the device of its first argument.

    1. On a GPU with Triton: the function of the same name in the module of the same name in
       :mod:`comm_hooks.kernels.triton`, if there is one and it accepts the arguments;
    2. else the version that was registered with :meth:`fast`, on the CPU or everywhere;
    3. else the reference.

    Attributes:
        reference: the function that defines the result, in a few lines of torch.
    """

    def __init__(self, reference: Callable[_P, _R], triton: Callable[..., bool] | None) -> None:
        functools.update_wrapper(self, reference)
        self.reference = reference
        self._triton = triton
        self._fast = reference
        self._only_on_cpu = False

    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        tensor = args[0]
        assert isinstance(tensor, Tensor)
        if self._triton and available(tensor) and self._triton(*args, **kwargs):
            module = self.reference.__module__.replace(".kernels.", ".kernels.triton.")
            kernel = getattr(importlib.import_module(module), self.reference.__name__)
            result: _R = kernel(*args, **kwargs)
            return result
        if self._only_on_cpu and tensor.device.type != "cpu":
            return self.reference(*args, **kwargs)
        return self._fast(*args, **kwargs)

    def fast(self, *, only_on_cpu: bool = True) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
        """Return a decorator that registers a faster version of the reference."""

        def register(function: Callable[_P, _R]) -> Callable[_P, _R]:
            self._fast, self._only_on_cpu = function, only_on_cpu
            return function

        return register


def operator(
    *, triton: Callable[..., bool] | None = None
) -> Callable[[Callable[_P, _R]], Operator[_P, _R]]:
    """Return a decorator that makes an :class:`Operator` of its reference.

    Args:
        triton: returns whether the Triton kernel accepts these arguments; None: there is no kernel.
    """
    return lambda reference: Operator(reference, triton)


def always(*args: object, **kwargs: object) -> bool:
    """Return True: the Triton kernel accepts any arguments."""
    return True


def if_contiguous(tensor: Tensor, *args: object, **kwargs: object) -> bool:
    """Return whether the first argument is contiguous, as the Triton kernel needs it."""
    return tensor.is_contiguous()

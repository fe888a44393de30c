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
    """A function that runs its fastest version for its first argument, a tensor.

    1. On a GPU with Triton: the function and module of its name in
       :mod:`comm_hooks.kernels.triton`, if there is one that takes the arguments;
    2. else the version that :meth:`fast` has registered, on the CPU or everywhere;
    3. else the reference.

    Attributes:
        reference: defines the result in a few lines of torch.
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
        """Register a faster version than the reference, as a decorator."""

        def register(function: Callable[_P, _R]) -> Callable[_P, _R]:
            self._fast, self._only_on_cpu = function, only_on_cpu
            return function

        return register


def operator(
    *, triton: Callable[..., bool] | None = None
) -> Callable[[Callable[_P, _R]], Operator[_P, _R]]:
    """Make an :class:`Operator` of its reference, as a decorator.

    Args:
        triton: returns whether the Triton kernel takes given arguments; None: there is no kernel.

    Example::

        >>> import torch
        >>> @operator()
        ... def doubled(rows: Tensor) -> Tensor:
        ...     return 2 * rows
        >>> @doubled.fast()
        ... def _(rows: Tensor) -> Tensor:
        ...     return rows + rows
        >>> doubled(torch.ones(1, 2)), doubled.reference(torch.ones(1, 2))
        (tensor([[2., 2.]]), tensor([[2., 2.]]))
    """
    return lambda reference: Operator(reference, triton)


def always(*args: object, **kwargs: object) -> bool:
    """Return True: the kernel takes any arguments."""
    return True


def if_contiguous(tensor: Tensor, *args: object, **kwargs: object) -> bool:
    """Return whether the first argument is contiguous."""
    return tensor.is_contiguous()

"""A process for what must be decided before Triton is imported: interpreted, or compiled."""

import importlib
import multiprocessing
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

TIMEOUT_SECONDS = 800

Runner = Callable[..., Any]


@contextmanager
def process(**environment: str) -> Iterator[Runner]:
    """Yield a function that calls ``function`` of ``module`` in another process."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, context, _start, (environment,)) as executor:

        def run(module: str, function: str, *args: Any) -> Any:
            return executor.submit(_call, module, function, args).result(TIMEOUT_SECONDS)

        yield run


def _start(environment: dict[str, str]) -> None:
    os.environ.update(environment)
    import torch

    torch.set_num_threads(1)


def _call(module: str, function: str, args: tuple[Any, ...]) -> Any:
    return getattr(importlib.import_module(module), function)(*args)

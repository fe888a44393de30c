"""The operations that the exchange of one bucket queues on an accelerator.

Two matrices and two vectors between two ranks, with the error feedback that is usual.  Counted on
tensors without data (PyTorch's "meta" device), where reading a value raises an error; on a GPU it
would make the CPU wait. A Triton kernel counts as the PyTorch operations it stands for, so the
figures are upper bounds.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.micro.timing import print_head
from comm_hooks import ErrorFeedback, Exchange
from comm_hooks.config import build
from comm_hooks.launchers.advise.echo import Echo
from comm_hooks.wire.header import PendingChecks

# Compressor, collective, options.
CASES: list[tuple[str, Any, Mapping[str, Any]]] = [
    ("identity", "all_reduce", {}),
    ("random_k", "all_reduce", {}),
    ("srht", "all_reduce", {}),
    ("count_sketch", "all_reduce", {}),
    ("quantize", "all_gather", {}),
    ("sign", "all_gather", {}),
    ("sign", "sharded", {}),
    ("topk", "all_gather", {}),
    ("topk", "all_gather", {"value_bits": 4}),
    ("topk", "all_gather", {"value_bits": 1, "index_code": "rice"}),
    ("topk", "sharded", {}),
]
_RANKS = 2
_STEPS = 4  # the first ones agree on settings


class _WithoutClock(Echo):
    """Nothing takes time where there are no data."""

    def clock(self) -> float:
        return 0.0


class _Counting(TorchDispatchMode):
    """Counts what computes or copies, and not what only looks at memory in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        is_view = any(a.alias_info and not a.alias_info.is_write for a in func._schema.arguments)
        if not is_view and "empty" not in func.name():
            self.counts[func.name()] += 1
        return func(*args, **(kwargs or {}))


def count(compressor: str, collective: Any, options: Mapping[str, Any]) -> int:
    """Return how many operations a bucket takes, once ranks have agreed on settings.

    Raises:
        RuntimeError: if something of it reads what is computed (``NotImplementedError``, too).
    """
    device = torch.device("meta")
    coder = build("compressor", compressor, **options)
    exchange = Exchange(
        coder,
        ErrorFeedback() if coder.contractive else None,
        collective,
        # Every so many steps values are read on purpose.
        verify_every=0,
        transport=_WithoutClock(_RANKS, device),
    )
    shapes = [(384, 384), (384, 384), (384,), (384,)]
    tensors = {str(i): torch.empty(shape, device=device) for i, shape in enumerate(shapes)}
    with mock.patch.object(PendingChecks, "add"):
        for _ in range(_STEPS):
            with _Counting() as counting:
                exchange.average_(tensors)
    return sum(counting.counts.values())


def row(compressor: str, collective: str, options: Mapping[str, Any]) -> str:
    """Return the line of the table."""
    described = "".join(f", {name}={value}" for name, value in options.items())
    operations = count(compressor, collective, options)
    return f"| `{compressor}`{described} | `{collective}` | {operations} |"


def main() -> None:
    """Print the table."""
    print_head("compressor", "collective", "operations per bucket")
    for case in CASES:
        print(row(*case))

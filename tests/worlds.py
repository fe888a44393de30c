"""Simulated ranks with an exchange each, and accounts of what they have given and received."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from comm_hooks import ErrorFeedback, Exchange, TopK
from comm_hooks.collectives import Simulated
from comm_hooks.compressors import Compressor
from comm_hooks.memory import Memory

Tensors = dict[str, torch.Tensor]
MakeMemory = Callable[[], Memory | None]
SHAPES = {"a": (20, 33), "norm": (9,), "b": (7, 5), "c": (20, 33), "d": (21, 32)}


class World:
    """Ranks with an exchange each; by default with the memory that the compressor needs."""

    def __init__(
        self, size: int, compressor: Compressor, memory: MakeMemory | None = None, **options: Any
    ) -> None:
        usual = ErrorFeedback if compressor.bounds_residuals else lambda: None
        self.simulated = Simulated(size)
        self.exchanges = [
            Exchange(compressor, (memory or usual)(), transport=transport, **options)
            for transport in self.simulated
        ]

    def run(self, tensors: Sequence[Tensors], **options: Any) -> None:
        """Average the ranks' tensors in place."""
        rounds = zip(self.exchanges, tensors, strict=True)
        self.simulated.run([exchange.round(own, **options) for exchange, own in rounds])


class Accounts(World):
    """Ranks whose random gradients and means are added up in float64."""

    def __init__(
        self,
        size: int,
        memory: MakeMemory = ErrorFeedback,
        collective: str = "sharded",
        compressor: Compressor | None = None,
        **options: Any,
    ) -> None:
        compressor = compressor or TopK(0.3, block_size=64, value_bits=32)
        super().__init__(size, compressor, memory, collective=collective, min_numel=1, **options)
        self.given = {n: torch.zeros(s, dtype=torch.float64) for n, s in SHAPES.items()}
        self.received = {n: torch.zeros(s, dtype=torch.float64) for n, s in SHAPES.items()}

    def average(self, steps: int, *, silent: bool = False) -> None:
        """Run rounds; with ``silent`` on almost-zero gradients, so that only residuals arrive."""
        for _ in range(steps):
            factor = 1e-12 if silent else 1.0
            gradients = [
                {n: factor * torch.randn(s) for n, s in SHAPES.items()} for _ in self.exchanges
            ]
            for own in gradients:
                for name, gradient in own.items():
                    self.given[name] += gradient.double() / len(gradients)
            self.run(gradients)
            for name, mean in gradients[0].items():
                self.received[name] += mean.double()
                assert all(torch.equal(mean, other[name]) for other in gradients)

    def missing(self) -> float:
        """Return the largest share of a parameter's gradients that has not arrived."""
        lost = {n: (g - self.received[n]).norm() / g.norm() for n, g in self.given.items()}
        return float(max(lost.values()))

    def resume(self, other: "Accounts") -> None:
        states = [exchange.state_dict() for exchange in other.exchanges]
        for exchange in self.exchanges:
            exchange.load_state_dicts(states)
        self.given = {n: v.clone() for n, v in other.given.items()}
        self.received = {n: v.clone() for n, v in other.received.items()}

"""What is compared: a compressor, what is remembered of it, and how its payloads travel."""

from dataclasses import dataclass

from comm_hooks.collectives.base import Transport
from comm_hooks.compressors import Compressor, CountSketch, Identity, Sign, TopK
from comm_hooks.exchange import Exchange
from comm_hooks.exchange.settings import Collective
from comm_hooks.memory import ErrorFeedback


@dataclass(frozen=True)
class Method:
    """One row of the study.

    Args:
        name: what tables and plots call it.
        compressor: None for no communication at all.
        collective: how payloads travel.
        remembers: whether every rank keeps its own residual.
    """

    name: str
    compressor: Compressor | None
    collective: Collective = "all_reduce"
    remembers: bool = False

    @property
    def exchanges(self) -> bool:
        return self.compressor is not None

    def exchange(self, transport: Transport, seed: int) -> Exchange:
        """Return one rank's exchange."""
        assert self.compressor
        memory = ErrorFeedback() if self.remembers else None
        return Exchange(self.compressor, memory, self.collective, seed, transport=transport)


def make_methods(density: float, ratio: float) -> list[Method]:
    """Return the controls, then every compressor in each way in which it can travel.

    Args:
        density: of top-k, whose values are signs with a scale per block.
        ratio: of the Count-Sketch.
    """
    top_k = TopK(density=density, value_bits=1)
    return [
        Method("all-reduce", Identity()),
        Method("none", None),
        Method("top-k, all-gather", top_k, "all_gather", remembers=True),
        Method("top-k, sharded", top_k, "sharded", remembers=True),
        Method("signs, all-gather", Sign(), "all_gather", remembers=True),
        Method("signs, sharded", Sign(), "sharded", remembers=True),
        Method("Count-Sketch, all-reduce", CountSketch(ratio=ratio)),
    ]

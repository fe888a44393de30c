"""SAFL, its server without a sketch, and peers that send as many bytes."""

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.lab.training import NamedParameters, Steps
from benchmarks.studies.safl.methods import UNCOMPRESSED, safl_bytes
from benchmarks.studies.safl.peers import PEERS, Given
from benchmarks.studies.safl_dimension.descent import Build
from comm_hooks.collectives import Transport
from comm_hooks.compressors import Compressor, CountSketch, Identity
from comm_hooks.exchange import Exchange
from comm_hooks.optim import SAFL

BETAS = (0.9, 0.99)
_RANKS = 2  # for which bytes are counted; all have the same gradient, so one is trained


@dataclass(frozen=True)
class Compared:
    """A method.

    Args:
        start: the first learning rate tried.
        fit: returns what makes its steps: of the sketch, the number of parameters and of rounds.
    """

    start: float
    fit: Callable[[Compressor, int, int], Build]


def _safl(compressor: Compressor) -> Build:
    def build(parameters: NamedParameters, transport: Transport, lr: float, seed: int) -> Steps:
        exchange = Exchange(compressor, transport=transport, min_numel=1, min_ndim=1, seed=seed)
        return SAFL(parameters, exchange, lr=lr, local_lr=1.0, local_steps=1, betas=BETAS)

    return build


def _peer(name: str) -> Callable[[Compressor, int, int], Build]:
    def fit(compressor: Compressor, numel: int, rounds: int) -> Build:
        sketch = CountSketch(compressor.payload_nbytes(numel) / (4 * numel))
        budget = safl_bytes(sketch, numel, _RANKS)
        fitted = PEERS[name].fit(Given(numel, _RANKS, rounds, budget, weight_decay=0.0))

        def build(parameters: NamedParameters, transport: Transport, lr: float, seed: int) -> Steps:
            return fitted.make(parameters, transport, {"lr": lr}, seed).steps

        return build

    return fit


METHODS = {
    "safl": Compared(0.06, lambda sketch, numel, rounds: _safl(sketch)),
    UNCOMPRESSED: Compared(0.06, lambda sketch, numel, rounds: _safl(Identity())),
    "cd_adam": Compared(0.06, _peer("cd_adam")),
    "marina": Compared(0.5, _peer("marina")),
    "fetch_sgd": Compared(0.1, _peer("fetch_sgd")),
    "cocktail_sgd": Compared(0.1, _peer("cocktail_sgd")),
}

"""The methods that SAFL is compared with, each at the settings that a budget of bytes allows.

All of them take one step per round, on a model whose parameters are one vector
(:class:`~benchmarks.studies.flat.FlatModel`).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.studies.safl.budget import all_reduced, nearest, sharded
from benchmarks.studies.safl.sketched import BETAS
from benchmarks.studies.training import Build, Client, NamedParameters
from comm_hooks.collectives import Transport
from comm_hooks.compressors import Cocktail, Compressor, CountSketch, RandomK, Sign, TopK
from comm_hooks.exchange import Exchange
from comm_hooks.memory import Differences, ErrorFeedback
from comm_hooks.optim.cocktail_sgd import CocktailSGD
from comm_hooks.optim.differences import CDAdam
from comm_hooks.optim.exchanging import ExchangingOptimizer
from comm_hooks.optim.fetch_sgd import FetchSGD
from comm_hooks.optim.marina import Marina
from comm_hooks.optim.one_bit_adam import OneBitAdam

MOMENTUM = 0.9
ROWS = 3
"""Of FetchSGD's sketch."""

WARM_UP = 0.2
"""The share of the rounds in which 1-bit Adam sends exact gradients; its authors': 15 to 25 %."""

# Blocks as large as they can be: every block costs the bytes of one element at least.
_BLOCK = 65536


@dataclass(frozen=True)
class Given:
    """What a peer is made from.

    Args:
        numel: the model's parameters.
        ranks: how many clients there are.
        rounds: how long a run is.
        budget: the bytes that a client may send per round.
        weight_decay: decoupled.
    """

    numel: int
    ranks: int
    rounds: int
    budget: float
    weight_decay: float


Make = Callable[[NamedParameters, Transport, float, int], ExchangingOptimizer]
"""(parameters, transport, learning rate, seed) -> optimizer"""


@dataclass(frozen=True)
class Peer:
    """A method that can be fitted to a budget.

    Args:
        start: the first learning rate tried.
        fit: the settings that come nearest to a budget, for people, and what makes the optimizer.
        matches: whether its bytes can be chosen at all.
    """

    start: float
    fit: Callable[[Given], tuple[str, Make]]
    matches: bool = True


def build_peer(make: Make, lr: float, seed: int) -> Build:
    """Return what makes a client of a peer."""

    def build(parameters: NamedParameters, transport: Transport) -> Client:
        optimizer = make(parameters, transport, lr, seed)
        return Client(optimizer, optimizer.exchange, optimizer)

    return build


def _fetch_sgd(given: Given) -> tuple[str, Make]:
    def sketch(fraction: float) -> CountSketch:
        return CountSketch(fraction / ROWS)

    def cost(fraction: float) -> float:
        payload = ROWS * sketch(fraction).payload_nbytes(given.numel)
        return all_reduced(payload, given.ranks)

    fraction = nearest(cost, given.budget)
    # As many elements as a row has cells: more cannot be told apart.
    density = min(1.0, fraction / ROWS)

    def make(
        parameters: NamedParameters, transport: Transport, lr: float, seed: int
    ) -> ExchangingOptimizer:
        return FetchSGD(
            parameters,
            Exchange(sketch(fraction), seed=seed, transport=transport),
            lr=lr,
            momentum=MOMENTUM,
            density=density,
            rows=ROWS,
            masking=True,
            weight_decay=given.weight_decay,
        )

    return f"{ROWS} rows, top {density:.1e}, masking", make


def _marina(given: Given) -> tuple[str, Make]:
    full = all_reduced(4 * given.numel, given.ranks)
    share = given.budget / full
    # The first round is exact.  What it leaves of the budget is spent on both kinds of rounds
    # alike; where it leaves nothing, the others get the budget all the same.
    left = (share * given.rounds - 1) / max(1, given.rounds - 1)
    left = left if left > 0 else share
    p = left / 2
    density = nearest(
        lambda d: all_reduced(RandomK(d).payload_nbytes(given.numel), given.ranks) / full,
        (left - p) / (1 - p),
    )

    def make(
        parameters: NamedParameters, transport: Transport, lr: float, seed: int
    ) -> ExchangingOptimizer:
        exchange = Exchange(RandomK(density), seed=seed, transport=transport)
        return Marina(parameters, exchange, lr=lr, p=p, weight_decay=given.weight_decay)

    return f"p {p:.1e}, rand-k {density:.1e}; the first round exact", make


def _cocktail(given: Given) -> tuple[str, Make]:
    def cost_of_mask(mask: float) -> float:
        return sharded(Cocktail(mask, block_size=_BLOCK), given.numel, given.ranks)

    def cost_of_density(density: float) -> float:
        return sharded(Cocktail(1.0, density, block_size=_BLOCK), given.numel, given.ranks)

    compressor = Cocktail(nearest(cost_of_mask, given.budget), block_size=_BLOCK)
    if compressor.mask > 0.999:
        compressor = Cocktail(1.0, nearest(cost_of_density, given.budget), block_size=_BLOCK)

    def make(
        parameters: NamedParameters, transport: Transport, lr: float, seed: int
    ) -> ExchangingOptimizer:
        return CocktailSGD(
            parameters,
            _sharded(compressor, ErrorFeedback(), seed, transport),
            lr=lr,
            momentum=MOMENTUM,
            weight_decay=given.weight_decay,
        )

    return f"mask {compressor.mask:.1e}, top {compressor.density:.2g} of it, 4 bits", make


def _cd_adam(given: Given) -> tuple[str, Make]:
    def cost(density: float) -> float:
        return sharded(TopK(density, _BLOCK), given.numel, given.ranks)

    compressor = TopK(nearest(cost, given.budget), _BLOCK)
    return f"top {compressor.density:.1e}, 16 bits", _make_cd_adam(compressor, given)


def _cd_adam_of_signs(given: Given) -> tuple[str, Make]:
    return "signs: its own bytes", _make_cd_adam(Sign(), given)


def _make_cd_adam(compressor: Compressor, given: Given) -> Make:
    def make(
        parameters: NamedParameters, transport: Transport, lr: float, seed: int
    ) -> ExchangingOptimizer:
        return CDAdam(
            parameters,
            _sharded(compressor, Differences(), seed, transport),
            lr=lr,
            betas=BETAS,
            weight_decay=given.weight_decay,
        )

    return make


def _one_bit_adam(given: Given) -> tuple[str, Make]:
    freeze_step = max(1, round(WARM_UP * given.rounds))

    def make(
        parameters: NamedParameters, transport: Transport, lr: float, seed: int
    ) -> ExchangingOptimizer:
        return OneBitAdam(
            parameters,
            _sharded(Sign(), ErrorFeedback(), seed, transport),
            lr=lr,
            betas=BETAS,
            weight_decay=given.weight_decay,
            freeze_step=freeze_step,
            total_steps=given.rounds,
        )

    return f"exact for {freeze_step} rounds, then signs: its own bytes", make


def _sharded(compressor: Compressor, memory: Any, seed: int, transport: Transport) -> Exchange:
    return Exchange(compressor, memory, "sharded", seed, transport=transport)


PEERS = {
    "fetch_sgd": Peer(1.0, _fetch_sgd),
    "marina": Peer(0.2, _marina),
    "cocktail_sgd": Peer(0.1, _cocktail),
    "cd_adam": Peer(0.016, _cd_adam),
    "cd_adam_signs": Peer(0.002, _cd_adam_of_signs, matches=False),
    "one_bit_adam": Peer(0.002, _one_bit_adam, matches=False),
}

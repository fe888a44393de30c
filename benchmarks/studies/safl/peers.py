"""The methods that SAFL is compared with, each at the settings that a budget of bytes allows.

All of them take one step per round, on a model whose parameters are one vector
(:class:`~benchmarks.lab.simulated.FlatModel`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.lab.runs import Tuned
from benchmarks.lab.training import Client, NamedParameters
from benchmarks.studies.safl.budget import BETAS, all_reduced, nearest, sharded
from comm_hooks.collectives import Transport
from comm_hooks.compressors import Cocktail, Compressor, CountSketch, PermK, RandomK, Sign, TopK
from comm_hooks.exchange import Collective, Exchange
from comm_hooks.memory import Differences, ErrorFeedback
from comm_hooks.optim.published.cocktail_sgd import CocktailSGD
from comm_hooks.optim.published.ef21 import CDAdam
from comm_hooks.optim.published.fetch_sgd import FetchSGD
from comm_hooks.optim.published.marina import Marina
from comm_hooks.optim.published.one_bit_adam import OneBitAdam

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


@dataclass(frozen=True)
class Fitted:
    """A peer with the settings that come nearest to a budget.

    Args:
        note: these settings, for people.
        kind: the optimizer.
        compressor: of its exchange.
        memory: of its exchange: the class, or None.
        collective: by which it exchanges.
        options: of the optimizer.
    """

    note: str
    kind: Callable[..., Any]
    compressor: Compressor
    memory: Callable[[], Any] | None = None
    collective: Collective = "auto"
    options: Mapping[str, Any] = field(default_factory=dict)

    def make(
        self, parameters: NamedParameters, transport: Transport, settings: Tuned, seed: int
    ) -> Client:
        """Return a client."""
        memory = self.memory() if self.memory else None
        exchange = Exchange(self.compressor, memory, self.collective, seed, transport=transport)
        optimizer = self.kind(parameters, exchange, lr=settings["lr"], **self.options)
        return Client(optimizer, exchange, optimizer)


@dataclass(frozen=True)
class Peer:
    """A method that can be fitted to a budget.

    Args:
        start: the first learning rate tried.
        fit: fits it.
        matches: whether its bytes can be chosen at all.
    """

    start: float
    fit: Callable[[Given], Fitted]
    matches: bool = True


def _decay(given: Given) -> dict[str, Any]:
    return {"weight_decay": given.weight_decay}


def _adam(given: Given) -> dict[str, Any]:
    return {"betas": BETAS, **_decay(given)}


def _fetch_sgd(given: Given) -> Fitted:
    def cost(fraction: float) -> float:
        payload = ROWS * CountSketch(fraction / ROWS).payload_nbytes(given.numel)
        return all_reduced(payload, given.ranks)

    fraction = nearest(cost, given.budget)
    # As many elements as a row has cells: more cannot be told apart.
    density = min(1.0, fraction / ROWS)
    return Fitted(
        f"{ROWS} rows, top {density:.1e}, masking",
        FetchSGD,
        CountSketch(fraction / ROWS),
        options={
            **_decay(given),
            "momentum": MOMENTUM,
            "density": density,
            "rows": ROWS,
            "masking": True,
        },
    )


def _marina(given: Given) -> Fitted:
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
    note = f"p {p:.1e}, rand-k {density:.1e}; the first round exact"
    return Fitted(note, Marina, RandomK(density), options={"p": p, **_decay(given)})


def _marina_perm_k(given: Given) -> Fitted:
    p = 1 / given.ranks
    return Fitted(f"p {p:.2g}: its own bytes", Marina, PermK(), options={"p": p, **_decay(given)})


def _cocktail(given: Given) -> Fitted:
    def fitted(make: Callable[[float], Cocktail]) -> Cocktail:
        return make(nearest(lambda x: sharded(make(x), given.numel, given.ranks), given.budget))

    compressor = fitted(lambda mask: Cocktail(mask, block_size=_BLOCK))
    if compressor.mask > 0.999:
        compressor = fitted(lambda density: Cocktail(1.0, density, block_size=_BLOCK))
    note = f"mask {compressor.mask:.1e}, top {compressor.density:.2g} of it, 4 bits"
    options = {"momentum": MOMENTUM, **_decay(given)}
    return Fitted(note, CocktailSGD, compressor, ErrorFeedback, "sharded", options)


def _cd_adam(given: Given) -> Fitted:
    density = nearest(lambda d: sharded(TopK(d, _BLOCK), given.numel, given.ranks), given.budget)
    note = f"top {density:.1e}, 16 bits"
    return Fitted(note, CDAdam, TopK(density, _BLOCK), Differences, "sharded", _adam(given))


def _cd_adam_of_signs(given: Given) -> Fitted:
    note = "signs: its own bytes"
    return Fitted(note, CDAdam, Sign(), Differences, "sharded", _adam(given))


def _one_bit_adam(given: Given) -> Fitted:
    freeze_step = max(1, round(WARM_UP * given.rounds))
    note = f"exact for {freeze_step} rounds, then signs: its own bytes"
    frozen = {"freeze_step": freeze_step, "total_steps": given.rounds}
    return Fitted(note, OneBitAdam, Sign(), ErrorFeedback, "sharded", {**_adam(given), **frozen})


PEERS = {
    "fetch_sgd": Peer(1.0, _fetch_sgd),
    "marina": Peer(0.2, _marina),
    "marina_perm_k": Peer(0.2, _marina_perm_k, matches=False),
    "cocktail_sgd": Peer(0.1, _cocktail),
    "cd_adam": Peer(0.016, _cd_adam),
    "cd_adam_signs": Peer(0.002, _cd_adam_of_signs, matches=False),
    "one_bit_adam": Peer(0.002, _one_bit_adam, matches=False),
}

"""A distinguishing game for each placement of the noise: what it proves of epsilon, and the claim.

In each trial a coin decides whether a sample (a client, a rank) with the largest influence takes
part; one step is released, and its element that the sample moves is the score.  A quarter of the
trials chooses a threshold, the others count its errors, which prove a lower bound of epsilon at
99 % confidence: that of Gaussian privacy where the sample is in every step, else
epsilon >= log((1 - delta - b) / a) with a and b the upper limits of both error rates.

The claim is PLD's for one step.  Fails if a bound is above its claim, or, where the sample is in
every step, below 30 % of it: with sampling, errors of so few trials prove less.
"""

import itertools
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.audit.attack import error_limits, gaussian_epsilon, lower_bound
from benchmarks.micro.timing import print_head
from comm_hooks.collectives import Simulated
from comm_hooks.compressors.identity import Identity
from comm_hooks.exchange import Exchange
from comm_hooks.optim import FedAvg
from comm_hooks.optim.private import DPSGD, GaussianMechanism, PrivacyEngine, RankLevel
from comm_hooks.optim.private.accounting import GaussianEvent, PLDAccountant
from comm_hooks.optim.private.accounting.events import seen_by

LEAST = 0.3
_TRIALS = 6000
_DELTA = 1e-5
_NORM, _SIGMA = 0.5, 1.0
_RANKS = 3
_CONFIDENCE = 0.99
_CLIENTS = 4


def _mechanism(place: Any, observer: str) -> tuple[Callable[[bool], float], float]:
    """Return a game with a clipped sum on one of several ranks, and epsilon."""
    world = Simulated(_RANKS)
    mechanisms = [
        GaussianMechanism(
            Exchange(Identity(), None, transport=transport),
            place=place,
            noise_multiplier=_SIGMA,
            max_grad_norm=_NORM,
            expected_batch_size=1,
        )
        for transport in world
    ]
    message: list[float] = []
    protect = mechanisms[1].protect

    def observed(layout: Any) -> Any:
        hook = protect(layout)
        message[:] = [float(layout.views[0][0, 0])]
        return hook

    mechanisms[1].protect = observed  # type: ignore[method-assign]

    def play(is_in: bool) -> float:
        sums = [{"weight": torch.zeros(16, 16)} for _ in world]
        sums[1]["weight"][0, 0] = _NORM * is_in
        released = world.run([m.round(s) for m, s in zip(mechanisms, sums, strict=True)])
        return message[0] if observer == "rank" else float(released[0].tensors["weight"][0, 0])

    event = mechanisms[0].verdict.recorded(GaussianEvent(_SIGMA, 1.0), place)
    return play, PLDAccountant().epsilon(seen_by(observer, [event]), _DELTA)


class _OneSample(Dataset[torch.Tensor]):
    """One sample, which has no gradient if it is not in."""

    is_in = True

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([100.0 * self.is_in, 0.0, 0.0, 0.0])


def _engine(mode: str, rate: float) -> tuple[Callable[[bool], float], float]:
    """Return a game with whole private steps."""
    data, model = _OneSample(), nn.Linear(4, 1, bias=False)
    engine = PrivacyEngine(accountant="pld")
    model, optimizer, loader = engine.make_private(  # type: ignore[assignment]
        module=model,
        optimizer=DPSGD(model.named_parameters(), lr=1e-9),
        data_loader=DataLoader(data),
        loss_function=lambda model, batch: model(batch)[:, 0],
        noise_multiplier=_SIGMA,
        max_grad_norm=_NORM,
        sample_rate=rate,
        expected_batch_size=1,
        grad_sample_mode=mode,
    )
    batches = itertools.chain.from_iterable(itertools.repeat(loader))

    def play(is_in: bool) -> float:
        data.is_in = is_in
        optimizer.zero_grad()
        optimizer.backward(next(batches))
        optimizer.step()
        assert model.weight.grad is not None
        return float(model.weight.grad[0, 0])

    return play, PLDAccountant().epsilon([GaussianEvent(_SIGMA, rate)], _DELTA)


def _clients() -> tuple[Callable[[bool], float], float]:
    """Return a game with rounds of private clients."""
    engine = PrivacyEngine(accountant="pld")
    participation = engine.private_participation(
        clients=_CLIENTS, sample_rate=1.0, noise_multiplier=_SIGMA, max_norm=_NORM
    )
    model = nn.Linear(4, 1, bias=False)
    exchange = Exchange(Identity(), None, transport=Simulated(1)[0])
    rounds = FedAvg(
        model.named_parameters(), exchange, local_steps=1, lr=1.0, participation=participation
    )

    def play(is_in: bool) -> float:
        before = float(model.weight[0, 0])
        for client in rounds.clients():
            model.weight.grad = torch.zeros(1, 4)
            model.weight.grad[0, 0] = 100.0 * (is_in and client == 0)
            rounds.step()
            rounds.zero_grad()
        return before - float(model.weight[0, 0])

    return play, PLDAccountant().epsilon([GaussianEvent(_SIGMA, 1.0)], _DELTA)


def _rank(place: Any) -> tuple[Callable[[bool], float], float]:
    """Return a game with a rank that has these data, or the opposite ones."""
    model = nn.Linear(16, 16, bias=False)
    private = RankLevel(noise_multiplier=2 * _SIGMA, max_norm=_NORM, placement=place)
    exchange = Exchange(Identity(), None, transport=Simulated(1)[0])
    private.attach(exchange, model)

    def play(is_in: bool) -> float:
        gradient = torch.zeros(16, 16)
        gradient[0, 0] = 100.0 if is_in else -100.0
        exchange.average_({"weight": gradient})
        return float(gradient[0, 0])

    return play, PLDAccountant().epsilon([GaussianEvent(_SIGMA, 1.0)], _DELTA)


def _games() -> Iterator[tuple[str, float, tuple[Callable[[bool], float], float]]]:
    for place in ("central", "shares", "local", "aggregate"):
        yield f"mechanism, {place}, 3 ranks: model", 1.0, _mechanism(place, "model")
    for place in ("shares", "local"):
        yield f"mechanism, {place}, 3 ranks: messages of a rank", 1.0, _mechanism(place, "rank")
    for mode, rate in itertools.product(("functorch", "hooks"), (1.0, 0.5)):
        yield f"engine, {mode}, sample rate {rate:g}: model", rate, _engine(mode, rate)
    yield "clients: model", 1.0, _clients()
    for place in ("central", "shares", "local", "aggregate"):
        yield f"whole rank, {place}: model", 1.0, _rank(place)


def proven(scores: np.ndarray, coins: np.ndarray, sample_rate: float) -> float:
    """Return the epsilon that the scores of trials prove, at 99 % confidence."""
    found, truth = torch.from_numpy(scores).float(), torch.from_numpy(coins)
    if sample_rate == 1:
        return gaussian_epsilon(lower_bound(found, truth, _CONFIDENCE), _DELTA)

    def of_errors(*counts: float) -> float:
        a, b = error_limits(*counts)
        return math.log((1 - _DELTA - b) / a) if b < 1 - _DELTA else 0.0

    return max(0.0, lower_bound(found, truth, _CONFIDENCE, of_errors))


def measure(play: Callable[[bool], float], trials: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the scores of trials, and whether the sample was in."""
    coins = np.random.default_rng().random(trials) < 0.5
    return np.array([play(bool(coin)) for coin in coins]), coins


def main(trials: int = _TRIALS) -> bool:
    """Print the table; return whether a bound is above its claim, or too far below it."""
    warnings.simplefilter("ignore")
    print(f"{trials} trials each, delta {_DELTA:g}, bounds at {_CONFIDENCE:.0%} confidence")
    print_head("release: observer of", "epsilon proven", "epsilon claimed", "share")
    missed = False
    for name, rate, (play, claimed) in _games():
        bound = proven(*measure(play, trials), rate)
        missed |= not LEAST * claimed * (rate == 1) <= bound <= claimed
        print(f"| {name} | {bound:.2f} | {claimed:.2f} | {bound / claimed:.0%} |", flush=True)
    return missed

"""What the mechanism adds is what the accountant is told."""

import contextlib
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from comm_hooks import (
    SRHT,
    ConfigMismatchError,
    CountSketch,
    ErrorFeedback,
    Exchange,
    PermK,
    RandomK,
    Sign,
    TopK,
)
from comm_hooks.collectives import Simulated
from comm_hooks.collectives.requests import AllGather, AllReduce
from comm_hooks.compressors.base import Compressor, Granularity
from comm_hooks.compressors.identity import Identity
from comm_hooks.optim.private.errors import PrivacyError
from comm_hooks.optim.private.noise import mechanism as mechanism_module
from comm_hooks.optim.private.noise.mechanism import (
    GaussianMechanism,
    Released,
)
from comm_hooks.optim.private.noise.secret import Stream
from tests.optim.scenarios import rarely

SIGMA, C, B = 2.0, 0.5, 10.0
MASK = RandomK(density=0.25, unbiased=False)


class World:
    """Mechanisms of all ranks of a simulated world."""

    def __init__(
        self,
        ranks: int,
        compressor: Compressor,
        place: str,
        *,
        memory: bool = False,
        granularity: Granularity = "parameter",
        **kw: Any,
    ) -> None:
        self.world = Simulated(ranks)
        self.mechanisms = [
            GaussianMechanism(
                Exchange(
                    compressor,
                    ErrorFeedback() if memory else None,
                    granularity=granularity,
                    transport=transport,
                ),
                place=place,  # type: ignore[arg-type]
                **{
                    "noise_multiplier": SIGMA,
                    "max_grad_norm": C,
                    "expected_batch_size": B,
                    **kw,
                },
            )
            for transport in self.world
        ]

    def release(self, sums: Sequence[dict[str, torch.Tensor]]) -> list[Released]:
        copies = [{n: t.clone() for n, t in s.items()} for s in sums]
        return self.world.run([m.round(s) for m, s in zip(self.mechanisms, copies, strict=True)])


def zeros() -> dict[str, torch.Tensor]:
    return {
        "weight": torch.zeros(120, 100),
        "second": torch.zeros(120, 100),
        "bias": torch.zeros(50),
    }


def gradients(rank: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    return {n: torch.randn(t.shape, generator=generator) for n, t in zeros().items()}


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("place", ["central", "shares", "local", "aggregate"])
@pytest.mark.parametrize("granularity", ["parameter", "bucket"])
def test_the_variance_is_the_one_that_was_told(
    place: str, ranks: int, granularity: Granularity
) -> None:
    world = World(ranks, Identity(), place, granularity=granularity)
    count, squares, total = 0, 0.0, 0.0
    for _ in range(20):
        released = world.release([zeros()] * ranks)[0]
        flat = torch.cat([t.flatten() for t in released.tensors.values()]).double()
        count += flat.numel()
        squares += float(flat.square().sum())
        total += float(flat.sum())
    told = released.noise_variance
    assert told == pytest.approx((ranks if place == "local" else 1) * (SIGMA * C / B) ** 2)
    # Of 481,000 draws the relative standard deviation of the variance is 0.2 %.
    assert squares / count == pytest.approx(told, rel=0.013)
    assert abs(total / count) < 6 * (told / count) ** 0.5


@pytest.mark.parametrize("place", ["central", "shares", "local", "aggregate"])
def test_without_noise_it_is_the_sum_over_ranks_by_a_public_divisor(place: str) -> None:
    world = World(3, Identity(), place, noise_multiplier=1e-9)
    results = world.release([gradients(rank) for rank in range(3)])
    for result in results:
        for name, value in result.tensors.items():
            expected = sum(gradients(rank)[name] for rank in range(3)) / B
            torch.testing.assert_close(value, expected)


@pytest.mark.parametrize(
    ("place", "compressor", "memory"),
    [
        ("central", TopK(density=1 / 8), True),
        ("local", Sign(), True),
        ("shares", MASK, True),
        ("aggregate", CountSketch(ratio=0.25), False),
        *rarely(("central", Sign(), True), ("local", TopK(density=1 / 8), True)),
    ],
)
def test_compressed_releases_are_equal_on_all_ranks_and_of_unknown_variance(
    place: str, compressor: Compressor, memory: bool
) -> None:
    world = World(3, compressor, place, memory=memory)
    for _ in range(3):
        results = world.release([gradients(rank) for rank in range(3)])
        for result in results:
            assert result.noise_variance is None
            assert all(torch.equal(result.tensors[n], t) for n, t in results[0].tensors.items())
    assert all(t.isfinite().all() for t in results[0].tensors.values())


@pytest.mark.parametrize(
    ("place", "compressor", "variance"),
    [
        ("shares", MASK, 1.0),
        ("local", MASK, 2.0),
        ("central", MASK, 1.0),
        ("aggregate", MASK, 1.0),
        ("aggregate", CountSketch(ratio=0.25), 4.0),
        *rarely(("aggregate", RandomK(density=0.25), 16.0), ("aggregate", SRHT(ratio=0.25), 4.0)),
    ],
)
def test_noise_on_what_is_sent_has_the_size_of_what_a_sample_can_do_there(
    place: str, compressor: Compressor, variance: float
) -> None:
    """Decompressed, an element that is not zero reads one noised element of a payload.

    An element of an SRHT's mixes them all, which leaves the mean square over elements as it is.
    """
    world = World(2, compressor, place)
    squares, count = 0.0, 0
    for _ in range(50):
        tensors = world.release([zeros()] * 2)[0].tensors
        for name in ("weight", "second"):
            drawn = tensors[name][tensors[name] != 0].double()
            squares += float(drawn.square().sum())
            count += drawn.numel()
    # Of 300,000 draws the relative standard deviation of the variance is 0.26 %.
    assert squares / count == pytest.approx(variance * (SIGMA * C / B) ** 2, rel=0.016)


def test_the_norm_bound_is_that_of_the_very_parameters() -> None:
    """1026 elements in a quarter as many sums: some sums have five, where other sizes have four."""
    world = World(1, CountSketch(ratio=0.25), "aggregate")
    drawn = [world.release([{"w": torch.zeros(54, 19)}])[0].tensors["w"] for _ in range(100)]
    std = float(torch.stack(drawn).double().square().mean().sqrt())
    assert std == pytest.approx(5**0.5 * SIGMA * C / B, rel=0.03)


def test_owners_and_ranks_draw_independently() -> None:
    """Equal noise on two ranks would be coherent: the sum's variance would be N times the told."""
    world = World(4, Identity(), "shares")
    flat = torch.cat([t.flatten() for t in world.release([zeros()] * 4)[0].tensors.values()])
    assert float(flat.var()) == pytest.approx((SIGMA * C / B) ** 2, rel=0.05)
    world = World(2, Identity(), "central")
    weight = world.release([zeros()] * 2)[0].tensors["weight"].flatten()
    halves = weight.view(2, -1)
    assert abs(float(torch.corrcoef(halves)[0, 1])) < 0.1


@pytest.mark.parametrize("place", ["central", "shares", "local", "aggregate"])
def test_no_noise_is_ever_used_twice(place: str) -> None:
    """Not in another step, nor in a run that starts again with the same seeds."""
    drawn = []
    for _ in range(2):
        torch.manual_seed(42)
        world = World(2, Identity(), place)
        for _ in range(2):
            drawn.append(world.release([zeros()] * 2)[0].tensors["weight"].flatten())
    correlations = torch.corrcoef(torch.stack(drawn)).triu(1)
    assert correlations.abs().max() < 0.06


@pytest.mark.parametrize("place", ["central", "shares", "local", "aggregate"])
def test_a_release_that_failed_and_is_tried_again_has_other_noise(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the failed one had sent is seen; the same noise around other sums would show those."""
    mechanism = World(1, Identity(), place).mechanisms[0]
    mechanism.release(zeros())
    transport, sent = mechanism.exchange.transport, []
    perform = transport.perform

    def lose_the_last(request: Any) -> Any:
        sent.append(request)
        reply = perform(request)
        if isinstance(request, AllGather | AllReduce) and place != "aggregate":
            raise ConnectionError("the link is down")
        return reply

    drawn = []
    add_noise = mechanism_module.add_noise_

    def note(tensors: Any, std: float, stream: Stream) -> None:
        clean = tensors[0].clone()
        add_noise(tensors, std, stream)
        drawn.append(tensors[0] - clean)

    monkeypatch.setattr(mechanism_module, "add_noise_", note)
    monkeypatch.setattr(transport, "perform", lose_the_last)
    for _ in range(2):
        with contextlib.suppress(ConnectionError):
            mechanism.release(zeros())
    assert len(drawn) == 2
    assert not torch.equal(*drawn)
    assert sent


def test_a_compressed_central_release_loses_nothing() -> None:
    """Only owners remember, what they remember is noised, and it all arrives in the end."""
    world = World(2, TopK(density=1 / 8), "central", memory=True, noise_multiplier=1e-9)
    arrived = torch.zeros(120, 100)
    steps = 40
    for _ in range(steps):
        arrived += world.release([gradients(rank) for rank in range(2)])[0].tensors["weight"]
    expected = steps * (gradients(0)["weight"] + gradients(1)["weight"]) / B
    assert float((arrived - expected).norm() / expected.norm()) < 0.2
    for mechanism in world.mechanisms:
        assert not mechanism.exchange.state_dict()["memory"]


def test_what_is_refused_before_anything_is_sent() -> None:
    with pytest.raises(PrivacyError, match=r"rule 5\)"):
        World(2, TopK(density=0.1), "shares", memory=True)
    with pytest.raises(ValueError, match="place must be one of central, shares, local"):
        World(1, Identity(), "rank_0")
    for setting in ("noise_multiplier", "max_grad_norm", "expected_batch_size"):
        with pytest.raises(ValueError, match=rf"{setting} must lie in \(0, inf\), got nan"):
            World(1, Identity(), "central", **{setting: float("nan")})
    for compressor, collective in ((Identity(), "all_reduce"), (PermK(), "auto")):
        exchange = Exchange(compressor, collective=collective, transport=Simulated(1)[0])  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="'central' needs owners of shards"):
            GaussianMechanism(
                exchange, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=1
            )


def test_ranks_with_different_noise_are_found() -> None:
    world = World(2, Identity(), "shares")
    other = World(2, Identity(), "shares", noise_multiplier=1.5)
    mixed = [world.mechanisms[0], other.mechanisms[1]]
    with pytest.raises(
        ConfigMismatchError, match=r"noise_multiplier is 2\.0 on rank 0, 1\.5 on rank 1"
    ):
        world.world.run([m.round(zeros()) for m in mixed])

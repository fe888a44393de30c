"""What private training does at the three places of a round."""

from collections.abc import Sequence
from typing import ClassVar

import pytest
import torch

from comm_hooks import CountSketch, ErrorFeedback, Exchange, Quantize, RandomK, Sign, TopK
from comm_hooks.collectives import Simulated
from comm_hooks.compressors.base import Compressor
from comm_hooks.compressors.identity import Identity
from comm_hooks.exchange.layout import Layout
from comm_hooks.exchange.noise_hook import NoiseHook, Place
from comm_hooks.memory.base import Memory
from tests.worlds import World

RANKS = 3


class Recorder(NoiseHook):
    """Clips to a norm, adds a known vector, and notes what it saw."""

    place: ClassVar[Place]

    def __init__(self, place: Place, limit: float = 1e9, shift: float = 0.0) -> None:
        self.place = place  # type: ignore[misc]
        self.limit = limit
        self.shift = shift
        self.totals: list[list[torch.Tensor]] = []

    def clip_(self, message: Sequence[torch.Tensor]) -> None:
        norm = torch.linalg.vector_norm(torch.cat([m.flatten() for m in message]))
        for tensor in message:
            tensor.mul_((self.limit / norm).clamp(max=1.0))

    def add_noise_(self, total: Sequence[torch.Tensor]) -> None:
        self.totals.append([t.clone() for t in total])
        for tensor in total:
            tensor.add_(self.shift)


class Guarding:
    """A gate that lets every round through, with a hook."""

    def __init__(self, hook: NoiseHook) -> None:
        self.hook = hook

    def require_open(self, *, protects: bool) -> None:
        pass

    def protect(self, layout: Layout) -> NoiseHook:
        return self.hook


def guarded(exchange: Exchange, guard: NoiseHook | None) -> Exchange:
    exchange.gate = Guarding(guard) if guard else None
    return exchange


def tensors(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randn(50, 40, generator=generator),
        "other": torch.randn(50, 40, generator=generator),
        "odd": torch.randn(1030, 2, generator=generator),
        "bias": torch.randn(7, generator=generator),
    }


def run(
    compressor: Compressor,
    guards: Sequence[NoiseHook | None],
    memory: bool = False,
    collective: str = "auto",
) -> tuple[list[dict[str, torch.Tensor]], list[Exchange]]:
    make = ErrorFeedback if memory else lambda: None
    world = World(RANKS, compressor, make, collective=collective)
    results = [tensors(rank) for rank in range(RANKS)]
    rounds = zip(world.exchanges, results, guards, strict=True)
    world.simulated.run([guarded(e, guard).round(own) for e, own, guard in rounds])
    return results, world.exchanges


def total() -> dict[str, torch.Tensor]:
    return {name: sum(tensors(r)[name] for r in range(RANKS)) for name in tensors(0)}  # type: ignore[misc]


@pytest.mark.parametrize("place", ["payload", "message", "owner"])
def test_a_safeguard_that_does_nothing_changes_nothing(place: Place) -> None:
    guards = [Recorder(place) for _ in range(RANKS)]
    results, _ = run(Identity(), guards)
    for result in results:
        for name, value in total().items():
            torch.testing.assert_close(result[name], value / RANKS)
    assert all(len(guard.totals) == 1 for guard in guards)


@pytest.mark.parametrize("place", ["payload", "message", "owner"])
def test_noise_is_added_to_the_sum_once(place: Place) -> None:
    shifted, _ = run(Identity(), [Recorder(place, shift=6.0) for _ in range(RANKS)])
    for result in shifted:
        for name, value in total().items():
            torch.testing.assert_close(result[name], (value + 6.0) / RANKS)


@pytest.mark.parametrize(
    ("compressor", "place"),
    [
        (CountSketch(ratio=0.25), "payload"),
        (CountSketch(ratio=0.25), "message"),
        (RandomK(density=0.25, unbiased=False), "payload"),
        (TopK(density=0.125), "message"),
        (Sign(), "message"),
        (Quantize(bits=4), "message"),
    ],
)
def test_messages_are_clipped_as_they_arrive(compressor: Compressor, place: Place) -> None:
    """Compare with decompressing and clipping by hand, rank by rank."""
    guards = [Recorder(place, limit=2.0) for _ in range(RANKS)]
    results, _ = run(compressor, guards)
    expected = {name: torch.zeros_like(t) for name, t in tensors(0).items()}
    for rank in range(RANKS):
        # Alone, a rank's mean is its own message; but a compressor may look at who sends it.
        zeros = [
            tensors(r) if r == rank else {n: torch.zeros_like(t) for n, t in tensors(r).items()}
            for r in range(RANKS)
        ]
        World(RANKS, compressor, lambda: None, collective="all_gather").run(zeros)
        message = {name: t * RANKS for name, t in zeros[0].items()}
        if place == "message":
            flat = torch.cat([t.flatten() for t in message.values()])
            scale = (2.0 / flat.norm()).clamp(max=1.0)
        else:
            assert guards[0].totals[0][0].norm() <= 2.0 * RANKS * (1 + 1e-5)
            scale = _payload_scale(compressor, tensors(rank), limit=2.0)
        for name in expected:
            expected[name] += message[name] * scale
    for result in results:
        for name, value in expected.items():
            torch.testing.assert_close(result[name], value / RANKS, rtol=1e-4, atol=1e-5)


def _payload_scale(
    compressor: Compressor, vectors: dict[str, torch.Tensor], limit: float
) -> torch.Tensor:
    """Clip a payload that is sent in a world of one."""
    guard = Recorder("payload", limit=limit)
    world = Simulated(1)
    unclipped = Recorder("payload")
    for g in (guard, unclipped):
        exchange = Exchange(compressor, transport=world[0])
        guarded(exchange, g).average_({n: t.clone() for n, t in vectors.items()})
    return (guard.totals[0][0].norm() / unclipped.totals[0][0].norm()).clamp(max=1.0)


def test_owners_see_the_exact_sum_and_compress_what_they_made_of_it() -> None:
    """Nothing is lost: the means sent and the owners' residuals add up to the noised sums."""
    guards = [Recorder("owner", shift=0.5) for _ in range(RANKS)]
    world = Simulated(RANKS)
    exchanges = [Exchange(TopK(density=1 / 16), ErrorFeedback(), transport=t) for t in world]
    arrived = {name: torch.zeros_like(t) for name, t in tensors(0).items()}
    steps = 5
    for _ in range(steps):
        results = [tensors(rank) for rank in range(RANKS)]
        world.run(
            [
                guarded(e, guard).round(result)
                for e, result, guard in zip(exchanges, results, guards, strict=True)
            ]
        )
        for name in arrived:
            assert all(torch.equal(results[0][name], result[name]) for result in results)
            arrived[name] += results[0][name]
    owned = sum(guard.totals[0][0].numel() for guard in guards)
    assert owned >= 7, "every owner sees its shard of the exempt parameters"
    for name in ("weight", "other", "odd"):
        numel = arrived[name].numel()
        shards = [e.state_dict()["server_memory"][name].float() for e in exchanges]
        residual = torch.cat([shard.flatten() for shard in shards])[:numel]
        expected = steps * (total()[name] + 0.5) / RANKS
        torch.testing.assert_close(
            arrived[name] + residual.view_as(expected), expected, rtol=1e-4, atol=1e-3
        )
        assert not any(e.state_dict()["memory"] for e in exchanges), "ranks remember nothing"


def test_the_traffic_of_an_exact_uplink_is_counted() -> None:
    numel = sum(t.numel() for t in tensors(0).values())
    _, exchanges = run(TopK(density=1 / 16), [Recorder("owner") for _ in range(RANKS)])
    sent = exchanges[0].stats()["bytes_sent"]
    exact = numel * 4 * (RANKS - 1) / RANKS
    assert exact < sent < exact * 1.15


@pytest.mark.parametrize(
    ("compressor", "place", "collective", "needed"),
    [
        (TopK(density=0.1), "payload", "auto", "all_reduce"),
        (CountSketch(ratio=0.1), "payload", "all_gather", "all_reduce"),
        (TopK(density=0.1), "owner", "all_gather", "sharded"),
        (TopK(density=0.1), "message", "sharded", "all_gather"),
    ],
)
def test_a_place_that_is_not_on_the_way_is_refused(
    compressor: Compressor, place: Place, collective: str, needed: str
) -> None:
    with pytest.raises(ValueError, match=f"needs collective='{needed}'"):
        run(compressor, [Recorder(place) for _ in range(RANKS)], collective=collective)


@pytest.mark.parametrize("place", ["message", "owner"])
def test_what_does_not_add_up_is_refused(place: Place) -> None:
    with pytest.raises(ValueError, match=r"does not decode to the sum .* use overlap=0"):
        run(TopK(density=0.1, overlap=0.5), [Recorder(place) for _ in range(RANKS)])


def test_a_round_with_and_one_without_a_safeguard_share_an_exchange() -> None:
    world = Simulated(1)
    exchange = Exchange(Identity(), transport=world[0])
    for guard, expected in ((None, 1.0), (Recorder("payload", shift=2.0), 3.0), (None, 1.0)):
        vector = torch.ones(64, 64)
        guarded(exchange, guard).average_({"w": vector})
        assert (vector == expected).all()


def test_error_feedback_stays_before_the_clipping() -> None:
    """A client's residual is its own: it does not depend on how the message is clipped."""
    loose, tight = [], []
    for limit, residuals in ((1e9, loose), (1e-3, tight)):
        _, exchanges = run(
            TopK(density=1 / 16), [Recorder("message", limit=limit)] * RANKS, memory=True
        )
        residuals += [e.memory for e in exchanges]
    for one, other in zip(loose, tight, strict=True):
        assert isinstance(one, Memory)
        assert isinstance(other, Memory)
        assert one.norm() == other.norm() > 0

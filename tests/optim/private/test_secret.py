"""What is drawn from a secret cannot be guessed, repeated, or met a second time."""

import copy
import hashlib
import itertools
import os
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from comm_hooks import CountSketch, Exchange
from comm_hooks.collectives import Simulated
from comm_hooks.optim.private import (
    GaussianMechanism,
    PoissonSampler,
    PrivacyError,
    PrivateParticipation,
    Secret,
)
from comm_hooks.optim.private.noise.secret import Stream

KNOWN = bytes(range(32))


def first(stream: Stream) -> float:
    return float(stream.generator().random())


def mechanism(place: str = "local") -> GaussianMechanism:
    exchange = Exchange(CountSketch(ratio=0.5), transport=Simulated(1)[0])
    return GaussianMechanism(
        exchange,
        place=place,  # type: ignore[arg-type]
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        expected_batch_size=1,
    )


def participation() -> PrivateParticipation:
    return PrivateParticipation(clients=9, sample_rate=0.5, noise_multiplier=1.0, max_norm=1.0)


def test_streams_differ_by_each_part_of_their_label_and_by_secret() -> None:
    secret = Secret()
    labels = [("noise", 0, 0), ("noise", 0, 1), ("noise", 1, 0), ("masks", 0, 0), ("noise", 1, 1)]
    drawn = [first(secret.stream(p, rank=r, step=s)) for p, r, s in labels]
    assert len(set(drawn)) == len(labels)
    assert drawn == [first(secret.stream(p, rank=r, step=s)) for p, r, s in labels]
    assert first(Secret().stream("noise", rank=0, step=0)) != drawn[0]
    shared = [Secret(b"k" * 100), Secret(b"k" * 100)]
    one, other = (first(s.stream("noise", rank=0, step=0)) for s in shared)
    assert one == other


def test_labels_cannot_be_read_in_two_ways() -> None:
    """All that can be made of these characters, where only the parts' borders move."""
    parts = ["".join(p) for n in range(1, 5) for p in itertools.product("a1 ", repeat=n)]
    labels = [(p, r, s, k) for p in parts for r in (1, 11) for s in (1, 11) for k in range(2)]
    seeds = set()
    secret = Secret(KNOWN)
    for purpose, rank, step, piece in labels:
        stream = secret.stream(purpose, rank=rank, step=step)
        numbers = [first(stream) for _ in range(piece + 1)]
        seeds.add(numbers[-1])
    assert len(seeds) == len(labels)


def test_a_piece_is_drawn_from_all_of_its_seed() -> None:
    """The generator is Philox with the key and the counter of the keyed hash, and nothing less."""
    secret = Secret(KNOWN)
    key = hashlib.blake2b(KNOWN).digest()
    digest = hashlib.blake2b(b"5 noise 2 7 0", key=key, digest_size=32).digest()
    words = np.frombuffer(digest, "<u8")
    expected = np.random.Philox(key=words[:2], counter=np.array([0, 0, *words[2:]], np.uint64))
    stream = secret.stream("noise", rank=2, step=7)
    assert (
        stream.generator().integers(0, 1 << 63, 9).tolist()
        == np.random.Generator(expected).integers(0, 1 << 63, 9).tolist()
    )


def test_draws_are_never_above_their_rate() -> None:
    class Uniform:
        def random(self, count: int) -> Any:
            return np.arange(count) * 2.0**-53

    stream = Secret(KNOWN).stream("sampling", rank=0, step=0)
    stream.generator = Uniform  # type: ignore[assignment, method-assign]
    for ticks in (0.3, 1.0, 1.7, 4.0, 4.2):
        assert len(stream.draw(9, ticks * 2.0**-53)) == int(ticks)


@pytest.mark.parametrize(
    "make", [Secret, mechanism, lambda: PoissonSampler(9, 0.5, 3), participation]
)
@pytest.mark.parametrize("attempt", [copy.copy, copy.deepcopy, pickle.dumps])
def test_what_draws_from_a_secret_cannot_be_copied(
    make: Callable[[], Any], attempt: Callable[[Any], Any]
) -> None:
    with pytest.raises(TypeError, match=f"a {type(make()).__name__} cannot be saved, copied"):
        attempt(make())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.parametrize("place", ["central", "shares", "local", "aggregate"])
def test_a_forked_child_draws_nothing(place: str) -> None:
    made = mechanism(place)
    made.release({"w": torch.zeros(64)})
    sampler = iter(PoissonSampler(50, 0.5, 3))

    def attempts() -> None:
        for attempt in (lambda: made.release({"w": torch.zeros(64)}), lambda: next(sampler)):
            with pytest.raises(PrivacyError, match="this process was forked off"):
                attempt()
        assert Secret().stream("noise", rank=0, step=0).draw(100, 0.5), "a new one may be drawn"

    assert in_a_child(attempts)
    assert made.release({"w": torch.zeros(64)}).tensors["w"].any(), "the parent goes on"


def in_a_child(work: Callable[[], None]) -> bool:
    """Return whether ``work`` succeeds in a forked process."""
    child = os.fork()
    if not child:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1] == 0

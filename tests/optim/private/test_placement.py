"""The validity table: every row, with what is valid instead."""

import math
from dataclasses import replace
from typing import Any

import pytest

from comm_hooks import (
    SRHT,
    CountSketch,
    ErrorFeedback,
    Exchange,
    GaussianSketch,
    PermK,
    Quantize,
    RandomK,
    Sign,
    TopK,
)
from comm_hooks.collectives import Simulated
from comm_hooks.compressors.base import Compressor
from comm_hooks.compressors.identity import Identity
from comm_hooks.optim.private.errors import PrivacyError
from comm_hooks.optim.private.noise.placement import Place, Scheme, Verdict, judge

MASK = RandomK(density=0.1, unbiased=False)
NON_LINEAR: list[Compressor] = [
    TopK(density=0.01),
    Sign(),
    Quantize(bits=8),
    Identity(16),
    PermK(),
]
LINEAR: list[Compressor] = [MASK, CountSketch(ratio=0.1), SRHT(ratio=0.1), Identity()]
ANY = NON_LINEAR + LINEAR


def refused(scheme: Scheme, rule: int, instead: str) -> None:
    with pytest.raises(PrivacyError, match=rf"^not private \(rule {rule}\): ") as error:
        judge(scheme)
    problem, _, remedy = str(error.value).partition("Valid instead: ")
    assert problem
    assert instead in remedy
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("compressor", ANY, ids=str)
@pytest.mark.parametrize("feedback", ["none", "after_noise"])
def test_noise_once_on_the_exact_sum_goes_with_anything(
    compressor: Compressor, feedback: str
) -> None:
    verdict = judge(Scheme(place="central", compressor=compressor, feedback=feedback, world_size=4))  # type: ignore[arg-type]
    assert (verdict.multiplier, verdict.peer_multiplier, verdict.std) == (1, 0, 1)


@pytest.mark.parametrize("compressor", ANY, ids=str)
def test_full_noise_on_every_rank_goes_with_anything_and_protects_from_peers(
    compressor: Compressor,
) -> None:
    verdict = judge(
        Scheme(place="local", compressor=compressor, feedback="after_noise", world_size=8)
    )
    assert (verdict.multiplier, verdict.peer_multiplier, verdict.std) == (1, 1, 1)
    assert verdict.variance_of_sum == (8 if compressor == Identity() else None)


@pytest.mark.parametrize("compressor", LINEAR, ids=str)
def test_shares_go_with_one_linear_map(compressor: Compressor) -> None:
    verdict = judge(
        Scheme(place="shares", compressor=compressor, feedback="after_noise", world_size=4)
    )
    assert (verdict.multiplier, verdict.peer_multiplier, verdict.std) == (1, 0.5, 0.5)
    assert verdict.variance_of_sum == (1 if compressor == Identity() else None)


@pytest.mark.parametrize("compressor", NON_LINEAR, ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_shares_do_not_go_with_anything_else(compressor: Compressor, ranks: int) -> None:
    refused(Scheme(place="shares", compressor=compressor, world_size=ranks), 5, "'local'")


@pytest.mark.parametrize("place", ["shares", "local", "central"])
@pytest.mark.parametrize("bits", [4, 16, 32])
def test_shares_do_not_go_with_residuals_that_are_rounded_on_each_rank(
    place: Place, bits: int
) -> None:
    world = Simulated(4)
    exchange = Exchange(MASK, ErrorFeedback(bits=bits), transport=world[0])
    scheme = Scheme.of(exchange, place)
    if place == "shares" and bits < 32:
        refused(scheme, 5, "ErrorFeedback(bits=32)")
        refused(replace(scheme, place="rank_0"), 3, "'local'")
        judge(replace(scheme, feedback="none"))
    else:
        judge(scheme)


def test_what_ranks_save_has_the_noise_of_what_they_remember() -> None:
    def saved(place: Place, **settings: Any) -> float:
        scheme = Scheme(place=place, compressor=MASK, world_size=4, **settings)
        return judge(scheme).checkpoint_multiplier

    assert saved("shares") == 1.0
    assert saved("shares", feedback="after_noise") == 0.5
    assert saved("rank_0", feedback="after_noise") == 0.0
    for place in ("central", "local"):
        assert saved(place, feedback="after_noise") == 1.0  # type: ignore[arg-type]
    assert saved("aggregate") == 1.0
    assert saved("aggregate", unit="client", clipping="message") == 0.0


def test_small_parameters_in_bfloat16_count_as_well() -> None:
    refused(Scheme(place="shares", compressor=MASK, exempt=Identity(16)), 5, "exempt_bits=32")
    refused(Scheme(place="aggregate", compressor=MASK, exempt=Identity(16)), 8, "exempt_bits=32")
    judge(Scheme(place="local", compressor=MASK, exempt=Identity(16)))


@pytest.mark.parametrize("compressor", NON_LINEAR, ids=str)
def test_noise_on_one_rank_does_not_survive_per_rank_compression(compressor: Compressor) -> None:
    refused(Scheme(place="rank_0", compressor=compressor, world_size=4), 3, "'local'")
    judge(Scheme(place="rank_0", compressor=MASK, world_size=4))


@pytest.mark.parametrize("compressor", NON_LINEAR, ids=str)
def test_noise_on_the_sum_of_what_was_made_of_clean_gradients(compressor: Compressor) -> None:
    refused(Scheme(place="aggregate", compressor=compressor), 8, "'central'")


@pytest.mark.parametrize(
    ("compressor", "rule", "bound"),
    [
        (MASK, 7, 1.0),
        (Identity(), 7, 1.0),
        (RandomK(density=0.25), 9, 4.0),
        (CountSketch(ratio=0.25), 9, 2.0),
        (SRHT(ratio=0.25), 9, 2.0),
    ],
)
def test_noise_on_the_aggregate_grows_with_what_lengthens(
    compressor: Compressor, rule: int, bound: float
) -> None:
    verdict = judge(Scheme(place="aggregate", compressor=compressor, world_size=4))
    assert verdict.rule == rule
    assert verdict.std == pytest.approx(bound, rel=1e-3)
    assert (verdict.multiplier, verdict.peer_multiplier) == (1, 0)


def test_a_norm_without_a_bound_is_refused() -> None:
    assert math.isinf(GaussianSketch(ratio=0.1).norm_bound(1000))
    refused(Scheme(place="aggregate", compressor=GaussianSketch(ratio=0.1)), 9, "count_sketch")
    judge(Scheme(place="shares", compressor=GaussianSketch(ratio=0.1)))


@pytest.mark.parametrize("place", ["central", "shares", "local", "aggregate", "rank_0"])
def test_what_is_invalid_wherever_the_noise_is(place: str) -> None:
    base = {"place": place, "compressor": MASK, "world_size": 2}
    refused(Scheme(**base, feedback="before_noise"), 10, "noised")  # type: ignore[arg-type]
    refused(Scheme(**base, scaling="private"), 16, "public")  # type: ignore[arg-type]
    refused(Scheme(**base, clipping="micro_batch"), 18, "every sample")  # type: ignore[arg-type]
    refused(Scheme(**base, divisor="actual"), 19, "expected_batch_size")  # type: ignore[arg-type]
    judge(Scheme(**base, scaling="public"))  # type: ignore[arg-type]


@pytest.mark.parametrize("compressor", [*ANY, GaussianSketch(ratio=0.1)], ids=str)
@pytest.mark.parametrize("feedback", ["none", "before_noise"])
def test_clients_may_compress_and_remember_as_they_like(
    compressor: Compressor, feedback: str
) -> None:
    verdict = judge(
        Scheme(
            unit="client",
            place="aggregate",
            compressor=compressor,
            feedback=feedback,  # type: ignore[arg-type]
            clipping="message",
        )
    )
    linear_sketch = compressor.linear and compressor != Identity() and compressor != PermK()
    assert verdict.rule == (13 if linear_sketch else 11)
    assert (verdict.multiplier, verdict.std) == (1, 1)


@pytest.mark.parametrize("compressor", [CountSketch(ratio=0.1), Quantize(bits=2), RandomK(0.1)])
def test_clients_that_clip_before_what_lengthens(compressor: Compressor) -> None:
    refused(
        Scheme(unit="client", place="aggregate", compressor=compressor), 12, "clipping='message'"
    )
    judge(Scheme(unit="client", place="aggregate", compressor=MASK))


def test_clients_are_weighted_alike_and_noised_on_arrival() -> None:
    refused(Scheme(unit="client", place="aggregate", weights="examples"), 11, "equally")
    refused(Scheme(unit="client", place="central"), 11, "'aggregate'")


def test_verdicts_scale_with_the_ranks() -> None:
    assert judge(Scheme(place="shares", world_size=9)) == Verdict(4, 1.0, 1 / 3, 1 / 3, 1.0)
    assert judge(Scheme(place="local", world_size=9)) == Verdict(6, 1.0, 1.0, 1.0, 9.0)

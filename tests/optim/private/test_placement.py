"""The validity table: every row, with what is valid instead."""

from dataclasses import replace
from typing import Any, get_args

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


Case = dict[str, Any]
SKETCH = CountSketch(ratio=0.1)
UNBOUNDED = GaussianSketch(ratio=0.1)


def case(place: str, compressor: Compressor | None = None, **settings: Any) -> Case:
    return {"place": place, "compressor": compressor or MASK, "world_size": 4, **settings}


def client(compressor: Compressor, **settings: Any) -> Case:
    return {**case("aggregate", compressor), "unit": "client", "clipping": "message", **settings}


# The rule and the remedy of each refusal.
REFUSED: list[tuple[Case, int, str]] = [
    *((case("shares", c, world_size=n), 5, "'local'") for c in NON_LINEAR for n in (1, 8)),
    *((case("aggregate", c), 8, "'central'") for c in NON_LINEAR),
    (case("shares", exempt=Identity(16)), 5, "exempt_bits=32"),
    (case("aggregate", exempt=Identity(16)), 8, "exempt_bits=32"),
    (case("aggregate", UNBOUNDED), 9, "count_sketch"),
    *((case(p, feedback="before_noise"), 10, "noised") for p in get_args(Place)),
    *((case(p, clipping="message"), 18, "clipping='unit'") for p in get_args(Place)),
    *(
        (client(c, clipping="unit"), 12, "clipping='message'")
        for c in (SKETCH, Quantize(bits=2), RandomK(0.1))
    ),
    (client(MASK, place="central"), 11, "'aggregate'"),
]
# The multiplier against peers, and the standard deviation.
VALID: list[tuple[Case, tuple[float, float]]] = [
    *((case("central", c, feedback="after_noise"), (0, 1)) for c in ANY),
    *((case("local", c, feedback="after_noise"), (1, 1)) for c in ANY),
    *((case("shares", c, feedback="after_noise"), (0.5, 0.5)) for c in LINEAR),
    (case("shares", UNBOUNDED), (0.5, 0.5)),
    (case("local", exempt=Identity(16)), (1, 1)),
    *((case(p), (0, 1)) for p in ("central", "aggregate")),
    *((client(c, feedback=f), (0, 1)) for c in ANY for f in ("none", "before_noise")),
    (client(MASK, clipping="unit"), (0, 1)),
]


@pytest.mark.parametrize(("settings", "rule", "instead"), REFUSED, ids=str)
def test_invalid_schemes_are_refused_with_a_remedy(settings: Case, rule: int, instead: str) -> None:
    with pytest.raises(PrivacyError, match=rf"^not private \(rule {rule}\): ") as error:
        judge(Scheme(**settings))
    problem, _, remedy = str(error.value).partition("Valid instead: ")
    assert problem
    assert instead in remedy
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("settings", "expected"), VALID, ids=str)
def test_valid_schemes_have_their_guarantee(settings: Case, expected: tuple[float, float]) -> None:
    verdict = judge(Scheme(**settings))
    assert (verdict.peer_multiplier, verdict.std) == expected
    dense = settings["compressor"] == Identity() and "exempt" not in settings
    ranks = 4 if settings["place"] == "local" else 1
    assert verdict.variance_of_sum == (ranks if dense else None)


def test_residuals_that_each_rank_rounds_are_not_shared() -> None:
    for bits in (4, 16, 32):
        exchange = Exchange(MASK, ErrorFeedback(bits=bits), transport=Simulated(4)[0])
        for place, rule in (("shares", 5), ("local", 0), ("central", 0)):
            scheme = Scheme.of(exchange, place)  # type: ignore[arg-type]
            if rule and bits < 32:
                with pytest.raises(PrivacyError, match=rf"rule {rule}\)"):
                    judge(scheme)
                judge(replace(scheme, feedback="none"))
            else:
                judge(scheme)


def test_what_ranks_save_has_the_noise_of_their_residuals() -> None:
    for place, with_memory in {"shares": 0.5, "central": 1, "local": 1}.items():
        assert judge(Scheme(**case(place, feedback="after_noise"))).checkpoint_multiplier == (
            with_memory
        )
        assert judge(Scheme(**case(place))).checkpoint_multiplier == 1
    assert judge(Scheme(**case("aggregate"))).checkpoint_multiplier == 1
    assert judge(Scheme(**client(MASK))).checkpoint_multiplier == 0


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
def test_noise_on_the_aggregate_grows_with_the_norm_of_the_compressor(
    compressor: Compressor, rule: int, bound: float
) -> None:
    verdict = judge(Scheme(**case("aggregate", compressor)))
    assert verdict.rule == rule
    assert verdict.std == pytest.approx(bound, rel=1e-3)
    assert verdict.peer_multiplier == 0


def test_verdicts_scale_with_the_ranks() -> None:
    assert judge(Scheme(place="shares", world_size=9)) == Verdict(4, 1 / 3, 1 / 3, 1.0)
    assert judge(Scheme(place="local", world_size=9)) == Verdict(6, 1.0, 1.0, 9.0)

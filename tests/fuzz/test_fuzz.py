"""A short form of ``make fuzz``: the corpus, and some hundreds of inputs of each target."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.fuzzing import Draw, Finding, Target
from tests.fuzz.targets import TARGETS

pytestmark = pytest.mark.filterwarnings("ignore")

every_target = pytest.mark.parametrize("target", TARGETS.values(), ids=lambda target: target.name)


@every_target
def test_what_was_kept_is_read_or_refused(target: Target) -> None:
    for data in [b"", *target.corpus()]:
        target.check(data)


@every_target
def test_mutations_are_read_or_refused(target: Target) -> None:
    for data in itertools.islice(target.generate(seed=1), 150):
        target.check(data)


@every_target
@given(data=st.binary(max_size=80))
@settings(max_examples=60)
def test_any_bytes_are_read_or_refused(target: Target, data: bytes) -> None:
    target.check(data)


def _odd(data: bytes) -> None:
    draw = Draw(data)
    kind = draw.below(6)
    if kind == 1:
        raise KeyError("what")
    if kind == 2:
        raise ValueError("not in our own words")
    if kind == 3:
        json.loads("{")
    if kind == 4:
        raise Finding("seen by the target itself")


@pytest.mark.parametrize("kind", [1, 2, 3, 4])
def test_anything_else_is_a_finding(kind: int) -> None:
    target = Target(_odd, inputs=0)
    target.check(b"\0")
    with pytest.raises(Finding):
        target.check(bytes([kind]))


def test_inputs_follow_from_the_seed() -> None:
    target = TARGETS["ledgers"]
    first, again, other = (list(itertools.islice(target.generate(seed), 50)) for seed in (0, 0, 1))
    assert first == again != other


def test_a_million_inputs_in_all() -> None:
    assert sum(target.inputs for target in TARGETS.values()) >= 1_000_000

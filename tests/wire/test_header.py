"""What arrives damaged, foreign or from another round is never decoded."""

import copy
import math
import pickle
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from comm_hooks import ErrorFeedback, Exchange, TopK
from comm_hooks.collectives import Simulated
from comm_hooks.collectives.requests import AllGather, AllToAll, Request
from comm_hooks.errors import PayloadError
from comm_hooks.wire.gathered_header import HEADER_NBYTES, GatheredHeader
from comm_hooks.wire.header import PendingChecks
from comm_hooks.wire.stamp import Stamp, digest
from comm_hooks.wire.summed_header import SummedHeader, summed_header_nbytes

NOW = PendingChecks()
"""For headers on the CPU: nothing waits."""
STAMP = Stamp(configuration=digest("settings"), step=7)


def payload_of(
    body: Sequence[int], stamp: Stamp = STAMP, health: float = 0.0, rank: int = 0
) -> torch.Tensor:
    payload = torch.zeros(HEADER_NBYTES + 8 * len(body), dtype=torch.uint8)
    payload[HEADER_NBYTES:] = torch.tensor(body, dtype=torch.int64).view(torch.uint8)
    GatheredHeader(range(rank + 1), rank).write_(payload[None], stamp, torch.tensor(health))
    return payload


def health_of(*payloads: torch.Tensor, stamp: Stamp = STAMP) -> torch.Tensor:
    return GatheredHeader(range(len(payloads)), 0).check(torch.stack(payloads), stamp, NOW)


words = st.lists(st.integers(-(2**63), 2**63 - 1), max_size=9)
stamps = st.builds(Stamp, *[st.integers(0, 2**32 - 1)] * 4, model=st.integers(-(2**31), 2**31 - 1))


@given(body=words, finite=st.lists(st.booleans(), min_size=1, max_size=3))
def test_intact_payloads_tell_whether_all_are_finite(body: list[int], finite: list[bool]) -> None:
    health = health_of(
        *(
            payload_of(body, health=0.0 if f else math.nan, rank=rank)
            for rank, f in enumerate(finite)
        )
    )
    assert health.item() == 0 if all(finite) else math.isnan(health)


@given(body=words, data=st.data())
def test_no_flipped_bits_go_unnoticed(body: list[int], data: st.DataObject) -> None:
    """One, or two: of a pair of signs, too."""
    payload = payload_of(body, rank=1)
    bits = st.integers(0, 8 * payload.numel() - 1)
    for bit in data.draw(st.sets(bits, min_size=1, max_size=2)):
        payload[bit // 8] ^= 1 << bit % 8
    with pytest.raises(PayloadError, match=r"rank 1|rank 0 is not one of comm-hooks"):
        health_of(payload_of(body), payload)


@pytest.mark.parametrize("numel", [20, 40_000])
def test_no_two_flipped_signs_go_unnoticed(numel: int) -> None:
    for first, second in [(0, 1), (0, 2), (1, 3), (2, 18), (numel - 3, numel - 1)]:
        payload = payload_of(range(numel), rank=1)
        payload[HEADER_NBYTES:].view(torch.int32)[[first, second]] ^= -(2**31)
        with pytest.raises(PayloadError, match="rank 1 was damaged"):
            health_of(payload_of(range(numel)), payload)


@given(body=words, data=st.data())
def test_no_two_words_change_places_unnoticed(body: list[int], data: st.DataObject) -> None:
    payload = payload_of(body)
    swapped = payload.view(torch.int32)
    i, j = (data.draw(st.integers(0, len(swapped) - 1)) for _ in range(2))
    swapped[[i, j]] = swapped[[j, i]]
    if torch.equal(swapped, payload_of(body).view(torch.int32)):
        return
    with pytest.raises(PayloadError):
        health_of(payload)


def test_a_payload_in_the_place_of_another_ranks_is_told() -> None:
    payloads = [payload_of([1], rank=rank) for rank in (0, 0, 2)]
    with pytest.raises(PayloadError, match="in the place of rank 1 is that of rank 0: all ranks"):
        health_of(*payloads)


def test_ranks_go_by_the_names_that_users_give_them() -> None:
    of_rank_4 = torch.zeros(HEADER_NBYTES, dtype=torch.uint8)
    GatheredHeader([4, 6], 0).write_(of_rank_4[None], STAMP, torch.tensor(0.0))
    header = GatheredHeader([4, 6], 1)
    of_rank_6 = torch.zeros(HEADER_NBYTES, dtype=torch.uint8)
    header.write_(of_rank_6[None], Stamp(STAMP.configuration, 9), torch.tensor(0.0))
    with pytest.raises(PayloadError, match="rank 6 belongs to step 9, that of rank 4 to step 7"):
        header.check(torch.stack([of_rank_4, of_rank_6]), STAMP, NOW)


OTHERS = [
    (Stamp(5, 7), "the payload of rank 2 was made with other settings or of other parameters"),
    (Stamp(STAMP.configuration, 6), "rank 2 belongs to step 6, that of ranks 0, 1 to step 7"),
    (Stamp(STAMP.configuration, 7, 3), "rank 2 has loaded another state than ranks 0, 1"),
    (Stamp(STAMP.configuration, 7, 0, 1), "the optimizer of rank 2 has other hyperparameters"),
    (Stamp(STAMP.configuration, 7, 0, 0, 9), "the parameters of rank 2 are not those of ranks 0, "),
]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda p: p[:2].zero_(), "the payload of rank 2 is not one of comm-hooks"),
        (lambda p: p[2:3].add_(1), "rank 2 is of version 3, that of ranks 0, 1 of 2"),
        (lambda p: p[36:37].add_(1), "rank 2 was damaged on the way"),
        *((lambda p, s=stamp: p.copy_(payload_of([1, 2, 3], s, rank=2)), t) for stamp, t in OTHERS),
    ],
)  # fmt: skip
def test_the_fault_and_the_rank_are_named(change: Callable[[torch.Tensor], Any], told: str) -> None:
    payloads = [payload_of([1, 2, 3], rank=rank) for rank in range(3)]
    change(payloads[2])
    for own in range(3):
        header = GatheredHeader(range(3), own)
        with pytest.raises(PayloadError, match=re.escape(told)):
            header.check(torch.stack(payloads), STAMP, NOW)


def summed(of_ranks: Sequence[Stamp], healths: Sequence[float] | None = None) -> torch.Tensor:
    total = torch.zeros(SummedHeader(range(len(of_ranks)), 0).nbytes // 4)
    for rank, stamp in enumerate(of_ranks):
        own = torch.empty_like(total)
        header = SummedHeader(range(len(of_ranks)), rank)
        health = torch.tensor(healths[rank] if healths else 0.0)
        header.write_(own.view(torch.uint8)[None], stamp, health)
        total += own
    return total.view(torch.uint8)[None]


@given(stamp=stamps, ranks=st.sampled_from([1, 2, 3, 64, 1000]), finite=st.booleans())
def test_a_sum_of_what_belongs_together_tells_whether_all_are_finite(
    stamp: Stamp, ranks: int, finite: bool
) -> None:
    healths = [0.0] * ranks
    healths[ranks // 2] = 0.0 if finite else math.nan
    total = summed([stamp] * ranks, healths)
    health = SummedHeader(range(ranks), ranks - 1).check(total, stamp, NOW)
    assert health.item() == 0 if finite else math.isnan(health)


@pytest.mark.parametrize(("other", "told"), OTHERS)
@pytest.mark.parametrize("own", [0, 1, 2])
def test_a_sum_tells_who_differs_and_in_what(other: Stamp, told: str, own: int) -> None:
    of_ranks = [STAMP, STAMP, other]
    with pytest.raises(PayloadError, match=re.escape(told)):
        SummedHeader(range(3), own).check(summed(of_ranks), of_ranks[own], NOW)


@given(data=st.data(), ranks=st.integers(2, 9))
def test_no_sum_of_different_stamps_passes_on_any_rank(data: st.DataObject, ranks: int) -> None:
    of_ranks = [data.draw(stamps) for _ in range(ranks)]
    total = summed(of_ranks)
    for rank, stamp in enumerate(of_ranks):
        if len({str(s) for s in of_ranks}) > 1:
            with pytest.raises(PayloadError, match="rank"):
                SummedHeader(range(ranks), rank).check(total, stamp, NOW)


@given(data=st.data(), ranks=st.integers(2, 5))
def test_a_flipped_bit_before_a_sum_is_told(data: st.DataObject, ranks: int) -> None:
    nbytes = summed_header_nbytes(ranks)
    victim = data.draw(st.integers(0, ranks - 1))
    # The health, which comes first, may be any number: what is not zero spoils the round.
    octet, bit = data.draw(st.integers(4, nbytes - 1)), data.draw(st.integers(0, 7))
    payloads = []
    for rank in range(ranks):
        payload = torch.zeros(1, nbytes, dtype=torch.uint8)
        SummedHeader(range(ranks), rank).write_(payload, STAMP, torch.tensor(0.0))
        payloads.append(payload)
    payloads[victim][0, octet] ^= 1 << bit
    total = torch.stack([p.view(torch.float32) for p in payloads]).sum(0)
    clean = [p.view(torch.float32) for p in payloads if p is not payloads[victim]]
    payloads[victim][0, octet] ^= 1 << bit
    if torch.equal(total, torch.stack([*clean, payloads[victim].view(torch.float32)]).sum(0)):
        return  # a bit that rounding drops, or the sign of a zero
    for rank in range(ranks):
        with pytest.raises(PayloadError, match=rf"ranks? ([\d, ]*)\b{victim}\b|not one of"):
            SummedHeader(range(ranks), rank).check(total.view(torch.uint8), STAMP, NOW)


@pytest.mark.parametrize("foreign", ["numbers", "zeros", "nan"])
@pytest.mark.parametrize("seed", range(20))
def test_a_sum_with_something_else_is_refused(foreign: str, seed: int) -> None:
    total = summed([STAMP] * 3).view(torch.float32)
    numbers = torch.randn(total.shape, generator=torch.Generator().manual_seed(seed))
    total += {"numbers": numbers, "zeros": -total, "nan": torch.full_like(total, math.nan)}[foreign]
    # A small number beside the mark of a header reads as damage.
    with pytest.raises(PayloadError, match=r"is not one of comm-hooks|was damaged on the way"):
        SummedHeader(range(3), 0).check(total.view(torch.uint8), STAMP, NOW)


def test_a_sum_whose_marks_alone_differ_is_refused() -> None:
    total = summed([STAMP] * 3)
    total[0, -4:].view(torch.float32).add_(1)
    with pytest.raises(PayloadError, match="rank 2 was damaged on the way to the sum"):
        SummedHeader(range(3), 0).check(total, STAMP, NOW)


class Tampering(Simulated):
    """A world in which something happens to one payload on the way."""

    def __init__(self, ranks: int, victim: type[Request]) -> None:
        super().__init__(ranks)
        self.victim = victim

    def _perform(self, requests: list[Request]) -> object:  # type: ignore[override]
        if isinstance(requests[0], self.victim):
            requests[1].payload.view(-1)[-5] ^= 4
        return super()._perform(requests)


@pytest.mark.parametrize(
    ("collective", "victim"),
    [("all_gather", AllGather), ("sharded", AllToAll), ("sharded", AllGather)],
)
def test_a_round_with_a_damaged_payload_changes_nothing(
    collective: str, victim: type[Request]
) -> None:
    world = Tampering(2, victim)
    exchanges = [
        Exchange(TopK(density=0.1), ErrorFeedback(), collective, transport=t)  # type: ignore[arg-type]
        for t in world
    ]
    tensors = [{"w": torch.randn(40, 40)} for _ in world]
    before = [t["w"].clone() for t in tensors]
    with pytest.raises(PayloadError, match=r"(rank|shard) 1 was damaged"):
        world.run([e.round(t) for e, t in zip(exchanges, tensors, strict=True)])
    assert all(torch.equal(t["w"], b) for t, b in zip(tensors, before, strict=True))
    assert all(e.stats()["residual_norm"] == 0 for e in exchanges)


class Past:
    def synchronize(self) -> None:
        pass


@pytest.fixture
def on_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delay the checks of headers, as on an accelerator."""

    def add(self: Any, found: torch.Tensor, step: int, check: Callable[..., None]) -> None:
        self._pending.append((step, found.clone(), Past(), check))

    monkeypatch.setattr(PendingChecks, "must_wait", staticmethod(lambda found: True))
    monkeypatch.setattr(PendingChecks, "add", add)


@pytest.mark.usefixtures("on_accelerator")
@pytest.mark.parametrize("kind", [GatheredHeader, SummedHeader])
@pytest.mark.parametrize("other", [None, *(stamp for stamp, _ in OTHERS)])
def test_a_payload_that_does_not_fit_gives_nan_until_it_is_checked(
    kind: Any, other: Stamp | None
) -> None:
    of_ranks = [STAMP, other or STAMP]
    payloads = torch.stack([payload_of([7], s, rank=rank) for rank, s in enumerate(of_ranks)])
    if kind is SummedHeader:
        payloads = summed(of_ranks)
    checks = PendingChecks()
    health = kind(range(2), 0).check(payloads, STAMP, checks)
    assert math.isnan(health) == (other is not None)
    checks.wait(before=STAMP.step)
    if other is None:
        checks.wait()
    else:
        with pytest.raises(PayloadError):
            checks.wait()
        checks.wait()


@pytest.mark.usefixtures("on_accelerator")
@pytest.mark.parametrize(
    "later",
    [
        lambda step, exchange: step("a", "b"),
        lambda step, exchange: step("b"),  # buckets were rebuilt
        lambda step, exchange: step("c"),
        lambda step, exchange: exchange.stats(),
        lambda step, exchange: exchange.state_dict(),
        lambda step, exchange: exchange.wait(),
    ],
    ids=["the same bucket", "rebuilt", "another bucket", "stats", "state_dict", "wait"],
)
def test_what_does_not_fit_is_told_in_the_next_step_whatever_comes(later: Any) -> None:
    world = Simulated(2)
    exchanges = [Exchange(TopK(density=0.5), min_numel=1, transport=t) for t in world]

    def step(*names: str) -> bool:
        tensors = [{name: torch.randn(8, 8) for name in names} for _ in world]
        world.run([e.round(t) for e, t in zip(exchanges, tensors, strict=True)])
        return all(bool(t.isfinite().all()) for t in tensors[0].values())

    assert step("a", "b")
    exchanges[1].step += 1
    assert not step("a", "b")
    exchanges[1].step -= 1
    with pytest.raises(PayloadError, match="belongs to step"):
        later(step, exchanges[0])
    assert step("a", "b"), "the others are forgotten"


def test_an_exchange_is_copied_without_what_waits() -> None:
    exchange = Exchange(TopK(density=0.5), transport=Simulated(1)[0])
    exchange._checks._pending.append((0, torch.zeros(1), Past(), print))  # type: ignore[arg-type]
    for other in (copy.deepcopy(exchange), pickle.loads(pickle.dumps(exchange._checks))):
        assert not getattr(other, "_checks", other)._pending


@pytest.mark.parametrize("place", [2, 24, 28, 40])
def test_a_damaged_payload_gives_nan_until_it_is_checked(place: int) -> None:
    """Version, sender, checksum or body."""
    payload = payload_of([7, 8])
    payload[place] += 1
    header = GatheredHeader(range(1), 0)
    assert not header._fits(header._read(payload[None])[0], STAMP)

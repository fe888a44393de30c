"""What arrives damaged, foreign or from another round is never decoded."""

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from comm_hooks import ErrorFeedback, Exchange, Sign, TopK
from comm_hooks.collectives import Simulated
from comm_hooks.collectives.requests import AllGather, AllToAll, Request
from comm_hooks.errors import PayloadError
from comm_hooks.wire.header import HEADER_NBYTES, HeaderCheck, Stamp, digest, write_headers_

STAMP = Stamp(configuration=digest("settings"), step=7)
HEALTHY = torch.tensor(0.0)


def payload_of(body: list[int], stamp: Stamp = STAMP, health: float = 0.0) -> torch.Tensor:
    payload = torch.zeros(HEADER_NBYTES + 4 * len(body), dtype=torch.uint8)
    payload[HEADER_NBYTES:] = torch.tensor(body, dtype=torch.int32).view(torch.uint8)
    write_headers_(payload[None], stamp, torch.tensor(health))
    return payload


words = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=9)


@given(body=words, finite=st.lists(st.booleans(), min_size=1, max_size=3))
def test_intact_payloads_tell_whether_all_are_finite(body: list[int], finite: list[bool]) -> None:
    payloads = torch.stack([payload_of(body, health=0.0 if f else math.nan) for f in finite])
    health = HeaderCheck().health(payloads, STAMP)
    assert health.item() == 0 if all(finite) else math.isnan(health)


@given(body=words, data=st.data())
def test_no_flipped_bit_goes_unnoticed(body: list[int], data: st.DataObject) -> None:
    payload = payload_of(body)
    bit = data.draw(st.integers(0, 8 * payload.numel() - 1))
    payload[bit // 8] ^= 1 << bit % 8
    with pytest.raises(PayloadError, match="rank 1"):
        HeaderCheck().health(torch.stack([payload_of(body), payload]), STAMP)


@given(body=words, data=st.data())
def test_no_two_words_change_places_unnoticed(body: list[int], data: st.DataObject) -> None:
    payload = payload_of(body)
    swapped = payload.view(torch.int32)
    i, j = (data.draw(st.integers(0, len(swapped) - 1)) for _ in range(2))
    swapped[[i, j]] = swapped[[j, i]]
    if torch.equal(swapped, payload_of(body).view(torch.int32)):
        return
    with pytest.raises(PayloadError):
        HeaderCheck().health(payload[None], STAMP)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda p: p[:2].zero_(), "not one of comm-hooks"),
        (lambda p: p[2:3].add_(1), "of version 2, this rank's comm-hooks has 1"),
        (lambda p: p[20:21].add_(1), "damaged on the way"),
        (lambda p: write_headers_(p[None], Stamp(STAMP.configuration, 6), HEALTHY), "step 6, "),
        (lambda p: write_headers_(p[None], Stamp(5, 7), HEALTHY), "with other settings"),
    ],
)  # fmt: skip
def test_the_fault_and_the_rank_are_named(change: object, told: str) -> None:
    payloads = torch.stack([payload_of([1, 2, 3]) for _ in range(3)])
    change(payloads[2])  # type: ignore[operator]
    with pytest.raises(PayloadError, match=rf"rank 2.*{re.escape(told)}"):
        HeaderCheck().health(payloads, STAMP)


class Tampering(Simulated):
    """A world in which something happens to one payload on the way."""

    def __init__(self, ranks: int, victim: type[Request]) -> None:
        super().__init__(ranks)
        self.victim = victim

    def _perform(self, requests: list[Request]) -> object:  # type: ignore[override]
        if isinstance(requests[0], self.victim):
            requests[1].payload.view(-1)[-5] ^= 4
        return super()._perform(requests)


@pytest.mark.parametrize("compressor", [TopK(density=0.1), Sign()])
@pytest.mark.parametrize(
    ("collective", "victim"),
    [("all_gather", AllGather), ("sharded", AllToAll), ("sharded", AllGather)],
)
def test_a_round_with_a_damaged_payload_changes_nothing(
    compressor: TopK, collective: str, victim: type[Request]
) -> None:
    world = Tampering(2, victim)
    exchanges = [
        Exchange(compressor, ErrorFeedback(), collective, transport=t)  # type: ignore[arg-type]
        for t in world
    ]
    tensors = [{"w": torch.randn(40, 40)} for _ in world]
    before = [t["w"].clone() for t in tensors]
    with pytest.raises(PayloadError, match=r"(rank|shard) 1 was damaged"):
        world.run([e.round(t) for e, t in zip(exchanges, tensors, strict=True)])
    assert all(torch.equal(t["w"], b) for t, b in zip(tensors, before, strict=True))
    assert all(e.stats()["residual_norm"] == 0 for e in exchanges)


@pytest.mark.parametrize("compressor", [TopK(density=0.1), Sign()])
def test_cut_short(compressor: TopK) -> None:
    payload = compressor.compress(torch.randn(500), key=1)
    with pytest.raises(PayloadError, match=r"decompresses 500 elements from \d+ bytes, got \d+"):
        compressor.decompress(payload[:-4], 500, key=1)


def test_ranks_in_different_steps_are_told() -> None:
    world = Simulated(2)
    exchanges = [Exchange(Sign(), ErrorFeedback(), transport=t) for t in world]

    def step() -> None:
        tensors = [{"w": torch.randn(40, 40)} for _ in world]
        world.run([e.round(t) for e, t in zip(exchanges, tensors, strict=True)])

    step()
    exchanges[1].step += 1
    with pytest.raises(PayloadError, match="rank 1 belongs to step 2, this rank is at step 1"):
        step()


class Later(HeaderCheck):
    """Compares as on an accelerator: at the next opportunity."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[torch.Tensor] = []

    def _look_later(self, found: torch.Tensor, stamp: Stamp, senders: str) -> None:
        self.found.append(found)


class OnAccelerator(torch.Tensor):
    class _Device:
        type = "elsewhere"

    device = _Device()  # type: ignore[assignment]


@pytest.mark.parametrize("place", [0, 2, 4, 8, 12, 20])
def test_until_it_is_compared_what_is_not_intact_is_nan(
    monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    """Whether magic, version, settings, step, checksum or body is another one."""
    weights = torch.arange(5, dtype=torch.int32) * 2 + 1
    monkeypatch.setattr("comm_hooks.wire.header._weights", lambda count, device: weights[:count])
    payload = payload_of([7])
    for changed in (False, True):
        words = payload.clone().view(torch.int32)
        if changed and place < 12:
            # With a checksum that fits: of another sender, not damaged.
            words.view(torch.uint8)[place] += 1
            words[3] = 0
            words[3] = (words * weights).sum()
        elif changed:
            words.view(torch.uint8)[min(place, 19)] += 1
        check = Later()
        octets = words.view(torch.uint8)[None].as_subclass(OnAccelerator)
        assert math.isnan(check.health(octets, STAMP)) == changed
        assert len(check.found) == 1

"""Collectives over messages between two ranks: what they give, and that strangers never meet."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from comm_hooks import PeerError
from comm_hooks.collectives import TorchDistributed, rings
from comm_hooks.collectives.requests import AllGather, AllReduce, AllToAll, Request
from tests.ranks import RanksOf

SIZES = [0, 1, 2, 3, 7, 64, 1000]


def payloads(size: int, seed: int) -> list[torch.Tensor]:
    """Return what each rank sends, known to all."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) for _ in range(dist.get_world_size())]


def collect(sizes: list[int], segment_nbytes: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return sums and gathered payloads; seen from a rank each row is as it was sent."""
    transport, found = TorchDistributed(), []
    rings._SEGMENT_NBYTES, usual = segment_nbytes, rings._SEGMENT_NBYTES
    try:
        for seed, size in enumerate(sizes):
            own = payloads(size, seed)[transport.rank]
            gathered = transport.perform(AllGather(own.clone()))
            assert torch.equal(gathered, torch.stack(payloads(size, seed)))
            rows = torch.stack([own + 10 * other for other in range(transport.world_size)])
            crossed = transport.perform(AllToAll(rows))
            expected = [sent + 10 * transport.rank for sent in payloads(size, seed)]
            assert torch.equal(crossed, torch.stack(expected))
            found.append((transport.perform(AllReduce(own)), torch.stack(payloads(size, seed))))
    finally:
        rings._SEGMENT_NBYTES = usual
    return found


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_sums_are_right_and_bit_identical(ranks_of: RanksOf, ranks: int) -> None:
    @settings(max_examples=8, deadline=None)
    @given(
        st.lists(st.sampled_from(SIZES), min_size=1, max_size=4), st.sampled_from([4, 40, 1 << 20])
    )
    def check(sizes: list[int], segment_nbytes: int) -> None:
        per_rank = ranks_of(ranks).run(collect, sizes, segment_nbytes)
        for of_ranks in zip(*per_rank, strict=True):
            first, sent = of_ranks[0]
            torch.testing.assert_close(first, sent.sum(dim=0), rtol=0, atol=1e-5)
            assert all(torch.equal(first, other) for other, _ in of_ranks)

    check()


def meet_other_sizes(kind: type[Request], sizes: tuple[int, int]) -> str:
    transport = TorchDistributed(dist.new_group(timeout=timedelta(seconds=2)))
    # Connections exist: what fails is the collective itself.
    rows = () if kind is not AllToAll else (transport.world_size,)
    transport.perform(kind(torch.zeros(*rows, 4)))
    try:
        transport.perform(kind(torch.zeros(*rows, sizes[transport.rank == 1])))
    except PeerError as error:
        return str(error)
    return "nothing"


def meet_another_kind(odd: type[Request], usual: type[Request]) -> str:
    transport = TorchDistributed(dist.new_group(timeout=timedelta(seconds=2)))
    kind = odd if transport.rank == 1 else usual
    shape = (transport.world_size, 96) if kind is AllToAll else (96 * transport.world_size,)
    try:
        transport.perform(kind(torch.zeros(shape)))
    except PeerError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("ranks", "odd", "usual"),
    [
        (2, AllReduce, AllGather),
        pytest.param(3, AllReduce, AllToAll, marks=pytest.mark.slow),
    ],
)
def test_collectives_of_one_size_do_not_meet(
    ranks_of: RanksOf, ranks: int, odd: type[Request], usual: type[Request]
) -> None:
    for message in ranks_of(ranks).run(meet_another_kind, odd, usual):
        assert "ranks waited for different things: " in message


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        (AllReduce, (200, 1000)),
        pytest.param(AllGather, (200, 1000), marks=pytest.mark.slow),
        pytest.param(AllToAll, (1 << 19, (1 << 19) + 12), marks=pytest.mark.slow),
    ],
)
def test_payloads_of_different_sizes_do_not_meet(
    ranks_of: RanksOf, kind: type[Request], sizes: tuple[int, int]
) -> None:
    """Gloo's own collectives would end the process."""
    for message in ranks_of(3).run(meet_other_sizes, kind, sizes):
        assert "ranks waited for different things: " in message
        assert "rank 1 for an all-" in message

"""Every sample goes to exactly one client, whatever the partition."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.lab.tasks.partition import (
    by_class,
    contiguous,
    dirichlet,
    iid,
    partition_labelled,
)

seeds = st.integers(0, 2**32 - 1)


def assert_divided(parts: list[Tensor], count: int, clients: int) -> None:
    assert len(parts) == clients
    assert all(len(part) for part in parts)
    assert torch.cat(parts).sort().values.tolist() == list(range(count))


@given(clients=st.integers(1, 40), surplus=st.integers(0, 200), seed=seeds)
def test_iid_parts_are_alike_in_size(clients: int, surplus: int, seed: int) -> None:
    count = clients + surplus
    parts = iid(count, clients=clients, seed=seed)
    assert_divided(parts, count, clients)
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1


@given(clients=st.integers(1, 40), surplus=st.integers(0, 200))
def test_contiguous_parts_follow_one_another(clients: int, surplus: int) -> None:
    parts = contiguous(clients + surplus, clients=clients)
    assert_divided(parts, clients + surplus, clients)
    assert torch.cat(parts).tolist() == list(range(clients + surplus))


@given(
    clients=st.integers(1, 12),
    surplus=st.integers(0, 100),
    concentration=st.sampled_from([1e-3, 0.3, 100.0]),
    seed=seeds,
)
def test_a_dirichlet_split_loses_nothing_and_leaves_nobody_out(
    clients: int, surplus: int, concentration: float, seed: int
) -> None:
    labels = torch.arange(clients + surplus) % 3
    parts = dirichlet(labels, clients=clients, concentration=concentration, seed=seed)
    assert_divided(parts, clients + surplus, clients)


def test_a_small_concentration_gives_each_class_to_few() -> None:
    labels = torch.arange(6000) % 10

    def largest_share(concentration: float) -> float:
        parts = dirichlet(labels, clients=5, concentration=concentration, seed=0)
        counts = torch.stack([labels[part].bincount(minlength=10) for part in parts])
        return float((counts.amax(0) / counts.sum(0)).mean())

    assert largest_share(0.03) > 0.9
    assert largest_share(1000.0) < 0.25


@pytest.mark.parametrize("concentration", [0.0, -1.0, float("inf"), float("nan")])
def test_concentrations_must_be_positive(concentration: float) -> None:
    with pytest.raises(ValueError, match="concentration must be positive"):
        dirichlet(torch.arange(10), clients=2, concentration=concentration, seed=0)


@given(
    sizes=st.lists(st.integers(1, 25), min_size=1, max_size=8),
    clients=st.integers(1, 12),
    classes_per_client=st.integers(1, 9),
    seed=seeds,
)
def test_by_class_gives_exactly_so_many_classes_or_says_why_not(
    sizes: list[int], clients: int, classes_per_client: int, seed: int
) -> None:
    # Class names with gaps, and samples in no order.
    labels = torch.cat([torch.full((size,), 3 * i) for i, size in enumerate(sizes)])
    labels = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))]
    possible = (
        clients <= len(labels)
        and classes_per_client <= len(sizes)
        # Every class is somewhere, and every client finds classes that are left.
        and len(sizes) <= clients * classes_per_client <= sum(min(n, clients) for n in sizes)
    )

    def divide() -> list[Tensor]:
        return by_class(labels, clients=clients, classes_per_client=classes_per_client, seed=seed)

    if not possible:
        with pytest.raises(ValueError, match=r"take fewer|must lie between|take more"):
            divide()
        return
    parts = divide()
    assert_divided(parts, len(labels), clients)
    assert all(len(labels[part].unique()) == classes_per_client for part in parts)
    assert all(map(torch.equal, parts, divide()))


def test_which_classes_meet_is_up_to_chance() -> None:
    labels = torch.arange(10).repeat(40)
    pairs = {
        tuple(labels[part].unique().tolist())
        for seed in range(20)
        for part in by_class(labels, clients=10, classes_per_client=2, seed=seed)
    }
    assert len(pairs) > 30  # of 45


@pytest.mark.parametrize("partition", ["iid", "classes"])
def test_the_seed_decides(partition: str) -> None:
    labels = torch.arange(10).repeat(40)

    def divide(seed: int) -> Tensor:
        parts = partition_labelled(labels, partition, clients=5, classes_per_client=2, seed=seed)
        return torch.cat(parts)

    assert torch.equal(divide(3), divide(3))
    assert not torch.equal(divide(3), divide(4))


def test_what_cannot_be_divided_is_refused() -> None:
    labels = torch.tensor([0, 0, 1, 1, 2])
    with pytest.raises(ValueError, match="5 training samples cannot be divided over 6 clients"):
        iid(5, clients=6, seed=0)
    with pytest.raises(ValueError, match="clients must be at least 1, got 0"):
        contiguous(5, clients=0)
    with pytest.raises(ValueError, match="between 1 and 3, the number of classes, got 4"):
        by_class(labels, clients=1, classes_per_client=4, seed=0)
    with pytest.raises(ValueError, match="between 1 and 3, the number of classes, got 0"):
        by_class(labels, clients=1, classes_per_client=0, seed=0)
    with pytest.raises(ValueError, match="leave out some of the 3 classes"):
        by_class(labels, clients=1, classes_per_client=2, seed=0)
    with pytest.raises(ValueError, match="classes of 2, 2, 1 samples are too small"):
        by_class(labels, clients=2, classes_per_client=3, seed=0)
    with pytest.raises(ValueError, match="unknown partition 'class': did you mean 'classes'"):
        partition_labelled(labels, "class", clients=2, classes_per_client=1, seed=0)

import multiprocessing
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
)

from comm_hooks.optim.private.data.poisson import PoissonLoader, PoissonSampler, private_loader
from comm_hooks.optim.private.noise.secret import Secret

# Tests of frequencies take a known one, so that they come out the same every time.
KNOWN = bytes(range(32))


def mixed(samples: list[torch.Tensor]) -> torch.Tensor:
    batch = torch.stack(samples)
    return 0.5 * batch + 0.5 * batch.roll(1, 0)


def centred(samples: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    batch = torch.stack(samples)
    return {"x": batch - batch.mean(0), "y": batch}


def padded(samples: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)


def test_samples_of_other_lengths_may_be_padded() -> None:
    samples: Any = [torch.randn(1 + length, 3) for length in range(9)]
    for batch in PoissonLoader(samples, 0.9, 5, collate_fn=padded):
        assert batch.dim() == 3


def test_every_sample_must_be_one_row() -> None:
    documents: Any = [torch.zeros(rows, 4) for rows in (1, 1, 50, 1)]
    loader = PoissonLoader(documents, 1.0, 1, collate_fn=torch.cat)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"a tensor of shape \(53, 4\) of 4 samples: each must be"):
        next(iter(loader))


def frequencies(num_samples: int, rate: float, steps: int) -> np.ndarray:
    """Return which indices were drawn: (steps, num_samples)."""
    drawn = np.zeros((steps, num_samples), bool)
    sampler = PoissonSampler(num_samples, rate, steps, secret=Secret(KNOWN))
    for step, indices in enumerate(sampler):
        drawn[step, indices] = True
    return drawn


@pytest.mark.parametrize("rate", [0.01, 0.3])
def test_each_sample_is_drawn_independently_with_the_given_rate(rate: float) -> None:
    samples, steps = 500, 2000
    drawn = frequencies(samples, rate, steps)
    spread = np.sqrt(rate * (1 - rate))
    assert drawn.mean() == pytest.approx(rate, abs=4 * spread / np.sqrt(samples * steps))
    # Each sample, and each batch: the variance of a binomial, which a fixed size would not have.
    assert np.abs(drawn.mean(0) - rate).max() < 5 * spread / np.sqrt(steps)
    assert drawn.sum(1).var() == pytest.approx(samples * rate * (1 - rate), rel=0.15)
    # From step to step and from sample to sample there is no correlation.
    centered = drawn - rate
    limit = 5 * spread**2 / np.sqrt(samples * steps)
    assert abs((centered[1:] * centered[:-1]).mean()) < limit
    assert abs((centered[:, 1:] * centered[:, :-1]).mean()) < limit


def test_empty_batches_come_as_often_as_they_must() -> None:
    empty = frequencies(100, 0.02, 4000).sum(1) == 0
    # Of 24 random bits, 2^-24 is the least that a rate can be: 6 samples would be expected.
    sampler = PoissonSampler(10**6, 1e-10, 100, secret=Secret(KNOWN))
    assert sum(len(indices) for indices in sampler) == 0
    expected = 0.98**100
    assert empty.mean() == pytest.approx(
        expected, abs=4 * np.sqrt(expected * (1 - expected) / 4000)
    )


@given(samples=st.integers(1, 50), steps=st.integers(1, 6), rate=st.floats(0.01, 1))
def test_batches_are_lists_of_distinct_indices(samples: int, steps: int, rate: float) -> None:
    sampler = PoissonSampler(samples, rate, steps)
    batches = list(sampler)
    assert len(batches) == len(sampler) == steps
    for indices in batches:
        assert indices == sorted(set(indices))
        assert all(type(i) is int and 0 <= i < samples for i in indices)
        assert rate < 1 or len(indices) == samples


def test_no_batch_comes_twice() -> None:
    sampler = PoissonSampler(200, 0.5, 3, secret=Secret(KNOWN))
    batches = [tuple(indices) for _ in range(3) for indices in sampler]
    assert len(set(batches)) == 9
    assert len({tuple(next(iter(PoissonSampler(200, 0.5, 3)))) for _ in range(5)}) == 5
    by_rank = [PoissonSampler(200, 0.5, 3, secret=Secret(KNOWN), rank=r) for r in range(2)]
    assert len({tuple(b) for s in by_rank for b in s}) == 6


def test_sampling_does_not_depend_on_the_users_seed_nor_change_its_numbers() -> None:
    batches = []
    for _ in range(2):
        torch.manual_seed(0)
        batches.append(next(iter(PoissonSampler(200, 0.5, 3))))
        after = torch.rand(1)
    assert batches[0] != batches[1]
    torch.manual_seed(0)
    assert torch.equal(after, torch.rand(1))


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_shards_are_a_partition(world_size: int) -> None:
    dataset = TensorDataset(torch.arange(10))
    seen = [
        next(iter(PoissonLoader(dataset, 1.0, 1, rank=rank, world_size=world_size)))[0].tolist()
        for rank in range(world_size)
    ]
    assert seen == [list(range(rank, 10, world_size)) for rank in range(world_size)]


class Structured(Dataset[Any]):
    """Samples with some of everything, and no idea of what no indices mean."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        image = torch.full((3, 4), index, dtype=torch.float16)
        return {"image": image, "more": (index, [np.float64(index)])}

    def __getitems__(self, indices: list[int]) -> list[Any]:
        assert indices
        return [self[i] for i in indices]


def flipped(samples: list[Any]) -> Any:
    return {
        "image": torch.stack([s["image"] for s in samples]).flip(1),
        "labels": torch.zeros(len(samples), 2),
    }


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_empty_batches_have_the_structure_of_others(workers: int) -> None:
    options: dict[str, Any] = {}
    if workers:
        options = {"num_workers": 1, "multiprocessing_context": "spawn"}
    loader = PoissonLoader(Structured(), 0.3, 40, secret=Secret(KNOWN), **options)
    batches = list(loader)
    sizes = {len(b["image"]) for b in batches}
    assert 0 in sizes
    assert len(sizes) > 2
    for batch in batches:
        size = len(batch["image"])
        assert (batch["image"].shape, batch["image"].dtype) == ((size, 3, 4), torch.float16)
        assert (batch["more"][0].shape, batch["more"][0].dtype) == ((size,), torch.int64)
        assert (batch["more"][1][0].shape, batch["more"][1][0].dtype) == ((size,), torch.float64)
    assert len(loader) == 40
    # A user may write to an empty batch.
    loader = PoissonLoader(TensorDataset(torch.rand(3, 2)), 1e-9, 2)
    first, second = ([tensor.resize_(5, 2) for tensor in batch] for batch in loader)
    assert first[0].data_ptr() != second[0].data_ptr()
    assert [batch[0].shape for batch in loader] == [(0, 2)] * 2


def test_private_loader_keeps_what_it_can() -> None:
    def initialize(worker: int) -> None:
        pass

    kept: dict[str, Any] = {"num_workers": 2, "worker_init_fn": initialize, "prefetch_factor": 3}
    kept |= {"persistent_workers": True, "timeout": 7}
    shuffled = {"batch_size": 2, "shuffle": True, "drop_last": True, "collate_fn": flipped}
    usual = DataLoader(Structured(), multiprocessing_context="spawn", **shuffled, **kept)
    loader = private_loader(usual, 0.25, rank=1, world_size=2)
    assert len(loader) == 4
    assert len(private_loader(usual, 0.25, 9)) == 9
    assert len(private_loader(usual, 0.999)) == 1
    for name in (*kept, "pin_memory"):
        assert getattr(loader, name) == getattr(usual, name), name
    assert isinstance(loader.multiprocessing_context, multiprocessing.context.SpawnContext)
    in_process = private_loader(
        DataLoader(Structured(), 2, collate_fn=flipped), 0.25, 200, rank=1, world_size=2
    )
    in_process.batch_sampler._secret = Secret(KNOWN)  # type: ignore[union-attr]
    batches = list(in_process)
    assert {int(v) for b in batches for v in b["image"].flatten()} == {1, 3, 5}
    assert {b["labels"].shape for b in batches} == {(n, 2) for n in range(4)}


def test_private_loader_takes_ordinary_loaders() -> None:
    dataset = TensorDataset(torch.arange(6))
    sampler: Any = DistributedSampler(dataset, num_replicas=2, rank=1)
    for usual in (
        DataLoader(dataset, 2),
        DataLoader(dataset, 2, shuffle=True),
        DataLoader(dataset, 2, sampler=sampler),
    ):
        (batch,) = next(iter(private_loader(usual, 1.0)))
        assert batch.tolist() == list(range(6))


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(5))


DATASET = TensorDataset(torch.rand(6, 2))


class OwnBatches(BatchSampler):
    pass


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (lambda: DataLoader(Stream(), 2), "Stream has no samples that can be drawn"),
        (lambda: DataLoader(DATASET, batch_size=None), "draws with NoneType and"),
        (
            lambda: DataLoader(DATASET, 2, sampler=SubsetRandomSampler([1, 2])),
            "BatchSampler and SubsetRandomSampler, which Poisson.*Subset",
        ),
        (
            lambda: DataLoader(
                DATASET, batch_sampler=OwnBatches(SequentialSampler(DATASET), 2, False)
            ),
            "draws with OwnBatches",
        ),
        (lambda: DataLoader(DATASET, 2, collate_fn=len), "got int"),
        (lambda: DataLoader(DATASET, 2, collate_fn=lambda s: {"x": ["a"]}), "got str"),
        (lambda: DataLoader(DATASET, 2, collate_fn=lambda s: torch.zeros(())), r"shape \(\)"),
        (lambda: DataLoader(DATASET, 2, collate_fn=lambda s: torch.zeros(7, 1)), r"\(7, 1\)"),
    ],
)
def test_loaders_that_cannot_be_sampled(loader: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        private_loader(loader(), 0.5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: PoissonSampler(0, 0.5, 1), "num_samples must be an integer of at least 1"),
        (lambda: PoissonSampler(9, 0.0, 1), r"sample_rate must lie in \(0, 1\]"),
        (lambda: PoissonSampler(9, float("nan"), 1), r"sample_rate must lie in \(0, 1\]"),
        (lambda: private_loader(DataLoader(DATASET), 0.0), r"sample_rate must lie in \(0, 1\]"),
        (lambda: PoissonSampler(9, 0.5, 0), "steps must be an integer of at least 1"),
        (lambda: PoissonLoader(DATASET, 0.5, 1, world_size=7), "6 samples are not enough for 7"),
        (lambda: PoissonLoader(DATASET, 0.5, 1, rank=2, world_size=2), "rank must be one of 0, 1"),
        (lambda: PoissonLoader(DATASET, 0.5, 1, shuffle=True), "mutually exclusive"),
        (lambda: PoissonLoader(DATASET, 0.5, 1, batch_size=4), "mutually exclusive"),
    ],
)
def test_bad_settings(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()

"""Poisson sampling: every sample is in every batch with the same probability, independently."""

import functools
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    Subset,
)

from comm_hooks.optim.private.data.rows import require_once
from comm_hooks.optim.private.data.tickets import Tickets
from comm_hooks.optim.private.errors import Settled
from comm_hooks.optim.private.noise.secret import Secret, Unrepeatable
from comm_hooks.requirements import (
    require_callable,
    require_choice,
    require_integer,
    require_kind,
    require_positive,
    require_within,
)

Collate = Callable[[list[Any]], Any]

_KEPT = [
    *("num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("generator", "prefetch_factor", "persistent_workers"),
]


class PoissonSampler(Settled, Unrepeatable, Sampler[list[int]]):
    """A sampler of batches that contain each index with probability q, independently of all others.

    Batches have about ``q num_samples`` indices; some are empty, which are steps as well.

    The drawn samples must be secret.  So every batch is drawn from its own stream of a
    :class:`~comm_hooks.optim.private.Secret`, not from PyTorch's generators: ranks that have set
    the same seed sample independently, and a resumed process samples anew.

    Args:
        num_samples: the number of indices to choose from.
        sample_rate: q, the probability of an index to be in a batch; public.
        steps: the number of batches per iteration; public.
        secret: the source of randomness; by default a new one.
        rank: the number of this rank, which distinguishes ranks that share a secret.

    Raises:
        ValueError: for a ``sample_rate`` out of (0, 1], or ``num_samples`` or ``steps`` below 1.

    Example::

        >>> from comm_hooks.optim.private.data.poisson import PoissonSampler
        >>> sampler = PoissonSampler(num_samples=1000, sample_rate=0.01, steps=300)
        >>> len(sampler), sum(len(indices) for indices in sampler) > 2000
        (300, True)
    """

    settled = frozenset({"num_samples", "sample_rate"})

    def __init__(
        self,
        num_samples: int,
        sample_rate: float,
        steps: int,
        *,
        secret: Secret | None = None,
        rank: int = 0,
    ) -> None:
        require_positive(self, "num_samples", num_samples)
        require_within(self, "sample_rate", sample_rate, "(0, 1]")
        require_positive(self, "steps", steps)
        require_integer(self, "rank", rank)
        if secret is not None:
            require_kind(self, "secret", secret, Secret)
        self.num_samples = num_samples
        self.sample_rate = sample_rate
        self.steps = steps
        self._secret = secret or Secret()
        self._rank = rank
        # Over all iterations: no stream may be used twice.
        self._drawn = 0
        self.waiting: deque[list[int]] = deque()
        """The batches of the latest iteration that were drawn and not delivered."""

    def __len__(self) -> int:
        """Return the number of batches of one iteration."""
        return self.steps

    def __iter__(self) -> Iterator[list[int]]:
        """Return an iterator over ``steps`` batches, each a list of increasing indices."""
        self.waiting = deque()
        return self._batches(self.waiting)

    def _batches(self, waiting: deque[list[int]]) -> Iterator[list[int]]:
        for _ in range(self.steps):
            waiting.append(self.draw())
            yield waiting[-1]

    def draw(self) -> list[int]:
        """Return the increasing indices of one more batch."""
        stream = self._secret.stream("poisson sampling", rank=self._rank, step=self._drawn)
        self._drawn += 1
        return stream.draw(self.num_samples, self.sample_rate)


class PoissonLoader(DataLoader[Any]):
    """A data loader with Poisson-sampled batches of this rank's shard of a dataset.

    The shard is every ``world_size``-th sample from ``rank`` on, so that each sample is on one
    rank; together, the ranks' batches are a Poisson sample of the whole dataset at the same rate.
    An empty batch has the tensors of any other batch, with no rows.

    Args:
        dataset: a dataset with a length, the same on all ranks.
        sample_rate: q, the probability of each sample to be in a step's batches; public.
        steps: the number of batches per iteration; public, and the same on all ranks.
        collate_fn: makes a batch of a list of samples: tensors with a leading dimension of samples,
            in tuples, lists and dicts.  By default PyTorch's.
        rank: the number of this process, below ``world_size``.
        world_size: the number of ranks that share the dataset.
        secret: see :class:`PoissonSampler`.
        **options: other options of ``torch.utils.data.DataLoader``, such as ``num_workers``; none
            that determines the batches.

    Attributes:
        tickets: one for every drawn batch, for :class:`~comm_hooks.optim.private.DPOptimizer`.

    Raises:
        ValueError: for a dataset without a length, with fewer samples than ranks, or with a row
            twice (in ``Subset`` or ``ConcatDataset``); for a rate or number of steps out of range;
            for an option that would determine the batches; for batches without tensors of one row
            per sample; and for a ``collate_fn`` that does not make one row of each sample.

    Example::

        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> from comm_hooks.optim.private.data.poisson import PoissonLoader
        >>> dataset = TensorDataset(torch.randn(500, 8), torch.randint(10, (500,)))
        >>> loader = PoissonLoader(dataset, sample_rate=0.02, steps=25)
        >>> for inputs, labels in loader:  # about 10 samples each
        ...     assert inputs.shape[1:] == (8,)
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        sample_rate: float,
        steps: int,
        *,
        collate_fn: Collate | None = None,
        rank: int = 0,
        world_size: int = 1,
        secret: Secret | None = None,
        **options: Any,
    ) -> None:
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise ValueError(
                f"PoissonLoader: {type(dataset).__name__} has no samples that can be drawn by "
                "index: Poisson sampling needs a dataset with __len__ and __getitem__"
            )
        require_positive(self, "world_size", world_size)
        require_choice(self, "rank", rank, range(world_size))
        if collate_fn is not None:
            require_callable(self, "collate_fn", collate_fn)
        if len(dataset) < world_size:
            raise ValueError(
                f"PoissonLoader: {len(dataset)} samples are not enough for {world_size} ranks: "
                f"world_size can be at most {len(dataset)}"
            )
        require_once(dataset)
        shard = _Shard(dataset, range(rank, len(dataset), world_size))
        collate = collate_fn or torch.utils.data.default_collate
        nothing = _without_rows(collate([shard[0]]))
        super().__init__(
            shard,
            batch_sampler=PoissonSampler(len(shard), sample_rate, steps, secret=secret, rank=rank),
            collate_fn=_CollateAlsoNothing(collate, nothing),
            **options,
        )
        self.tickets = Tickets()

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Yield batches, and add each to ``tickets``, so that one step may use it."""
        self.tickets.start()
        batches, sampler = super().__iter__(), self.batch_sampler
        assert isinstance(sampler, PoissonSampler)
        waiting = sampler.waiting
        for batch in batches:
            self.tickets.issue(batch, functools.partial(self._read, waiting.popleft()))
            yield batch

    def _read(self, indices: Sequence[int], rows: Sequence[int]) -> Any:
        """Read some of the samples with these indices again, as a batch of their own."""
        dataset = self.dataset
        assert isinstance(dataset, _Shard)
        return self.collate_fn(dataset.__getitems__([indices[row] for row in rows]))


def private_loader(
    data_loader: DataLoader[Any],
    sample_rate: float,
    steps: int | None = None,
    *,
    rank: int = 0,
    world_size: int = 1,
) -> PoissonLoader:
    """Return a :class:`PoissonLoader` for the dataset of a data loader.

    Keeps the dataset, ``collate_fn`` and the options of workers and memory.  ``batch_size``,
    ``drop_last``, shuffling and a ``DistributedSampler`` are replaced by the arguments here.

    Args:
        data_loader: the loader of a dataset with a length.
        sample_rate: q, the probability of each sample to be in a step's batches; public.
        steps: the number of batches per iteration; by default the integer nearest to 1 / q, so
            that a sample is drawn once on average.
        rank, world_size: see :class:`PoissonLoader`.

    Raises:
        ValueError: as :class:`PoissonLoader`; for a loader that does not take all samples in order
            or at random; and for a loader without automatic batching.

    Example::

        >>> import torch
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> from comm_hooks.optim.private.data.poisson import private_loader
        >>> usual = DataLoader(TensorDataset(torch.randn(500, 8)), batch_size=10, shuffle=True)
        >>> loader = private_loader(usual, sample_rate=0.02)
        >>> len(loader)
        50
    """
    require_within("private_loader", "sample_rate", sample_rate, "(0, 1]")
    dataset = data_loader.dataset
    if not isinstance(dataset, IterableDataset):
        samplers = data_loader.batch_sampler, data_loader.sampler
        kinds = (SequentialSampler, RandomSampler, DistributedSampler)
        takes_each_once = isinstance(samplers[1], kinds) and (
            not isinstance(samplers[1], RandomSampler)
            or (not samplers[1].replacement and samplers[1].num_samples == len(dataset))  # type: ignore[arg-type]
        )
        if type(samplers[0]) is not BatchSampler or not takes_each_once:
            raise ValueError(
                f"data_loader draws with {' and '.join(type(s).__name__ for s in samplers)}, "
                "which Poisson sampling would override: make the loader with batch_size and "
                "shuffle alone, and give the sample rate and steps here; for a part of the dataset "
                "use torch.utils.data.Subset"
            )
    return PoissonLoader(
        dataset,
        sample_rate,
        max(1, round(1 / sample_rate)) if steps is None else steps,
        collate_fn=data_loader.collate_fn,
        rank=rank,
        world_size=world_size,
        **{name: getattr(data_loader, name) for name in _KEPT},
    )


class _Shard(Settled, Subset[Any]):
    """A rank's share of a dataset; accepts an empty list of indices, which datasets may refuse."""

    settled = frozenset({"dataset", "indices"})

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return super().__getitems__(indices) if indices else []


class _CollateAlsoNothing:
    """A collate function that also accepts an empty list; a class, since workers pickle it."""

    def __init__(self, collate: Collate, nothing: Any) -> None:
        self._collate = collate
        self._nothing = nothing

    def __call__(self, samples: list[Any]) -> Any:
        if not samples:  # Copied, because a user may write to a batch.
            return pytree.tree_map(torch.clone, self._nothing)
        count, batch = len(samples), self._collate(samples)
        for leaf in pytree.tree_leaves(batch):
            if isinstance(leaf, torch.Tensor) and (leaf.dim() == 0 or len(leaf) != count):
                raise ValueError(
                    f"collate_fn made a tensor of shape {tuple(leaf.shape)} of {count} samples: "
                    "each must be one row, since clipping takes rows for samples"
                )
        return batch


def _without_rows(batch_of_one: Any) -> Any:
    """Return a batch without samples, with the structure, dtypes and shapes of a batch of one."""
    for leaf in pytree.tree_leaves(batch_of_one):
        what = type(leaf).__name__
        if isinstance(leaf, torch.Tensor):
            if leaf.dim() > 0 and len(leaf) == 1:
                continue
            what = f"a tensor of shape {tuple(leaf.shape)}"
        raise ValueError(
            "collate_fn must make tensors with a first dimension of 1 (in tuples, lists and dicts) "
            f"of one sample, got {what}: the structure of an empty batch is not known otherwise"
        )
    return pytree.tree_map(lambda leaf: leaf[:0], batch_of_one)

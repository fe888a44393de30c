"""What a study trains: a model, every client's own data, and data that no client has."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.lab.tasks.criterion import Classification, Criterion

Batch = tuple[Tensor, Tensor]
Prepare = Callable[[Tensor], Tensor]

_EVAL_BATCH = 128


def shuffled_epochs(count: int, batch_size: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield batches of indices below ``count`` without end, one permutation after the other.

    Every batch is full: one that begins at the end of an epoch is filled up from the next, so all
    samples are seen equally often whatever the batch size.  A batch larger than ``count`` therefore
    holds samples more than once.
    """
    waiting = torch.empty(0, dtype=torch.long)
    while True:
        while len(waiting) < batch_size:
            waiting = torch.cat([waiting, torch.randperm(count, generator=generator)])
        batch, waiting = waiting[:batch_size], waiting[batch_size:]
        yield batch


def _unchanged(inputs: Tensor) -> Tensor:
    return inputs


@dataclass(frozen=True, eq=False)
class Shard:
    """Some samples of a data set: those of one client, or those held out.

    Shards share the tensors of their data set; each only has its own indices.

    Args:
        inputs: of the whole data set, samples first.
        targets: likewise: a class per sample, or a sequence of them.
        indices: which samples belong to this shard.
        prepare: turns a batch of raw inputs into inputs of the model.

    Example::

        >>> shard = Shard(torch.arange(10.0), torch.arange(10), indices=torch.tensor([2, 3, 5]))
        >>> batches = shard.batches(3, torch.Generator().manual_seed(0))
        >>> sorted(next(batches)[1].tolist()), sorted(next(batches)[1].tolist())
        ([2, 3, 5], [2, 3, 5])
    """

    inputs: Tensor
    targets: Tensor
    indices: Tensor
    prepare: Prepare = _unchanged

    def __len__(self) -> int:
        return len(self.indices)

    def batches(self, batch_size: int, generator: torch.Generator) -> Iterator[Batch]:
        """Yield shuffled batches without end; see :func:`shuffled_epochs`.

        Args:
            batch_size: samples in each batch.
            generator: a CPU generator, the only source of order.

        Raises:
            ValueError: if ``batch_size`` is not positive, or the shard is empty.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        if not len(self):
            raise ValueError("a shard without samples has no batches")
        return (
            self._batch(self.indices[places])
            for places in shuffled_epochs(len(self), batch_size, generator)
        )

    def in_order(self, batch_size: int) -> Iterator[Batch]:
        """Yield every sample once; the last batch may be smaller."""
        return (self._batch(indices) for indices in self.indices.split(batch_size))

    def _batch(self, indices: Tensor) -> Batch:
        return self.prepare(self.inputs[indices]), self.targets[indices]


@dataclass(frozen=True, eq=False)
class Task:
    """Something to learn, divided over clients.

    Data stays on the CPU; each batch goes to where the model's parameters are.

    Args:
        name: what :func:`~benchmarks.lab.tasks.build_task` knows it by.
        make_model: returns a new model whose weights follow from ``torch.manual_seed``.
        clients: the training data.
        held_out: what the model is judged on.
        validation: what settings are tuned on, see :meth:`with_validation`.
        training: as many of the training samples, which show how well they are fitted.
        criterion: how outputs are compared with targets.
        seeds_apart: the distance of the seeds of clients' batches between seeds of runs.

    Example::

        >>> from benchmarks.lab.tasks import build_task
        >>> task = build_task("digits", clients=5, seed=0)
        >>> _ = torch.manual_seed(0)
        >>> model = task.make_model()
        >>> batches = task.clients[0].batches(32, torch.Generator().manual_seed(0))
        >>> task.loss(model, next(batches)).backward()
        >>> sorted(task.evaluate(model))
        ['error', 'loss']
    """

    name: str
    make_model: Callable[[], nn.Module]
    clients: Sequence[Any]
    held_out: Shard
    validation: Shard | None = None
    training: Shard | None = None
    criterion: Criterion = field(default_factory=Classification)
    seeds_apart: int = 100_003

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the criterion's loss of a batch, which is trained."""
        return self.criterion.loss(*_predict(model, batch))

    def with_validation(self, share: float, seed: int) -> "Task":
        """Return the task with a share of each client's samples taken away, to tune settings on.

        Args:
            share: of the samples, in (0, 1); of each client at least one is left.
            seed: says which are taken.

        Raises:
            ValueError: if that is not a single sample.
        """
        generator = torch.Generator().manual_seed(seed)
        kept, taken = [], []
        for client in self.clients:
            places = torch.randperm(len(client), generator=generator)
            count = min(round(share * len(client)), len(client) - 1)
            taken.append(client.indices[places[:count]])
            kept.append(replace(client, indices=client.indices[places[count:].sort().values]))
        validation = torch.cat(taken)
        if not len(validation):
            samples = sum(len(client) for client in self.clients)
            raise ValueError(
                f"{self.name}: {share:g} of the samples of {len(kept)} clients, {samples} in all, "
                "is none to tune settings on: take a larger share, or fewer clients"
            )
        fitted = torch.cat([client.indices for client in kept])
        shown = fitted[torch.randperm(len(fitted), generator=generator)[: len(validation)]]
        first = self.clients[0]
        return replace(
            self,
            clients=kept,
            validation=replace(first, indices=validation),
            training=replace(first, indices=shown),
        )

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return means over all predictions; the model keeps its mode.

        ``loss`` and ``error`` are the criterion's on held-out data, such as the cross-entropy
        without label smoothing and the share of predictions that are wrong; ``validation`` and
        ``training`` are the losses there, if there are such samples.
        """
        training = model.training
        model.eval()
        loss, error = self._judge(model, self.held_out)
        others = {"validation": self.validation, "training": self.training}
        losses = {name: self._judge(model, shard)[0] for name, shard in others.items() if shard}
        model.train(training)
        return {"loss": loss, "error": error, **losses}

    def _judge(self, model: nn.Module, shard: Shard) -> tuple[float, float]:
        """Return the mean loss and the mean error."""
        losses, errors = [], []
        count = 0
        for batch in shard.in_order(_EVAL_BATCH):
            loss, error, predictions = self.criterion.totals(*_predict(model, batch))
            losses.append(loss)
            errors.append(error)
            count += predictions
        total_loss, total_error = torch.stack(losses).sum(), torch.stack(errors).sum()
        return total_loss.item() / count, total_error.item() / count


def _predict(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return outputs and targets, where the model is."""
    device = next(model.parameters()).device
    inputs, targets = (tensor.to(device) for tensor in batch)
    return model(inputs), targets

"""Data that are private but for a small part, and what optimizers are told of them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.lab.tasks import Shard, Task, build_task
from benchmarks.lab.tasks.task import Prepare
from benchmarks.lab.training import batch_generator
from benchmarks.studies.private_optimizers.models import small_cnn
from benchmarks.studies.private_training import PrivatePlan
from comm_hooks.optim.private.optimizers.public_knowledge import PublicGradients

_PUBLIC_BATCH = 32


@dataclass(frozen=True)
class Kind:
    """A task of the study.

    Args:
        steps: of a run.
        batch: expected samples per step.
        make_model: another network than the task's own, if need be.
        options: of the task.
        words: whether inputs are counts of words, and the model is linear in them.
    """

    steps: int
    batch: int
    make_model: Callable[[], nn.Module] | None = None
    options: dict[str, Any] | None = None
    words: bool = False


KINDS = {
    "digits": Kind(150, 64, small_cnn),
    "verses": Kind(1500, 64, words=True),
    "autoencoder": Kind(1000, 64, options={"widths": "128,32"}),
}


@dataclass(frozen=True)
class PartlyPublic:
    """A task whose training data are partly public.

    Args:
        task: with one client, which has the private ones.
        public: the others, held back from all methods but those that want public data.
    """

    task: Task
    public: Shard


def build(
    name: str,
    seed: int,
    data_dir: Path | None,
    *,
    public: float,
    validation: float,
    turned: bool = False,
) -> PartlyPublic:
    """Return the data for one seed.

    Args:
        name: a key of :data:`KINDS`.
        seed: says which samples are public, and which are for validation.
        data_dir: where images lie.
        public: the share of the training data that is public.
        validation: the share of the others that settings are tuned on.
        turned: turn the public images by a right angle, as if they came from elsewhere.

    Raises:
        ValueError: for data that is missing or not what it should be, and too little of it.
    """
    kind = KINDS[name]
    if turned and kind.words:
        raise ValueError(f"--public-turned: {name} has no images")
    options = kind.options or {}
    task = build_task(name, clients=1, seed=seed, data_dir=data_dir, **options)
    samples = task.clients[0]
    count = round(public * len(samples))
    if not count:
        raise ValueError(
            f"{name}: of {len(samples)} training samples none is public: give a larger "
            "--public-share"
        )
    private = replace(
        task,
        make_model=kind.make_model or task.make_model,
        clients=[replace(samples, indices=samples.indices[count:])],
    )
    if turned and samples.targets is samples.inputs:
        raise ValueError(f"--public-turned: {name} would have to turn its images back")
    prepare = _turning(samples.prepare) if turned else samples.prepare
    return PartlyPublic(
        private.with_validation(validation, seed),
        replace(samples, indices=samples.indices[:count], prepare=prepare),
    )


def _turning(prepare: Prepare) -> Prepare:
    """Return what prepares images, (samples, channels, height, width), and turns them."""

    def turn(images: torch.Tensor) -> torch.Tensor:
        return prepare(images).rot90(dims=(-2, -1))

    return turn


@dataclass(frozen=True)
class Given:
    """What an optimizer is made from.

    Args:
        model: that is trained.
        data: what it is trained on.
        plan: how.
        seed: of the order of public batches.
    """

    model: nn.Module
    data: PartlyPublic
    plan: PrivatePlan
    seed: int

    @property
    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.model.named_parameters())

    def public_gradients(self) -> PublicGradients:
        """Return what differentiates one batch of public samples after the other."""
        return self._gradients(self.data.public)

    def private_gradients(self) -> PublicGradients:
        """Return the same of the private samples: what nobody may have, to see what it is worth."""
        return self._gradients(self.data.task.clients[0])

    def public_counts(self) -> torch.Tensor:
        """Return the words of the public samples, (samples, vocabulary)."""
        public = self.data.public
        return torch.cat([inputs for inputs, _ in public.in_order(len(public))])

    def train_on_public(self, epochs: int, lr: float) -> None:
        """Train the model on the public samples with RMSProp: a start that costs no privacy."""
        public = self.data.public
        batch = min(len(public), _PUBLIC_BATCH)
        batches = public.batches(batch, batch_generator(self.seed, 2))
        optimizer = torch.optim.RMSprop(self.model.parameters(), lr)
        for _ in range(epochs * -(-len(public) // batch)):
            optimizer.zero_grad()
            self.data.task.loss(self.model, next(batches)).backward()
            optimizer.step()
        optimizer.zero_grad()

    def _gradients(self, samples: Shard) -> PublicGradients:
        batches = samples.batches(min(len(samples), _PUBLIC_BATCH), batch_generator(self.seed, 1))
        return PublicGradients(self.model, self.data.task.loss, batches)

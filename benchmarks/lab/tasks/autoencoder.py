"""Fashion-MNIST through a bottleneck: images that a deep autoencoder is to reconstruct."""

import functools
import itertools
from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn

from benchmarks.lab.tasks.criterion import Reconstruction, scaled
from benchmarks.lab.tasks.fashion_mnist import SIDE, fashion_mnist
from benchmarks.lab.tasks.task import Shard, Task

WIDTHS = "1000,500,250,30"
"""Hinton & Salakhutdinov, Science 2006, and many after them: 2.8 M parameters."""


def autoencoder(
    *,
    clients: int,
    seed: int,
    data_dir: Path | None = None,
    widths: str = WIDTHS,
) -> Task:
    """Return the task: 60,000 grey images of 28x28 pixels to train on, 10,000 held out.

    The loss is the mean squared error of pixels between 0 and 1; what is trained is the sum over an
    image.

    Args:
        clients: how many share the training images.
        seed: of the partition.
        data_dir: as for :func:`~benchmarks.lab.tasks.fashion_mnist.fashion_mnist`.
        widths: of the encoder's layers, divided by commas; the decoder mirrors them.

    Raises:
        ValueError: for values out of range, and files that are missing or are not what was
            published.
    """
    try:
        hidden = [int(width) for width in str(widths).split(",")]
    except ValueError:
        hidden = []
    if not hidden or min(hidden) < 1:
        raise ValueError(f"autoencoder: widths must be positive numbers, got {widths!r}")
    task = fashion_mnist(clients=clients, seed=seed, data_dir=data_dir)
    return replace(
        task,
        name="autoencoder",
        make_model=functools.partial(make_autoencoder, SIDE * SIDE, hidden),
        clients=[_reconstructed(client) for client in task.clients],
        held_out=_reconstructed(task.held_out),
        criterion=Reconstruction(_variance(task.clients[0].inputs)),
    )


def _reconstructed(shard: Shard) -> Shard:
    """Return the shard with images for labels."""
    return replace(shard, targets=shard.inputs, prepare=scaled)


def make_autoencoder(pixels: int, hidden: list[int]) -> nn.Sequential:
    """Return linear layers down to the last width and up again, ReLU between, a sigmoid at the end.

    Args:
        pixels: of an image.
        hidden: the encoder's widths.  The code itself has no ReLU.

    Example::

        >>> sum(p.numel() for p in make_autoencoder(784, [1000, 500, 250, 30]).parameters())
        2837314
    """
    down = [pixels, *hidden]
    layers: list[nn.Module] = [nn.Flatten()]
    for half in (down, down[::-1]):
        for inputs, outputs in itertools.pairwise(half):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        layers.pop()
    return nn.Sequential(*layers, nn.Sigmoid())


def _variance(images: Tensor) -> float:
    """Return the variance of a pixel in [0, 1] over the images, in the mean of all pixels."""
    return float(scaled(images).flatten(1).var(0, correction=0).mean())

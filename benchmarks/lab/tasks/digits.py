"""Handwritten digits that come with scikit-learn: nothing to download, seconds to train."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.lab.tasks.criterion import Classification
from benchmarks.lab.tasks.partition import partition_labelled
from benchmarks.lab.tasks.resnet import resnet7
from benchmarks.lab.tasks.task import Shard, Task
from comm_hooks.config import unknown

CLASSES = 10
_HELD_OUT = 0.2


def digits(
    *,
    clients: int,
    seed: int,
    partition: str = "iid",
    classes_per_client: int = 2,
    label_smoothing: float = 0.0,
    model: str = "mlp",
) -> Task:
    """Return the task: 1,437 images of 8x8 pixels to train on, 360 held out.

    Args:
        clients: how many share the training images.
        seed: of the partition; what is held out is always the same.
        partition, classes_per_client: see
            :func:`~benchmarks.lab.tasks.partition.partition_labelled`.
        label_smoothing: of the training loss.
        model: ``"mlp"``, one hidden layer of 200 (15,010 parameters), or ``"resnet"``
            (:func:`~benchmarks.lab.tasks.resnet.resnet7`, 112,106 parameters).

    Raises:
        ValueError: for values out of range, unknown names, and without scikit-learn.
    """
    if model not in MODELS:
        raise ValueError(unknown("model of digits", model, MODELS))
    (images, labels), held_out = _load()
    parts = partition_labelled(
        labels, partition, clients=clients, classes_per_client=classes_per_client, seed=seed
    )
    return Task(
        name="digits",
        make_model=MODELS[model],
        clients=[Shard(images, labels, indices) for indices in parts],
        held_out=Shard(*held_out, torch.arange(len(held_out[0]))),
        criterion=Classification(label_smoothing),
    )


def _mlp() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, CLASSES))


def _resnet() -> nn.Module:
    return resnet7(channels=1, classes=CLASSES, width=32)


MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": _mlp, "resnet": _resnet}


def _load() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Return images (count, 1, 8, 8) and labels, to train on and held out (stratified)."""
    try:
        from sklearn.datasets import load_digits  # type: ignore[import-untyped]
        from sklearn.model_selection import train_test_split  # type: ignore[import-untyped]
    except ImportError:
        raise ValueError(
            "digits: the images come with scikit-learn, which is not installed: "
            "pip install 'comm-hooks[benchmarks]'"
        ) from None
    pixels, labels = load_digits(return_X_y=True)
    split = train_test_split(
        torch.from_numpy(pixels).float().view(-1, 1, 8, 8),
        torch.from_numpy(labels).long(),
        test_size=_HELD_OUT,
        stratify=labels,
        random_state=0,
    )
    images, held_out_images, labels, held_out_labels = split
    # Over all pixels: some in the corners are never set, and have no deviation of their own.
    mean, deviation = images.mean(), images.std()
    return (
        ((images - mean) / deviation, labels),
        ((held_out_images - mean) / deviation, held_out_labels),
    )

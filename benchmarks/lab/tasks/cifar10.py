"""CIFAR-10 (Krizhevsky, 2009) from its published files for Python."""

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.lab.tasks.criterion import Classification
from benchmarks.lab.tasks.local_data import locate
from benchmarks.lab.tasks.partition import partition_labelled
from benchmarks.lab.tasks.resnet import GROUPS, resnet9
from benchmarks.lab.tasks.task import Shard, Task

CLASSES = 10
TRAINING_FILES = tuple(f"data_batch_{number}" for number in range(1, 6))
HELD_OUT_FILES = ("test_batch",)

_SIDE = 32
_VALUES = 3 * _SIDE * _SIDE
_PADDING = 4
# Of the red, green and blue values of the training images, divided by 255.
_MEAN = torch.tensor([0.4914, 0.4822, 0.4465]).view(3, 1, 1)
_DEVIATION = torch.tensor([0.2470, 0.2435, 0.2616]).view(3, 1, 1)


def cifar10(
    *,
    clients: int,
    seed: int,
    data_dir: Path | None = None,
    partition: str = "iid",
    classes_per_client: int = 2,
    label_smoothing: float = 0.0,
    width: int = 64,
    augment: bool = True,
) -> Task:
    """Return the task: 50,000 colour images of 32x32 pixels to train on, 10,000 held out.

    The model is :func:`~benchmarks.lab.tasks.resnet.resnet9`.

    Args:
        clients: how many share the training images.
        seed: of the partition.
        data_dir: ``cifar-10-batches-py``, unpacked from ``cifar-10-python.tar.gz``, or the folder
            that holds it.
        partition: ``"iid"`` or ``"classes"``.
        classes_per_client: for ``"classes"``.
        label_smoothing: of the training loss.
        width: channels of the first convolution, a multiple of 16.  6.6 M parameters at 64; 41 M at
            160, as many as the ResNet-101 of the SAFL paper.
        augment: crop training images at random out of their black-padded selves and flip half.

    Raises:
        ValueError: for values out of range, unknown names, and files that are missing or are not
            what was published.
    """
    if width < 1 or width % GROUPS:
        raise ValueError(f"cifar10: width must be a positive multiple of {GROUPS}, got {width!r}")
    folder = locate(
        "cifar10",
        data_dir,
        folder="cifar-10-batches-py",
        archive="cifar-10-python.tar.gz",
        contents=[*TRAINING_FILES, *HELD_OUT_FILES],
    )
    images, labels = _read([folder / name for name in TRAINING_FILES])
    held_out_images, held_out_labels = _read([folder / name for name in HELD_OUT_FILES])
    parts = partition_labelled(
        labels, partition, clients=clients, classes_per_client=classes_per_client, seed=seed
    )
    prepare = augmented if augment else standardized
    return Task(
        name="cifar10",
        make_model=lambda: resnet9(channels=3, classes=CLASSES, width=width),
        clients=[Shard(images, labels, indices, prepare) for indices in parts],
        held_out=Shard(
            held_out_images, held_out_labels, torch.arange(len(held_out_images)), standardized
        ),
        criterion=Classification(label_smoothing),
    )


def standardized(images: Tensor, generator: torch.Generator | None) -> Tensor:
    """Turn bytes (batch, 3, 32, 32) into floats of mean 0 and deviation 1 per colour."""
    return (images.float() / 255 - _MEAN) / _DEVIATION


def augmented(images: Tensor, generator: torch.Generator | None) -> Tensor:
    """Shift each image by up to 4 pixels both ways and flip half of them; then standardize.

    Without a generator, only standardize.
    """
    if generator is None:
        return standardized(images, None)
    count = len(images)
    corners = torch.randint(2 * _PADDING + 1, (2, count, 1), generator=generator)
    rows, columns = corners + torch.arange(_SIDE)
    flip = torch.randint(2, (count, 1), generator=generator).bool()
    columns = torch.where(flip, columns.flip(1), columns)
    padded = F.pad(images, [_PADDING] * 4).permute(0, 2, 3, 1)
    crops = padded[torch.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]]
    return standardized(crops.permute(0, 3, 1, 2), generator)


def _read(paths: list[Path]) -> tuple[Tensor, Tensor]:
    """Return the images (count, 3, 32, 32), as bytes, and labels of some files."""
    batches = [_read_batch(path) for path in paths]
    images, labels = zip(*batches, strict=True)
    return torch.cat(images), torch.cat(labels)


def _read_batch(path: Path) -> tuple[Tensor, Tensor]:
    try:
        with path.open("rb") as file:
            # Written by Python 2, whose strings are our bytes.
            content = _Unpickler(file, encoding="bytes").load()
        pixels, labels = _pixels(content[b"data"]), torch.tensor(content[b"labels"])
    except OSError as error:
        raise ValueError(f"cifar10: cannot read {path}: {error.strerror}") from None
    except Exception as error:  # a damaged pickle can raise nearly anything
        raise ValueError(f"cifar10: {path} is not a published batch: {_line(error)}") from None
    if labels.dtype != torch.long or labels.shape != pixels.shape[:1]:
        raise ValueError(f"cifar10: {path} does not have one label for each of its images")
    if len(labels) and not 0 <= int(labels.min()) <= int(labels.max()) < CLASSES:
        raise ValueError(f"cifar10: {path} has labels outside of 0 ... {CLASSES - 1}")
    return pixels.view(-1, 3, _SIDE, _SIDE), labels


def _line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


class _Saved:
    """What a pickle says about a NumPy object, as plain values."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments
        self.state: tuple[Any, ...] = ()

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    """Reads plain values and arrays, and calls nothing that a file names.

    Unpickling calls whatever the file asks for.  Not even NumPy's own constructors are harmless:
    ``numpy.ndarray`` makes an array of objects out of any bytes, taking them for addresses.  So the
    three names that arrays are made with stand for a record of what was to be made.
    """

    _NAMES = frozenset(
        {
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy._core.multiarray", "_reconstruct"),
        }
    )

    def find_class(self, module: str, name: str) -> type[_Saved]:
        if (module, name) not in self._NAMES:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which no batch needs")
        return _Saved


def _pixels(array: _Saved) -> Tensor:
    """Return the recorded array, which must be one of bytes, (count, 3072)."""
    _, shape, dtype, column_major, content = array.state
    if dtype.arguments[0] not in (b"u1", "u1") or column_major or shape[1:] != (_VALUES,):
        raise ValueError(f"its data is not an array of bytes with {_VALUES} columns")
    values = np.frombuffer(content, dtype=np.uint8).reshape(shape)
    return torch.from_numpy(values.copy())  # a buffer is read-only, which torch does not know

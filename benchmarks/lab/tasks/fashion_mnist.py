"""Fashion-MNIST (Xiao, Rasul & Vollgraf, 2017) from its published files."""

import functools
import gzip
import math
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.lab.tasks.criterion import scaled
from benchmarks.lab.tasks.partition import partition_labelled
from benchmarks.lab.tasks.resnet import resnet7
from benchmarks.lab.tasks.task import Shard, Task
from benchmarks.lab.tasks.vision_transformer import VisionTransformer
from comm_hooks.config import unknown

CLASSES = 10
SIDE = 28
DEBIAN = Path("/usr/share/datasets/fashion-mnist")
"""Where Debian's package puts the files."""

_FILES = {"train": ("train-images-idx3", "train-labels-idx1"),
          "t10k": ("t10k-images-idx3", "t10k-labels-idx1")}  # fmt: skip
_MEAN, _DEVIATION = 0.2860, 0.3530  # of the training images, divided by 255
_UNSIGNED_BYTES = 8


def fashion_mnist(
    *,
    clients: int,
    seed: int,
    data_dir: Path | None = None,
    partition: str = "iid",
    classes_per_client: int = 2,
    concentration: float = 0.3,
    model: str = "vit",
    width: int | None = None,
    judged: int = 10_000,
) -> Task:
    """Return the task: 60,000 grey images of 28x28 pixels to train on, 10,000 held out.

    Args:
        clients: how many share the training images.
        seed: of the partition.
        data_dir: the folder of the four published files, packed or not; by default that of Debian's
            ``dataset-fashion-mnist``.
        partition, classes_per_client, concentration: see
            :func:`~benchmarks.lab.tasks.partition.partition_labelled`.
        model: ``"vit"``, a :class:`VisionTransformer` over 49 patches (0.60 M parameters);
            ``"resnet"`` (:func:`~benchmarks.lab.tasks.resnet.resnet7`, 0.45 M); and two
            with dropout, ``"mlp"`` with one hidden layer (0.16 M) and ``"cnn"`` with two
            convolutions and two linear layers (0.02 M).
        width: of the model's hidden states, a multiple of 4; by default 128 of a transformer, 64 of
            a ResNet, 200 of an MLP, and 20 channels of a CNN's second convolution.
        judged: the first so many of the held-out images, if there are so many.

    Raises:
        ValueError: for values out of range, unknown names, and files that are missing or are not
            what was published.
    """
    if model not in MODELS:
        raise ValueError(unknown("model of fashion_mnist", model, MODELS))
    if width is not None and (width < 4 or width % 4):
        raise ValueError(f"fashion_mnist: width must be a multiple of 4, got {width!r}")
    if judged < 1:
        raise ValueError(f"fashion_mnist: judged must be at least 1, got {judged!r}")
    folder = DEBIAN if data_dir is None else data_dir
    images, labels = _read(folder, "train")
    held_out_images, held_out_labels = _read(folder, "t10k")
    parts = partition_labelled(
        labels,
        partition,
        clients=clients,
        classes_per_client=classes_per_client,
        seed=seed,
        concentration=concentration,
    )
    judged = min(judged, len(held_out_images))
    return Task(
        name="fashion_mnist",
        make_model=MODELS[model] if width is None else functools.partial(MODELS[model], width),
        clients=[Shard(images, labels, indices, _standardized) for indices in parts],
        held_out=Shard(held_out_images, held_out_labels, torch.arange(judged), _standardized),
    )


def _vit(width: int = 128) -> nn.Module:
    return VisionTransformer(
        channels=1, side=SIDE, patch=4, layers=3, width=width, heads=4, classes=CLASSES
    )


def _resnet(width: int = 64) -> nn.Module:
    return resnet7(channels=1, classes=CLASSES, width=width)


def _mlp(width: int = 200) -> nn.Module:
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(SIDE * SIDE, width),
        nn.ReLU(),
        nn.Dropout(),
        nn.Linear(width, CLASSES),
    )


def _cnn(width: int = 20) -> nn.Module:
    """Return max-pooled convolutions, dropout, and linear layers of 16 widths and of 50 cells."""
    return nn.Sequential(
        nn.Conv2d(1, width // 2, kernel_size=5),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Conv2d(width // 2, width, kernel_size=5),
        nn.Dropout2d(),
        nn.MaxPool2d(2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * width, 50),
        nn.ReLU(),
        nn.Dropout(),
        nn.Linear(50, CLASSES),
    )


MODELS: dict[str, Callable[..., nn.Module]] = {
    "vit": _vit,
    "resnet": _resnet,
    "mlp": _mlp,
    "cnn": _cnn,
}


def _standardized(images: Tensor) -> Tensor:
    return (scaled(images) - _MEAN) / _DEVIATION


def _read(folder: Path, part: str) -> tuple[Tensor, Tensor]:
    """Return images (count, 1, 28, 28), as bytes, and labels (count,)."""
    pixels, classes = (_read_idx(folder, f"{name}-ubyte") for name in _FILES[part])
    if pixels.shape[1:] != (SIDE, SIDE) or classes.ndim != 1 or len(pixels) != len(classes):
        raise ValueError(
            f"fashion_mnist: {folder} has {part} images of shape {tuple(pixels.shape)} and labels "
            f"of shape {tuple(classes.shape)}, not (count, 28, 28) and (count,)"
        )
    if len(classes) and int(classes.max()) >= CLASSES:
        raise ValueError(f"fashion_mnist: {folder} has {part} labels above {CLASSES - 1}")
    return pixels[:, None], classes.long()


def _read_idx(folder: Path, name: str) -> Tensor:
    """Return the bytes of a file in the IDX format, in their shape.

    Four bytes (0, 0, kind of number, dimensions), then a big-endian 32-bit size per dimension.
    """
    packed, plain = folder / f"{name}.gz", folder / name
    try:
        content = gzip.decompress(packed.read_bytes()) if packed.exists() else plain.read_bytes()
    except FileNotFoundError:
        raise ValueError(
            f"fashion_mnist: {folder} has no {name}.gz: apt install dataset-fashion-mnist, or pass "
            "the folder of the four published files as --data-dir"
        ) from None
    except OSError as error:
        raise ValueError(f"fashion_mnist: cannot read {name} in {folder}: {error}") from None
    except (EOFError, zlib.error) as error:
        raise ValueError(f"fashion_mnist: {packed} is damaged: {error}") from None
    start = 4 + 4 * content[3] if len(content) >= 4 else 0
    if content[:3] == bytes((0, 0, _UNSIGNED_BYTES)) and len(content) >= start:
        shape = struct.unpack(f">{content[3]}I", content[4:start])
        if math.prod(shape) == len(content) - start and shape:
            return torch.frombuffer(bytearray(content[start:]), dtype=torch.uint8).view(shape)
    raise ValueError(f"fashion_mnist: {name} in {folder} is not a file of bytes in IDX format")

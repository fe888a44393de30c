"""Small data sets in the formats that the real ones are published in."""

import gzip
import pickle
import struct
from collections.abc import Iterable
from pathlib import Path

import numpy as np


def cifar10_batch(pixels: np.ndarray, labels: list[int], dtype: bytes = b"u1") -> bytes:
    """A batch as Python 2 and its NumPy pickled it: strings of bytes, module ``numpy.core``."""

    def string(value: bytes) -> bytes:
        return pickle.BINSTRING + struct.pack("<i", len(value)) + value

    def integer(value: int) -> bytes:
        return pickle.BININT + struct.pack("<i", value)

    def call(module: str, name: str, *arguments: bytes) -> bytes:
        function = pickle.GLOBAL + f"{module}\n{name}\n".encode()
        return function + pickle.MARK + b"".join(arguments) + pickle.TUPLE + pickle.REDUCE

    def build(*state: bytes) -> bytes:
        return pickle.MARK + b"".join(state) + pickle.TUPLE + pickle.BUILD

    def sequence(values: Iterable[int]) -> bytes:
        return pickle.MARK + b"".join(map(integer, values))

    array = call(
        "numpy.core.multiarray",
        "_reconstruct",
        pickle.GLOBAL + b"numpy\nndarray\n",
        integer(0) + pickle.TUPLE1,
        string(b"b"),
    )
    kind = call("numpy", "dtype", string(dtype), integer(0), integer(1))
    kind += build(integer(3), string(b"|"), pickle.NONE * 3, integer(-1) * 2, integer(0))
    shape = sequence(pixels.shape) + pickle.TUPLE
    array += build(integer(1), shape, kind, pickle.NEWFALSE, string(pixels.tobytes()))
    entries = [
        string(b"batch_label") + string(b"a batch"),
        string(b"labels") + pickle.EMPTY_LIST + sequence(labels) + pickle.APPENDS,
        string(b"data") + array,
    ]
    start = pickle.PROTO + b"\x02" + pickle.EMPTY_DICT + pickle.MARK
    return start + b"".join(entries) + pickle.SETITEMS + pickle.STOP


def write_cifar10(folder: Path, per_batch: int = 20) -> tuple[np.ndarray, np.ndarray]:
    """Write ``cifar-10-batches-py`` and return the training images, as pickled, and labels.

    An image's class is told by its stripes: five periods, along rows and along columns, which
    neither shifts nor flips change.
    """
    root = folder / "cifar-10-batches-py"
    root.mkdir()
    names = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
    written = []
    for seed, name in enumerate(names):
        labels = np.arange(per_batch) % 10
        images = np.random.default_rng(seed).integers(0, 100, (per_batch, 3, 32, 32))
        for image, label in zip(images, labels, strict=True):
            bright = np.arange(32) // 2 ** (label // 2) % 2 * 150
            image += bright[:, None] if label % 2 else bright
        pixels = images.astype(np.uint8).reshape(per_batch, -1)
        (root / name).write_bytes(cifar10_batch(pixels, labels.tolist()))
        written.append((pixels, labels))
    all_pixels, all_labels = zip(*written[:-1], strict=True)
    return np.concatenate(all_pixels), np.concatenate(all_labels)


def idx(values: np.ndarray) -> bytes:
    """Bytes in the IDX format."""
    sizes = struct.pack(f">{values.ndim}I", *values.shape)
    return bytes((0, 0, 8, values.ndim)) + sizes + values.astype(np.uint8).tobytes()


def write_fashion_mnist(folder: Path, training: int = 200, held_out: int = 60) -> None:
    """Write the four files, packed; an image's class is told by its stripes, as above."""
    for part, count, seed in (("train", training, 0), ("t10k", held_out, 1)):
        labels = np.arange(count) % 10
        images = np.random.default_rng(seed).integers(0, 60, (count, 28, 28))
        for image, label in zip(images, labels, strict=True):
            bright = np.arange(28) // 2 ** (label // 2) % 2 * 150
            image += bright[:, None] if label % 2 else bright
        for name, values in (("images-idx3", images), ("labels-idx1", labels)):
            (folder / f"{part}-{name}-ubyte.gz").write_bytes(gzip.compress(idx(values)))

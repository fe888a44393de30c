"""CIFAR-10's files: read as published, never executed; images cropped and flipped."""

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.lab.tasks import build_task
from benchmarks.lab.tasks.cifar10 import augmented, standardized
from tests.benchmarks.lab.published import cifar10_batch, write_cifar10

PIXELS = np.random.default_rng(0).integers(0, 256, (4, 3072)).astype(np.uint8)


def test_images_and_labels_are_read_in_order(tmp_path: Path) -> None:
    pixels, labels = write_cifar10(tmp_path)
    task = build_task("cifar10", clients=1, data_dir=tmp_path, width=16)
    client = task.clients[0]
    np.testing.assert_array_equal(client.inputs.numpy(), pixels.reshape(-1, 3, 32, 32))
    np.testing.assert_array_equal(client.targets.numpy(), labels)
    assert len(task.held_out) == 20


class Calls:
    """Makes whoever unpickles it call something."""

    def __init__(self, function: Callable[..., Any], *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda path: Calls(os.system, f"touch {path}"), r"system"),
        (lambda path: Calls(eval, f"open({str(path)!r}, 'w')"), r"builtins\.eval"),
        (lambda path: Calls(os.mkdir, str(path)), r"mkdir"),
        (lambda path: Calls(np.memmap, str(path), "u1", "w+", 0, (1,)), r"numpy\.memmap"),
    ],
)
def test_a_file_that_asks_for_calls_is_refused(
    call: Callable[[Path], Calls], name: str, tmp_path: Path
) -> None:
    write_cifar10(tmp_path)
    trace = tmp_path / "trace"
    content = pickle.dumps({b"data": call(trace), b"labels": [1]}, protocol=3)
    (tmp_path / "cifar-10-batches-py" / "data_batch_3").write_bytes(content)
    with pytest.raises(ValueError, match=f"data_batch_3 is not .*asks for .*{name}, which") as e:
        build_task("cifar10", clients=1, data_dir=tmp_path)
    assert "\n" not in str(e.value)
    assert not trace.exists()
    # It would have done it.
    pickle.loads(content)
    assert trace.exists()


def test_not_even_arrays_are_made_by_the_file(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    # An array of objects at addresses of the file's choice: reading one is a crash at best.
    forged = Calls(np.ndarray, (1,), "O", b"12345678")
    content = pickle.dumps({b"data": forged, b"labels": [1]}, protocol=3)
    (tmp_path / "cifar-10-batches-py" / "test_batch").write_bytes(content)
    with pytest.raises(ValueError, match="test_batch is not a published batch"):
        build_task("cifar10", clients=1, data_dir=tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "EOFError"),
        (cifar10_batch(PIXELS, [1] * 4)[:-9], "is not a published batch"),
        (pickle.dumps([1, 2]), "is not a published batch"),
        (pickle.dumps({b"data": PIXELS}, protocol=3), "KeyError"),
        (cifar10_batch(PIXELS, [1] * 4, dtype=b"i1"), "not an array of bytes"),
        (cifar10_batch(PIXELS[:, :3000], [1] * 4), "not an array of bytes with 3072 columns"),
        (cifar10_batch(PIXELS, [1] * 3), "does not have one label for each of its images"),
        (cifar10_batch(PIXELS, [1, 2, 10, 0]), "labels outside of 0 ... 9"),
        (cifar10_batch(PIXELS, [1, 2, -1, 0]), "labels outside of 0 ... 9"),
    ],
)
def test_damaged_files_are_refused(content: bytes, message: str, tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    path = tmp_path / "cifar-10-batches-py" / "data_batch_2"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        build_task("cifar10", clients=1, data_dir=tmp_path)
    assert str(caught.value).startswith(f"cifar10: {path}")
    assert "\n" not in str(caught.value)


def test_colours_are_standardized() -> None:
    # Bytes with the published mean and, in two halves, one deviation above and below.
    mean, deviation = np.array([0.4914, 0.4822, 0.4465]), np.array([0.2470, 0.2435, 0.2616])
    levels = np.round(255 * (mean + deviation * np.array([[-1], [1]])))
    images = torch.from_numpy(levels.astype(np.uint8)).view(2, 3, 1, 1).expand(2, 3, 32, 32)
    found = standardized(images, None)
    expected = torch.tensor([-1.0, 1.0]).view(2, 1, 1, 1).expand_as(found)
    torch.testing.assert_close(found, expected, atol=0.01, rtol=0)


def test_augmented_images_are_shifted_and_flipped_originals() -> None:
    images = torch.randint(0, 256, (60, 3, 32, 32), dtype=torch.uint8)
    found = augmented(images, torch.Generator().manual_seed(0))
    assert torch.equal(found, augmented(images, torch.Generator().manual_seed(0)))
    drawn = []
    for image, output in zip(images, found, strict=True):
        canvas = torch.zeros(3, 40, 40, dtype=torch.uint8)
        canvas[:, 4:36, 4:36] = image
        matches = []
        for down in range(9):
            for right in range(9):
                crop = canvas[:, down : down + 32, right : right + 32]
                for flip, candidate in enumerate((crop, crop.flip(2))):
                    if torch.equal(standardized(candidate, None), output):
                        matches.append((down, right, flip))
        assert len(matches) == 1
        drawn += matches
    downs, rights, flips = zip(*drawn, strict=True)
    assert set(downs) == set(rights) == set(range(9))
    assert 15 < sum(flips) < 45


def test_only_training_images_are_augmented(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    task = build_task("cifar10", clients=1, data_dir=tmp_path)
    plain = build_task("cifar10", clients=1, data_dir=tmp_path, augment=False)
    held_out, _ = next(task.held_out.in_order(20))
    assert torch.equal(held_out, standardized(task.held_out.inputs, None))
    in_order, _ = next(task.clients[0].in_order(100))
    assert torch.equal(
        in_order, standardized(task.clients[0].inputs, None)[task.clients[0].indices]
    )

    def batch(of: Any) -> torch.Tensor:
        return next(of.clients[0].batches(100, torch.Generator().manual_seed(0)))[0]

    originals = {
        tuple(row) for row in standardized(plain.clients[0].inputs, None)[:, 0, 16].tolist()
    }
    assert all(tuple(row) in originals for row in batch(plain)[:, 0, 16].tolist())
    assert sum(tuple(row) in originals for row in batch(task)[:, 0, 16].tolist()) < 20

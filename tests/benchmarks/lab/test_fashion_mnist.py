"""Fashion-MNIST's files: read packed or not, as published, and refused in one line otherwise."""

import gzip
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.lab.tasks import build_task
from benchmarks.lab.tasks.fashion_mnist import DEBIAN, MODELS
from tests.benchmarks.lab.published import idx, write_fashion_mnist

IMAGES, LABELS = "train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz"


def test_images_and_labels_are_read_in_order(tmp_path: Path) -> None:
    write_fashion_mnist(tmp_path)
    packed = build_task("fashion_mnist", clients=1, data_dir=tmp_path)
    for path in tmp_path.glob("*.gz"):
        path.with_suffix("").write_bytes(gzip.decompress(path.read_bytes()))
        path.unlink()
    plain = build_task("fashion_mnist", clients=1, data_dir=tmp_path)
    for task in (packed, plain):
        assert task.clients[0].inputs.shape == (200, 1, 28, 28)
        assert task.clients[0].targets.tolist() == [i % 10 for i in range(200)]
        assert len(task.held_out) == 60
    assert torch.equal(packed.clients[0].inputs, plain.clients[0].inputs)


@pytest.mark.parametrize("model", MODELS)
def test_models_give_a_logit_per_class(tmp_path: Path, model: str) -> None:
    write_fashion_mnist(tmp_path)
    task = build_task("fashion_mnist", clients=1, data_dir=tmp_path, model=model)
    inputs, _ = next(task.held_out.in_order(3))
    assert task.make_model()(inputs).shape == (3, 10)


@pytest.mark.skipif(not DEBIAN.exists(), reason="needs Debian's dataset-fashion-mnist")
def test_the_published_files_are_found() -> None:
    task = build_task("fashion_mnist", clients=4, partition="dirichlet")
    assert sum(map(len, task.clients)) == 60_000
    assert len(task.held_out) == 10_000


def damage(change: Callable[[bytes], bytes], name: str) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / name
        path.write_bytes(gzip.compress(change(gzip.decompress(path.read_bytes()))))

    return apply


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda folder: (folder / IMAGES).unlink(), r"apt install dataset-fashion-mnist"),
        (lambda folder: (folder / IMAGES).write_bytes(b"no gzip"), r"cannot read|damaged"),
        (
            lambda folder: (folder / IMAGES).write_bytes((folder / IMAGES).read_bytes()[:50]),
            r"is damaged",
        ),
        (damage(lambda content: content[:-1], IMAGES), r"not a file of bytes in IDX format"),
        (damage(lambda content: b"", IMAGES), r"not a file of bytes in IDX format"),
        (damage(lambda content: b"\0\0\x0d" + content[3:], IMAGES), r"not a file of bytes"),
        (damage(lambda content: idx(np.zeros((200, 14, 14))), IMAGES), r"of shape"),
        (damage(lambda content: idx(np.zeros(7)), LABELS), r"of shape"),
        (damage(lambda content: idx(np.full(200, 10)), LABELS), r"labels above 9"),
    ],
)
def test_what_is_not_published_is_refused(
    tmp_path: Path, spoil: Callable[[Path], None], message: str
) -> None:
    write_fashion_mnist(tmp_path)
    spoil(tmp_path)
    with pytest.raises(ValueError, match=message) as refused:
        build_task("fashion_mnist", clients=2, data_dir=tmp_path)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("options", [{"model": "vti"}, {"judged": 0}])
def test_wrong_options_are_named(tmp_path: Path, options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="|".join(options)):
        build_task("fashion_mnist", clients=2, data_dir=tmp_path, **options)

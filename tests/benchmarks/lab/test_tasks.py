"""The tasks: data read as published and divided without loss, models that learn from it."""

import math
import sys
from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from benchmarks.lab.tasks import TASKS, Shard, Task, build_task
from benchmarks.lab.tasks.task import shuffled_epochs
from tests.benchmarks.lab.small import SMALL


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


CLASSIFYING = ["digits", "fashion_mnist"]


def by_task(names: list[str]) -> pytest.MarkDecorator:
    """Return the parametrization over tasks; the large text is for the slow run."""
    marks = {"verses": [pytest.mark.slow]}
    return pytest.mark.parametrize("name", [pytest.param(n, marks=marks.get(n, [])) for n in names])


def train(task: Task, steps: int, seed: int = 0) -> nn.Module:
    """Take steps of Adam on the first client's data."""
    torch.manual_seed(seed)
    model = task.make_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for batch in islice(task.clients[0].batches(32, seeded(seed)), steps):
        optimizer.zero_grad()
        task.loss(model, batch).backward()
        optimizer.step()
    return model


def test_every_task_is_tested() -> None:
    assert list(SMALL) == list(TASKS)


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_it_learns(name: str, small: Callable[..., Task]) -> None:
    task = small(name, clients=1)
    _, _, steps, error = SMALL[name]
    before = task.evaluate(train(task, 0))
    after = task.evaluate(train(task, steps))
    assert before["error"] > 1.5 * error
    assert after["error"] < error
    assert after["loss"] < before["loss"]


@pytest.mark.slow
def test_the_digits_resnet_learns(small: Callable[..., Task]) -> None:
    task = small("digits", clients=1, model="resnet")
    assert task.evaluate(train(task, 40))["error"] < 0.15


@by_task(list(SMALL))
def test_seeds_decide_about_weights_and_batches(name: str, small: Callable[..., Task]) -> None:
    task = small(name)

    def first_loss(weights: int, batches: int) -> Tensor:
        torch.manual_seed(weights)
        model = task.make_model()
        return task.loss(model, next(task.clients[1].batches(8, seeded(batches))))

    assert torch.equal(first_loss(0, 0), first_loss(0, 0))
    assert not torch.equal(first_loss(0, 0), first_loss(1, 0))
    assert not torch.equal(first_loss(0, 0), first_loss(0, 1))


@by_task(list(SMALL))
def test_clients_share_the_training_data_without_loss(
    name: str, small: Callable[..., Task]
) -> None:
    alone, shared = small(name, clients=1), small(name, clients=3, seed=5)
    indices = torch.cat([client.indices for client in shared.clients])
    everything = alone.clients[0].indices
    assert torch.equal(indices.sort().values, everything.sort().values)
    assert torch.equal(shared.held_out.indices, alone.held_out.indices)
    assert torch.equal(shared.held_out.inputs, alone.held_out.inputs)


@by_task(CLASSIFYING)
def test_clients_have_few_classes_if_asked(name: str, small: Callable[..., Task]) -> None:
    count = 2
    task = small(name, clients=5, partition="classes", classes_per_client=count)
    for client in task.clients:
        seen = next(client.batches(len(client), seeded()))[1]
        assert len(seen.unique()) == count


@given(share=st.floats(0.01, 0.9), clients=st.integers(1, 40), seed=st.integers(0, 3))
def test_validation_data_are_nobody_elses(share: float, clients: int, seed: int) -> None:
    task = build_task("digits", clients=clients, seed=seed, model="mlp")
    counts = [round(share * len(client)) for client in task.clients]
    if not any(counts):
        with pytest.raises(ValueError, match="is none to tune settings on"):
            task.with_validation(share, seed)
        return
    divided = task.with_validation(share, seed)
    assert divided.validation
    assert divided.training
    kept = torch.cat([client.indices for client in divided.clients])
    together = torch.cat([kept, divided.validation.indices])
    everything = torch.cat([client.indices for client in task.clients])
    assert torch.equal(together.sort().values, everything.sort().values)
    for before, after, count in zip(task.clients, divided.clients, counts, strict=True):
        assert len(set(after.indices.tolist())) == len(before) - count
        assert set(after.indices.tolist()) <= set(before.indices.tolist())
    assert set(divided.training.indices.tolist()) <= set(kept.tolist())
    assert len(divided.training) == min(len(kept), len(divided.validation))
    assert torch.equal(divided.held_out.indices, task.held_out.indices)
    again = task.with_validation(share, seed).validation
    assert again
    assert torch.equal(again.indices, divided.validation.indices)


def test_a_client_keeps_a_sample_and_nobody_has_none() -> None:
    task = build_task("digits", clients=700, model="mlp")
    assert all(len(client) == 1 for client in task.with_validation(0.9, 0).clients[:600])
    with pytest.raises(ValueError, match="of 700 clients, 1437 in all, is none to tune"):
        task.with_validation(0.1, 0)


# Batches and judgement.


@given(
    count=st.integers(1, 30),
    batch_size=st.integers(1, 70),
    epochs=st.integers(1, 4),
    seed=st.integers(0, 2**32),
)
def test_every_epoch_is_a_permutation(count: int, batch_size: int, epochs: int, seed: int) -> None:
    needed = math.ceil(epochs * count / batch_size)
    batches = list(islice(shuffled_epochs(count, batch_size, seeded(seed)), needed))
    assert all(len(batch) == batch_size for batch in batches)
    for epoch in torch.cat(batches).split(count)[:epochs]:
        assert sorted(epoch.tolist()) == list(range(count))


def test_epochs_differ() -> None:
    first, second = islice(shuffled_epochs(100, 100, seeded()), 2)
    assert not torch.equal(first, second)
    assert not torch.equal(first, torch.arange(100))


def test_batches_are_refused_before_the_first_is_drawn() -> None:
    shard = Shard(torch.ones(3, 1), torch.ones(3), torch.arange(3))
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        shard.batches(0, seeded())
    with pytest.raises(ValueError, match="without samples"):
        Shard(torch.ones(3, 1), torch.ones(3), torch.arange(0)).batches(1, seeded())


@pytest.mark.parametrize(
    ("name", "smoothing"), [("digits", 0.0), ("digits", 0.1), ("gpt_text", 0.0)]
)
def test_losses_and_errors_are_those_of_numpy(
    name: str, smoothing: float, small: Callable[..., Task]
) -> None:
    task = small(name, **({"label_smoothing": smoothing} if smoothing else {}))
    model = train(task, 5)

    def predictions(inputs: Tensor) -> np.ndarray:
        """Log-probabilities, (predictions, classes)."""
        logits = model(inputs).detach().double().numpy()
        logits = logits.reshape(-1, logits.shape[-1])
        return logits - np.log(np.exp(logits).sum(1, keepdims=True))

    inputs, targets = next(task.clients[0].batches(8, seeded()))
    logs, labels = predictions(inputs), targets.numpy().ravel()
    right = logs[np.arange(len(labels)), labels]
    expected = -((1 - smoothing) * right + smoothing * logs.mean(1)).mean()
    loss = task.loss(model, (inputs, targets)).item()
    assert loss == pytest.approx(expected, rel=1e-5)

    held_out = task.held_out
    logs = predictions(held_out.inputs[held_out.indices])
    labels = held_out.targets[held_out.indices].numpy().ravel()
    figures = task.evaluate(model)
    right = logs[np.arange(len(labels)), labels]
    assert figures["loss"] == pytest.approx(-right.mean(), rel=1e-5)
    assert figures["error"] == pytest.approx((logs.argmax(1) != labels).mean(), abs=1e-12)


def test_a_reconstruction_is_judged_by_its_pixels(small: Callable[..., Task]) -> None:
    task = small("autoencoder")
    model = train(task, 5)
    images = task.held_out.inputs[task.held_out.indices].numpy().reshape(-1, 784) / 255.0
    with torch.no_grad():
        outputs = model(torch.tensor(images, dtype=torch.float32)).numpy()
    squared = ((outputs - images) ** 2).mean()
    figures = task.evaluate(model)
    assert figures["loss"] == pytest.approx(squared, rel=1e-4)
    training = task.clients[0].inputs.numpy().reshape(-1, 784) / 255.0
    assert figures["error"] == pytest.approx(squared / training.var(0).mean(), rel=1e-4)
    batch = next(task.clients[0].batches(8, seeded()))
    inputs = batch[0].numpy().reshape(8, 784)
    outputs = model(batch[0]).detach().numpy()
    assert task.loss(model, batch).item() == pytest.approx(
        784 * ((outputs - inputs) ** 2).mean(), rel=1e-4
    )


@pytest.mark.parametrize("training", [True, False])
def test_judging_is_without_dropout_and_leaves_the_mode(
    training: bool, small: Callable[..., Task]
) -> None:
    task = small("digits")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10)).train(training)
    assert task.evaluate(model) == task.evaluate(model)
    assert model.training is training
    assert model[1].training is training


def test_batches_follow_the_model_to_its_device(small: Callable[..., Task]) -> None:
    task = small("digits")
    model = task.make_model().to("meta")
    loss = task.loss(model, next(task.clients[0].batches(4, seeded())))
    assert loss.device.type == "meta"


# Digits.


def test_digits_are_split_by_class_and_all_there(small: Callable[..., Task]) -> None:
    from sklearn.datasets import load_digits  # type: ignore[import-untyped]

    task = small("digits", clients=1)
    client, held_out = task.clients[0], task.held_out
    assert (len(client), len(held_out)) == (1437, 360)
    assert client.inputs.mean().item() == pytest.approx(0, abs=1e-5)
    assert client.inputs.std().item() == pytest.approx(1, abs=1e-5)
    for part in (client, held_out):
        shares = part.targets.bincount() / len(part)
        torch.testing.assert_close(shares, torch.full((10,), 0.1), atol=0.005, rtol=0)

    pixels, labels = load_digits(return_X_y=True)
    images = torch.cat([client.inputs, held_out.inputs]).flatten(1)
    levels = ((images - images.min()) / (images.max() - images.min()) * 16).round()
    found = torch.cat([levels, torch.cat([client.targets, held_out.targets])[:, None]], dim=1)
    original = np.column_stack([pixels, labels])
    assert sorted(found.int().tolist()) == sorted(original.astype(int).tolist())


def test_digits_without_scikit_learn_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ValueError, match=r"pip install 'comm-hooks\[benchmarks\]'"):
        build_task("digits", clients=2)


def test_models_have_the_sizes_that_are_documented(small: Callable[..., Task]) -> None:
    def parameters(model: nn.Module) -> int:
        return sum(parameter.numel() for parameter in model.parameters())

    with torch.device("meta"):
        assert parameters(small("digits", model="mlp").make_model()) == 15_010
        assert parameters(small("digits", model="resnet").make_model()) == 112_106


# What is refused.


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("digit", {}, "unknown task 'digit': did you mean 'digits'"),
        ("digits", {"modle": "mlp"}, "unknown option of digits 'modle': did you mean 'model'"),
        ("digits", {"model": "mpl"}, "unknown model of digits 'mpl': did you mean 'mlp'"),
        ("digits", {"data_dir": "."}, "digits: reads no files of yours"),
        ("digits", {"partition": "idd"}, "unknown partition 'idd': did you mean 'iid'"),
        ("digits", {"label_smoothing": 1.0}, r"label_smoothing must lie in \[0, 1\)"),
        ("autoencoder", {"widths": "8,x"}, "autoencoder: widths must be positive numbers"),
        ("autoencoder", {"widths": "8,0"}, "autoencoder: widths must be positive numbers"),
        ("fashion_mnist", {"judged": 0}, "judged must be at least 1"),
        ("digits", {"clients": 1438}, "1437 training samples cannot be divided over 1438 clients"),
        ("gpt_text", {"partition": "iid"}, "unknown option of gpt_text"),
        ("gpt_text", {"heads": 3}, "gpt_text: width 32 is not a multiple of the 3 heads"),
        ("gpt_text", {"eval_windows": 0}, "gpt_text: eval_windows must be at least 1, got 0"),
        ("gpt_text", {"context": 400}, "too few for a context of 400: give 16001 or more"),
        ("gpt_text", {"data_dir": "/absent"}, "gpt_text: --data-dir /absent: no such file"),
    ],
)
def test_what_makes_no_sense_is_refused(
    name: str, options: dict[str, Any], message: str, small: Callable[..., Task]
) -> None:
    build = small if name in SMALL else build_task
    with pytest.raises(ValueError, match=message):
        build(name, **{"clients": 2, **options})

"""A sample has the same gradient in its batch as read from the data set and collated alone."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    RandomSampler,
    Subset,
    TensorDataset,
    default_collate,
)

from comm_hooks.optim.private import DPSGD, PrivacyEngine, PrivacyError
from comm_hooks.optim.private.data.poisson import PoissonLoader, private_loader

WRONG = "alone, and of .* in its batch"
CHANGED = "the batch is not as the loader gave it"
SAMPLES, CLASSES, WIDTH = 48, 4, 8


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(SAMPLES, 2, WIDTH // 2, generator=generator)
    return TensorDataset(inputs, torch.randint(CLASSES, (SAMPLES,), generator=generator))


def model() -> nn.Module:
    torch.manual_seed(2)
    return nn.Sequential(nn.Flatten(), nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, CLASSES))


def losses(model: nn.Module, batch: Any) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


class Words(Dataset[Any]):
    """Sentences of different lengths."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        words = torch.arange(1, 2 + index % 7) * (index + 3) % 29 + 1
        return words, torch.tensor(index % CLASSES)


class WordModel(nn.Module):
    def __init__(self, *, masks: bool) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embedding = nn.Embedding(30, 8)
        self.head = nn.Linear(8, CLASSES)
        self.masks = masks

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        values = self.embedding(words)
        if self.masks:
            mask = (words != 0).unsqueeze(-1).float()
            mean = (values * mask).sum(dim=1) / mask.sum(dim=1)
        else:
            mean = values.mean(dim=1)
        return self.head(mean)


def padded(samples: list[Any]) -> Any:
    words = nn.utils.rnn.pad_sequence([words for words, _ in samples], batch_first=True)
    return words, torch.stack([label for _, label in samples])


class Normalizing(TensorDataset):
    """Normalizes the samples that it is asked for together."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        inputs, labels = self.tensors[0][indices], self.tensors[1][indices]
        return [*zip(inputs - inputs.mean(dim=0), labels, strict=True)]


class Augmenting(TensorDataset):
    def __getitem__(self, index: Any) -> Any:
        inputs, label = super().__getitem__(index)
        return inputs + 0.1 * torch.randn_like(inputs), label


def centred(batch: Any) -> Any:
    return batch[0] - batch[0].mean(dim=0), batch[1]


def centred_in_place(batch: Any) -> Any:
    batch[0].sub_(batch[0].mean(dim=0))
    return batch


def step(
    dataset: Any,
    module: nn.Module,
    mode: str,
    change: Callable[[Any], Any] = lambda batch: batch,
    loss: Callable[..., torch.Tensor] = losses,
    steps: int = 3,
    micro_batch_size: int | None = None,
    **options: Any,
) -> None:
    _, optimizer, loader = PrivacyEngine().make_private(
        module=module,
        optimizer=DPSGD(module.named_parameters(), lr=0.1),
        data_loader=DataLoader(dataset, **options),
        loss_function=loss,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        sample_rate=0.25,
        expected_batch_size=12,
        grad_sample_mode=mode,
        micro_batch_size=micro_batch_size,
    )
    for batch in itertools.islice(loader, steps):
        optimizer.backward(change(batch))
        optimizer.step()


MODES = pytest.mark.parametrize("mode", ["functorch", "hooks"])
pytestmark = [
    pytest.mark.filterwarnings("ignore:world size is 1"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
]


@MODES
@pytest.mark.parametrize("micro_batch_size", [None, 5])
def test_padding_without_a_mask_is_refused(mode: str, micro_batch_size: int | None) -> None:
    with pytest.raises(PrivacyError, match=f"{WRONG}.*padded to"):
        step(
            Words(),
            WordModel(masks=False),
            mode,
            collate_fn=padded,
            micro_batch_size=micro_batch_size,
        )


def test_rows_that_were_padded_and_reshaped_are_refused() -> None:
    with pytest.raises(PrivacyError, match=r"padded to each other.*reshape them in collate_fn"):
        step(
            Words(),
            nn.Sequential(nn.Flatten(), WordModel(masks=False)),
            "functorch",
            lambda batch: (batch[0].unsqueeze(1), batch[1]),
            collate_fn=padded,
        )


@MODES
def test_samples_that_are_normalized_together_are_refused(mode: str) -> None:
    with pytest.raises(PrivacyError, match=WRONG):
        step(Normalizing(*data().tensors), model(), mode)


def mixed(samples: list[Any]) -> Any:
    inputs, labels = default_collate(samples)
    return 0.5 * inputs + 0.5 * inputs.roll(1, 0), labels


def mixed_up(samples: list[Any]) -> Any:
    inputs, labels = default_collate(samples)
    share = 0.5 * torch.rand(len(samples), 1, 1)
    return (1 - share) * inputs + share * inputs[torch.randperm(len(samples))], labels


@MODES
@pytest.mark.parametrize(
    "collate", [mixed, mixed_up, lambda samples: centred(default_collate(samples))]
)
def test_samples_that_a_batch_mixes_are_refused(mode: str, collate: Callable[..., Any]) -> None:
    with pytest.raises(PrivacyError, match=WRONG):
        step(data(), model(), mode, collate_fn=collate)


@MODES
@pytest.mark.parametrize(("change", "message"), [(centred, CHANGED), (centred_in_place, WRONG)])
def test_a_batch_that_is_normalized_before_it_is_used_is_refused(
    mode: str, change: Callable[[Any], Any], message: str
) -> None:
    with pytest.raises(PrivacyError, match=message):
        step(data(), model(), mode, change)


CORRECT: dict[str, Callable[[], dict[str, Any]]] = {
    "padding with a mask": lambda: {
        "dataset": Words(),
        "module": WordModel(masks=True),
        "collate_fn": padded,
    },
    "random samples": lambda: {"dataset": Augmenting(*data().tensors)},
    "workers": lambda: {"dataset": data(), "num_workers": 2},
    "a mask, passed as a copy": lambda: {
        "dataset": Words(),
        "module": WordModel(masks=True),
        "collate_fn": lambda samples: (*padded(samples), padded(samples)[0] != 0),
        "change": lambda batch: [leaf.clone() for leaf in batch],
    },
    "a sample that is not finite, in a copy": lambda: {
        "dataset": TensorDataset(
            torch.cat([data().tensors[0][:-1], torch.full((1, 2, WIDTH // 2), torch.nan)]),
            data().tensors[1],
        ),
        "change": lambda batch: (batch[0].clone(), batch[1]),
    },
    "tensors of equal values": lambda: {
        "dataset": TensorDataset(torch.zeros(SAMPLES), *data().tensors[:1], torch.zeros(SAMPLES)),
        "change": lambda batch: (batch[1], batch[2].long()),
    },
    "another shape": lambda: {"change": lambda batch: (batch[0].flatten(1), batch[1])},
    "another dtype and structure": lambda: {
        "change": lambda batch: {"of": batch[1], "x": batch[0].clone()},
        "loss": lambda model, batch: losses(model, (batch["x"], batch["of"])),
    },
    "micro-batches": lambda: {"micro_batch_size": 5},
}


@MODES
@pytest.mark.parametrize("name", CORRECT)
def test_what_depends_on_no_other_sample_trains(name: str, mode: str) -> None:
    step(**{"dataset": data(), "module": model(), "mode": mode, **CORRECT[name]()})


@pytest.mark.parametrize("normalizes", [False, True])
def test_batches_that_were_drawn_long_before_are_not_kept(normalizes: bool) -> None:
    module = model()
    _, optimizer, loader = PrivacyEngine().make_private(
        module=module,
        optimizer=DPSGD(module.named_parameters(), lr=0.1),
        data_loader=DataLoader(data()),
        loss_function=losses,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        sample_rate=0.05,
        expected_batch_size=3,
    )
    drawn = [(batch[0].clone(), batch[1].clone()) for batch in loader]
    kept = [each for each in optimizer._tickets._drawn.values() if len(each.leaves)]
    assert len(kept) == 8 < len(drawn)
    used = next(batch for batch in drawn if len(batch[0]) > 1)
    for batch in drawn[: [batch is used for batch in drawn].index(True)]:
        optimizer.backward(batch)
        optimizer.step()
    if normalizes:
        with pytest.raises(PrivacyError, match=CHANGED):
            optimizer.backward(centred(used))
    else:
        optimizer.backward(used)


def test_the_samples_that_are_read_again_are_those_of_the_batch() -> None:
    numbers = TensorDataset(torch.arange(SAMPLES).float())
    _, optimizer, loader = PrivacyEngine().make_private(
        module=(module := nn.Linear(1, 1)),
        optimizer=DPSGD(module.named_parameters(), lr=0.1),
        data_loader=DataLoader(numbers, num_workers=2),
        loss_function=lambda model, batch: model(batch[0][:, None]).squeeze(1),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        sample_rate=0.25,
        expected_batch_size=12,
    )
    for batch in loader:
        tickets = optimizer._tickets
        tickets.admit(len(batch[0]), batch)
        read = tickets.reader(batch)
        assert read is not None
        assert [read(row)[0].item() for row in range(len(batch[0]))] == batch[0].tolist()
        tickets.discard()
    assert not optimizer._tickets._drawn


@pytest.mark.parametrize(
    "twice",
    [
        lambda d: Subset(d, [0, 5, 7, 5]),
        lambda d: Subset(d, torch.tensor([3, SAMPLES - 1, -1])),
        lambda d: ConcatDataset([d] * 4),
        lambda d: ConcatDataset([Subset(d, range(10)), Subset(d, range(9, 20))]),
        lambda d: Subset(ConcatDataset([d, d]), [3, 3 + SAMPLES]),
    ],
)
def test_a_row_that_is_in_a_data_set_twice_is_refused(twice: Callable[[Any], Any]) -> None:
    with pytest.raises(ValueError, match=r"has row \d+ of a TensorDataset [24] times"):
        PoissonLoader(twice(data()), 0.5, 1)


@pytest.mark.parametrize(
    "once",
    [
        lambda d: Subset(d, range(0, SAMPLES, 3)),
        lambda d: ConcatDataset([Subset(d, range(10)), data(), Subset(d, range(10, 20))]),
        lambda d: Subset(Subset(d, [4, 2, 9]), [2, 0]),
    ],
)
def test_other_parts_of_data_sets_are_drawn(once: Callable[[Any], Any]) -> None:
    assert len(PoissonLoader(once(data()), 0.5, 3)) == 3


@pytest.mark.parametrize("options", [{"num_samples": 10}, {"replacement": True}])
def test_a_sampler_that_does_not_take_each_sample_once_is_refused(options: dict[str, Any]) -> None:
    sampler = RandomSampler(data(), **options)
    with pytest.raises(ValueError, match="would override"):
        private_loader(DataLoader(data(), sampler=sampler), 0.5)

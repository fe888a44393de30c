"""A sample is on one rank only if ranks divide the same data set among them."""

import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, random_split

from comm_hooks import ConfigMismatchError
from comm_hooks.collectives import Simulated
from comm_hooks.collectives.torch_distributed import TorchDistributed
from comm_hooks.optim.private import DPSGD, PrivacyEngine
from comm_hooks.optim.private.data.same_data import SAMPLES, compare_datasets
from tests.optim.private.test_tickets import loss_function
from tests.optim.scenarios import RanksOf

LENGTH = 400


def everything(length: int = LENGTH) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(length, 6, generator=generator)
    return TensorDataset(inputs, torch.randint(3, (length,), generator=generator))


class Augmented(Dataset[Any]):
    """Inputs are different in each reading; labels are not."""

    def __init__(self, data: Any, labels: bool = True) -> None:
        self._data, self._labels = data, labels

    def __len__(self) -> int:
        return len(self._data)

    def __getitem__(self, index: int) -> Any:
        inputs, label = self._data[index]
        noisy = inputs + torch.randn(6) + random.random() + np.random.rand()
        return (noisy, label) if self._labels else (noisy, torch.randn(()))


class OfManyThings(Dataset[Any]):
    def __init__(self, change: int) -> None:
        self._change = change

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        last = self._change if index == 5 else 0
        return {
            "array": np.arange(3) + index,
            "text": f"{index}",
            "nested": [{"half": torch.ones(2, dtype=torch.bfloat16)}, None, 1.5],
            "number": np.float32(index),
            "flag": torch.tensor(last == 1),
            "bytes": b"x" if last == 2 else b"y",
            **({"more": 0} if last == 3 else {}),
        }


def split(seed: int) -> Subset[Any]:
    generator = torch.Generator().manual_seed(seed)
    return random_split(everything(), [LENGTH // 2, LENGTH // 2], generator)[0]


def of_rank(kind: str) -> Any:
    rank = dist.get_rank()
    return {
        "alike": lambda: everything(),
        "split alike": lambda: split(7),
        "augmented": lambda: Augmented(everything()),
        "many": lambda: OfManyThings(0),
        "split by seed + rank": lambda: split(7 + rank),
        "shuffled by rank": lambda: random_split(everything(), [LENGTH])[0],
        "lengths": lambda: everything(LENGTH + rank),
        "too few": lambda: everything(1 if rank == 1 else LENGTH),
        "augmented, split": lambda: Augmented(split(7 + rank)),
        "one flag": lambda: OfManyThings(rank == 1),
        "bytes": lambda: OfManyThings(2 * (rank == 1)),
        "structure": lambda: OfManyThings(3 * (rank == 1)),
    }[kind]()


def outcome(kind: str, whole: bool) -> str:
    torch.manual_seed(dist.get_rank())
    data = of_rank(kind)
    try:
        if whole:
            model = nn.Linear(6, 3)
            PrivacyEngine().make_private(
                module=model,
                optimizer=DPSGD(model.named_parameters(), lr=0.5),
                data_loader=DataLoader(data),
                loss_function=loss_function,
                noise_multiplier=1.0,
                max_grad_norm=0.1,
                sample_rate=0.5,
                expected_batch_size=20,
            )
        else:
            compare_datasets(data, TorchDistributed())
    except ConfigMismatchError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", ["alike", "split alike", "augmented", "many"])
def test_the_same_data_are_taken(kind: str, ranks_of: RanksOf) -> None:
    assert ranks_of(3).run(outcome, kind, kind != "many") == [""] * 3


@pytest.mark.parametrize(
    "kind", ["split by seed + rank", "shuffled by rank", "lengths", "too few", "augmented, split"]
)
def test_other_data_are_refused_on_all_ranks(kind: str, ranks_of: RanksOf) -> None:
    messages = ranks_of(3).run(outcome, kind, True)
    assert all("ranks have different data sets" in message for message in messages)
    if kind in ("lengths", "too few"):
        assert all("the number of samples is 400 on rank" in message for message in messages)
    else:
        assert all("with the same seed on all ranks" in message for message in messages)


@pytest.mark.parametrize("kind", ["one flag", "bytes", "structure"])
def test_samples_of_many_things_are_compared(kind: str, ranks_of: RanksOf) -> None:
    for message in ranks_of(3).run(outcome, kind, False):
        assert "the sample at place 5 is" in message
        assert "on ranks 0, 2" in message


def warned() -> tuple[list[str], bool]:
    data = Augmented(everything(), labels=False)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compare_datasets(data, TorchDistributed())
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    alike = torch.equal(states[0], after[0]) and states[1:] == after[1:]
    return [str(warning.message) for warning in caught], alike


def test_random_samples_cannot_be_compared(ranks_of: RanksOf) -> None:
    for messages, is_state_kept in ranks_of(2).run(warned):
        assert len(messages) == 1
        assert "cannot be compared, except for their lengths" in messages[0]
        assert is_state_kept


def digests_seen() -> list[Any]:
    seen: list[Any] = []
    transport = TorchDistributed()
    perform = transport.perform

    def listen(request: Any) -> Any:
        seen.append(request.payload)
        return perform(request)

    transport.perform = listen  # type: ignore[method-assign]
    for _ in range(2):
        compare_datasets(everything(), transport)
    return seen


def test_digests_are_keyed_and_of_a_public_number_of_samples(ranks_of: RanksOf) -> None:
    for _, first, _, second in ranks_of(2).run(digests_seen):
        assert len(first) == len(second) == SAMPLES
        values = [{value for found in each for value in found.values()} for each in (first, second)]
        assert not values[0] & values[1]


def test_one_rank_reads_nothing() -> None:
    class Unread(Dataset[Any]):
        pass

    compare_datasets(Unread(), Simulated(1)[0])

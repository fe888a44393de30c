"""A sample is on one rank only if ranks divide the same data set among them."""

import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, random_split

from comm_hooks import ConfigMismatchError, Exchange, Identity
from comm_hooks.collectives import Simulated, Transport, run_ranks
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
        return (noisy, label) if self._labels else (noisy, torch.randn(()), index, "a label")


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


def of_rank(rank: int, kind: str) -> Any:
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


def outcome(transport: Transport, kind: str) -> str:
    torch.manual_seed(transport.rank)
    try:
        compare_datasets(of_rank(transport.rank, kind), transport)
    except ConfigMismatchError as error:
        return str(error)
    return ""


def outcomes(kind: str) -> list[str]:
    return run_ranks(lambda transport: outcome(transport, kind), 3)


@pytest.mark.parametrize("kind", ["alike", "split alike", "augmented", "many"])
def test_the_same_data_are_taken(kind: str) -> None:
    assert outcomes(kind) == [""] * 3


@pytest.mark.parametrize(
    "kind", ["split by seed + rank", "shuffled by rank", "lengths", "too few", "augmented, split"]
)
def test_other_data_are_refused_on_all_ranks(kind: str) -> None:
    of_length = kind in ("lengths", "too few")
    problem = "number of samples is 400 on rank" if of_length else "same seed on all ranks"
    for message in outcomes(kind):
        assert "ranks have different data sets" in message
        assert problem in message


def test_the_engine_compares_data() -> None:
    def make_private(transport: Transport) -> None:
        model = nn.Linear(6, 3)
        PrivacyEngine().make_private(
            module=model,
            optimizer=DPSGD(model.named_parameters(), lr=0.5),
            data_loader=DataLoader(everything(LENGTH + transport.rank)),
            loss_function=loss_function,
            noise_multiplier=1.0,
            max_grad_norm=0.1,
            sample_rate=0.5,
            expected_batch_size=20,
            exchange=Exchange(Identity(), transport=transport),
        )

    with pytest.raises(ConfigMismatchError, match="ranks have different data sets"):
        run_ranks(make_private, 2)


@pytest.mark.parametrize("kind", ["one flag", "bytes", "structure"])
def test_samples_of_many_things_are_compared(kind: str) -> None:
    for message in outcomes(kind):
        assert "the sample at index 5 is" in message
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
    """On real ranks, which have random states and warning filters of their own."""
    for messages, is_state_kept in ranks_of(2).run(warned):
        assert len(messages) == 1
        assert "cannot be compared, except for their lengths" in messages[0]
        assert is_state_kept


def digests_seen(transport: Transport) -> list[Any]:
    seen: list[Any] = []
    perform = transport.perform

    def listen(request: Any) -> Any:
        seen.append(request.payload)
        return perform(request)

    transport.perform = listen  # type: ignore[method-assign]
    for _ in range(2):
        compare_datasets(everything(), transport)
    return seen


def test_digests_are_keyed_and_of_a_public_number_of_samples() -> None:
    for _, first, _, second in run_ranks(digests_seen, 2):
        assert len(first) == len(second) == SAMPLES
        values = [{value for found in each for value in found.values()} for each in (first, second)]
        assert not values[0] & values[1]


def test_one_rank_reads_nothing() -> None:
    class Unread(Dataset[Any]):
        pass

    compare_datasets(Unread(), Simulated(1)[0])

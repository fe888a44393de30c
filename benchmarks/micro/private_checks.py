"""The cost of comparing samples and of watching the model, as a share of private steps.

Two engines train the same model in turns, one of them without the checks; batches are drawn by the
loader, so that their sizes differ.  Times are of the processor, and are added up: one step of 64
has them.  The first steps, in which every kind of batch is looked at, are not counted.

Fails if the checks take more than 3 % of the time.
"""

import copy
import itertools
import time
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.micro.per_sample_gradients import MODELS, Batch
from benchmarks.micro.timing import print_head, times_in_turns
from comm_hooks.optim.private import DPSGD, PrivacyEngine
from comm_hooks.optim.private.gradients.alone import AloneCheck
from comm_hooks.optim.private.witness import Witness

MOST = 1.03
_SAMPLES, _RATE = 512, 0.125
_STEPS, _WARM_UP_STEPS = 384, 16


def _losses(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch[0]), batch[1], reduction="none")


class _Bag(nn.Module):
    """The mean of a sentence's words, without those that it was padded with, and two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(1000, 64)
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        mask = (words != 0).unsqueeze(-1).float()
        return self.layers((self.words(words) * mask).sum(dim=1) / mask.sum(dim=1))


def _padded(samples: list[Any]) -> Any:
    words = nn.utils.rnn.pad_sequence([words for words, _ in samples], batch_first=True)
    return words, torch.stack([label for _, label in samples])


_BAG = "mean of words, sentences of 1 to 128"


def _data(shape: tuple[int, ...] | None) -> DataLoader[Any]:
    labels = torch.randint(10, (_SAMPLES,))
    if shape is not None:
        return DataLoader(TensorDataset(torch.randn(_SAMPLES, *shape), labels))
    lengths = torch.randint(1, 129, (_SAMPLES,)).tolist()
    sentences = [torch.randint(1, 1000, (length,)) for length in lengths]
    samples: Any = [*zip(sentences, labels, strict=True)]
    return DataLoader(samples, collate_fn=_padded)


def _steps(model: nn.Module, shape: tuple[int, ...] | None, mode: str) -> Callable[[], None]:
    """Return a function that takes a private step."""
    torch.manual_seed(0)
    model = copy.deepcopy(model)
    _, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=DPSGD(model.named_parameters(), lr=0.01),
        data_loader=_data(shape),
        loss_function=_losses,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        sample_rate=_RATE,
        expected_batch_size=_RATE * _SAMPLES,
        grad_sample_mode=mode,
    )
    batches = itertools.chain.from_iterable(itertools.repeat(loader))

    def step() -> None:
        optimizer.backward(next(batches))
        optimizer.step()

    return step


def _without_checks(step: Callable[[], None]) -> Callable[[], None]:
    def unchecked(self: AloneCheck, batch: Any, size: int, read: Any) -> Any:
        return self._differentiate(batch, size)

    def nothing(self: Witness, **options: bool) -> None:
        pass

    def step_without() -> None:
        with (
            mock.patch.object(AloneCheck, "differentiate", unchecked),
            mock.patch.multiple(Witness, note=nothing, look=nothing, _gradients=lambda self: []),
        ):
            step()

    return step_without


def main() -> bool:
    """Print the table; return whether the checks take too much."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print_head("model", "mode", "step without the checks, ms", "with / without")
    is_too_much = False
    for name, (model, shape) in {**MODELS, _BAG: (_Bag(), None)}.items():
        for mode in ("functorch", "hooks"):
            actions = {
                "with": _steps(model, shape, mode),
                "without": _without_checks(_steps(model, shape, mode)),
            }
            times = times_in_turns(actions, _STEPS, time.process_time, _WARM_UP_STEPS)
            ratio = sum(times["with"]) / sum(times["without"])
            print(
                f"| {name} | {mode} | {sum(times['without']) / _STEPS:.2f} | {ratio:.3f} |",
                flush=True,
            )
            is_too_much |= ratio > MOST
    return is_too_much

"""The task of ``compare`` and ``bench``: a GPT on a text, a part for each rank, judged on all."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.lab.corpus import shard_bounds, window_starts
from benchmarks.lab.model import GPT
from benchmarks.lab.runs import Settings
from benchmarks.lab.tasks.task import Batch, Shard, Task

_EVAL_BATCH = 16


@dataclass(frozen=True)
class Windows:
    """Random windows of one rank's part of a text.

    Args:
        tokens: the whole text, dtype uint8.
        start, stop: the bounds of the part.
        window: bytes of a window: the context, and the byte after it.
    """

    tokens: Tensor
    start: int
    stop: int
    window: int

    def batches(self, batch_size: int, generator: torch.Generator) -> Iterator[Batch]:
        """Yield batches of random windows without end: inputs, and the byte after each of them."""
        end = self.stop - self.window + 1
        while True:
            starts = torch.randint(self.start, end, (batch_size,), generator=generator)
            yield _split(self.tokens, starts, self.window)


class WholeText(Task):
    """The task; a model maps inputs and targets to the loss."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the mean cross-entropy of a batch, in nats per byte."""
        return text_loss(model, batch)

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return loss and error on windows spread over *all* text, as the mean over replicas.

        Every rank reads all windows rather than a share of them: where replicas differ, a share
        each would score every replica on other text. Collective in a process group.
        """
        gpt: Any = getattr(model, "module", model)
        totals = torch.zeros(2, dtype=torch.float64)
        starts = self.held_out.indices
        for part in starts.split(_EVAL_BATCH):
            inputs, targets = _split(self.held_out.inputs, part, gpt.context + 1)
            logits = gpt.logits(inputs).flatten(0, 1)
            loss = F.cross_entropy(logits, targets.flatten())
            wrong = logits.argmax(1).ne(targets.flatten()).double().mean()
            totals += torch.stack([loss.double(), wrong]) * len(part)
        ranks = 1
        if dist.is_initialized():
            dist.all_reduce(totals)
            ranks = dist.get_world_size()
        loss, error = (total / len(starts) / ranks for total in totals.tolist())
        return {"loss": loss, "error": error}


def text_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the loss that a GPT computes of inputs and targets."""
    loss: Tensor = model(*batch)
    return loss


def whole_text(tokens: Tensor, settings: Settings) -> Task:
    """Return the task for a text (dtype uint8) and the settings of a comparison."""
    parts = shard_bounds(len(tokens), settings.nproc)
    starts = torch.tensor(window_starts(len(tokens), settings.window, settings.eval_windows))
    return WholeText(
        name="whole_text",
        make_model=lambda: GPT(settings.model),
        clients=[Windows(tokens, *part, settings.window) for part in parts],
        held_out=Shard(tokens, tokens, starts),
        seeds_apart=settings.nproc,
    )


def _split(tokens: Tensor, starts: Tensor, window: int) -> Batch:
    windows = tokens[starts[:, None] + torch.arange(window)].long()
    return windows[:, :-1], windows[:, 1:]

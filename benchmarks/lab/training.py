"""One rank of one method: connects a model, trains it, and judges it."""

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from benchmarks.lab.clock import Starvation, quartile_range
from benchmarks.lab.corpus import shard_bounds, window_starts
from benchmarks.lab.events import Event
from benchmarks.lab.methods import Method, parse_method
from benchmarks.lab.model import GPT
from benchmarks.lab.optimizers import Trainer
from benchmarks.lab.runs import Figures, Point, Settings
from benchmarks.lab.schedules import SCHEDULES, warmed_up

_EVAL_BATCH = 16


def connect(method: Method, settings: Settings, **ddp_arguments: Any) -> Trainer:
    """Return a model like every method's, ready to be trained with this one. Collective.

    Args:
        ddp_arguments: for ``DistributedDataParallel``, in place of the method's own.
    """
    torch.manual_seed(settings.seed)  # the same weights on every rank
    return method.connect(GPT(settings.model), settings, **ddp_arguments)


def train(trainer: Trainer, settings: Settings, tokens: Tensor) -> Iterator[Event]:
    """Train on this rank's shard of ``tokens``, yielding events on the way. Collective.

    The events are ``step`` after each step, ``point`` after each evaluation (the fields of
    :class:`Point`) and ``figures`` at the end (those of :class:`Figures`).
    """
    model = trainer.ddp.module
    durations: list[float] = []
    starvations: list[float] = []
    totals: list[tuple[int, int]] = [(0, 0)]  # bytes sent and received after each step

    for step, loss, seconds, starved in _steps(trainer, settings, tokens):
        durations.append(seconds)
        starvations.append(starved)
        totals.append(trainer.traffic(step))
        sent, received = totals[-1]
        yield {"event": "step", "step": step, "loss": loss, "bytes_sent": sent}
        if step % settings.eval_every == 0 or step == settings.steps:
            if step == settings.steps:
                trainer.finish()
                totals[-1] = sent, received = trainer.traffic(step)
            with trainer.shared_model():
                loss = evaluate(model, tokens, settings.window, settings.eval_windows)
            point = Point(step, loss, sent, received, sum(durations))
            yield {"event": "point", **asdict(point)}

    # Per step means once warm: before, some methods do not compress yet, and processes are slow.
    # A run that is all warm-up has nothing else to show.
    start = settings.warmup if settings.warmup < settings.steps else 0
    sent, received = totals[-1]
    figures = Figures(
        loss=point.loss,
        drift=replica_drift(model),
        step_ms=1e3 * statistics.median(durations[start:]),
        sent_per_step=(sent - totals[start][0]) / (settings.steps - start),
        received_per_step=(received - totals[start][1]) / (settings.steps - start),
        bytes_sent=sent,
        bytes_received=received,
        step_range_ms=1e3 * quartile_range(durations[start:]),
        starved=_largest(sum(starvations[start:]) / sum(durations[start:])),
    )
    yield {"event": "figures", **asdict(figures)}


def _steps(
    trainer: Trainer, settings: Settings, tokens: Tensor
) -> Iterator[tuple[int, float, float, float]]:
    """Yield (step, this rank's loss, seconds, those it was starved) after each step, from 1."""
    batches = draw_batches(tokens, settings, dist.get_rank())
    factor = warmed_up(SCHEDULES[settings.schedule], settings.warmup, settings.steps)
    scheduler = LambdaLR(trainer.scheduled, factor)
    for step in range(1, settings.steps + 1):
        started, starvation = time.perf_counter(), Starvation()
        value = float(trainer.optimizer.step(closure_of(trainer, next(batches))))
        scheduler.step()
        if not math.isfinite(value):
            raise FloatingPointError(f"diverged: the loss is {value} at step {step}")
        seconds = time.perf_counter() - started
        yield step, value, seconds, seconds * starvation.share()


def closure_of(trainer: Trainer, windows: Tensor) -> Callable[[], Tensor]:
    """Return what computes the gradients of one batch; some optimizers call it more than once."""

    def closure() -> Tensor:
        trainer.optimizer.zero_grad()
        loss: Tensor = trainer.ddp(windows[:, :-1], windows[:, 1:])
        loss.backward()
        return loss.detach()

    return closure


def draw_batches(tokens: Tensor, settings: Settings, rank: int) -> Iterator[Tensor]:
    """Yield batches of random windows from a rank's shard, without end."""
    start, stop = shard_bounds(len(tokens), settings.nproc)[rank]
    generator = torch.Generator().manual_seed(settings.seed * settings.nproc + rank)
    while True:
        end = stop - settings.window + 1
        starts = torch.randint(start, end, (settings.batch,), generator=generator)
        yield _windows(tokens, starts, settings.window)


def _windows(tokens: Tensor, starts: Tensor, window: int) -> Tensor:
    return tokens[starts[:, None] + torch.arange(window)].long()


@torch.no_grad()
def evaluate(model: nn.Module, tokens: Tensor, window: int, count: int) -> float:
    """Return the loss on ``count`` windows spread over *all* text, as the mean over replicas.

    Every rank reads all windows rather than a share of them: where replicas differ, a share each
    would score every replica on other text. Collective.
    """
    starts = torch.tensor(window_starts(len(tokens), window, count))
    total = torch.zeros((), dtype=torch.float64)
    for part in starts.split(_EVAL_BATCH):
        windows = _windows(tokens, part, window)
        total += model(windows[:, :-1], windows[:, 1:]).double() * len(part)
    dist.all_reduce(total)
    loss = total.item() / count / dist.get_world_size()
    if not math.isfinite(loss):
        raise FloatingPointError(f"diverged: the loss on all data is {loss}")
    return loss


@torch.no_grad()
def replica_drift(model: nn.Module) -> float:
    """Return the largest relative distance of any rank's parameters to those of rank 0.

    Collective.
    """
    own = torch.cat([parameter.flatten() for parameter in model.parameters()])
    first = own.clone()
    dist.broadcast(first, src=0)
    return _largest(float((own - first).norm() / first.norm()))


def _largest(value: float) -> float:
    """Return the largest of all ranks' values.  Collective."""
    largest = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return largest.item()


def read_tokens(corpus: Path) -> Tensor:
    """Return the bytes of a file, dtype uint8."""
    return torch.frombuffer(bytearray(corpus.read_bytes()), dtype=torch.uint8)


def worker_parser(description: str | None) -> argparse.ArgumentParser:
    """Return the parser of a worker's command line, which only its launcher writes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--method", required=True, type=parse_method)
    parser.add_argument("--settings", required=True, type=Settings.from_json)
    parser.add_argument("--corpus", required=True, type=Path)
    parser.add_argument("--events", required=True, type=Path)
    return parser

"""Whether a long run takes more and more: memory, file descriptors, threads, objects.

    python -m benchmarks.soak                          # about 20 minutes on 2 busy cores
    python -m benchmarks.soak --steps 50000 --methods topk

Trains a small GPT on 2 ranks joined by gloo, in buckets of 25 kB, and counts after a fifth of the
steps, when everything that is made once has been, and at the end.  With 5,000 steps and 2 % of the
memory of a process that has imported torch, anything that keeps 2 kB per step is found; the number
of Python's objects tells of less.

Fails if the memory of a rank differs by more than 2 %, or if it has more descriptors or threads
than before, or 40 objects more.
"""

import gc
import math
import os
import resource
import warnings
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer

from benchmarks.lab.methods import parse_method
from benchmarks.lab.model import VOCABULARY, GPTConfig
from benchmarks.lab.processes import spawn_ranks
from benchmarks.lab.runs import Settings
from benchmarks.lab.tasks.whole_text import text_loss
from benchmarks.lab.training import closure_of
from benchmarks.lab.worker import connect

METHODS = (
    "topk",
    "count_sketch",
    "sign:collective=sharded",
    "local_variance_adam",
    "local_adamw:fragments=8",
)
MOST_GROWTH = 0.02
MOST_OBJECTS = 40  # of Python's; a leak would be one per step at least
_RANKS = 2
_SETTINGS = Settings(
    nproc=_RANKS, batch=2, model=GPTConfig(layers=2, width=32, heads=2, context=16)
)
_BUCKET_MB = 0.025


@dataclass(frozen=True)
class Count:
    """What a process has at one moment."""

    rss: int
    descriptors: int
    threads: int
    objects: int

    @classmethod
    def now(cls) -> "Count":
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(
            pages * resource.getpagesize(),
            len(os.listdir("/proc/self/fd")),
            len(os.listdir("/proc/self/task")),
            len(gc.get_objects()),
        )

    def grew(self, before: "Count") -> bool:
        """Return whether there is more than there was; of memory, which varies, also less."""
        return (
            abs(self.rss - before.rss) > MOST_GROWTH * before.rss
            or self.descriptors > before.descriptors
            or self.threads > before.threads
            or self.objects > before.objects + MOST_OBJECTS
        )


def train(method: str, steps: int) -> list[tuple[int, ...]]:
    """Train on this rank; return the counts after a fifth of the steps, and after all."""
    warnings.simplefilter("ignore")
    client = connect(parse_method(method), _SETTINGS, bucket_cap_mb=_BUCKET_MB)
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = (_SETTINGS.batch, _SETTINGS.window)
    Count.now()  # whose list of all objects takes some megabytes, too
    for step in range(1, steps + 1):
        windows = torch.randint(VOCABULARY, shape, generator=generator)
        batch = windows[:, :-1], windows[:, 1:]
        loss = float(client.steps.step(closure_of(text_loss, client.model, batch)))
        if not math.isfinite(loss):
            raise FloatingPointError(f"{method}: the loss is {loss} at step {step}")
        if step == steps // 5:
            early = Count.now()
    return [astuple(early), astuple(Count.now())]


def main(
    steps: Annotated[int, typer.Option(help="Of each method.")] = 5000,
    methods: Annotated[list[str] | None, typer.Option(help="As compare takes them.")] = None,
) -> None:
    """Print a table of what each rank has, early and late."""
    print("| method | rank | memory, MB | change, % | descriptors | threads | objects |")
    print("|---|---|---|---|---|---|---|", flush=True)
    is_leaking = False
    for method in methods or METHODS:
        for rank, counts in enumerate(spawn_ranks(_RANKS, train, method, steps)):
            early, late = (Count(*count) for count in counts)
            print(f"| {method} | {rank} | {_row(early, late)} |", flush=True)
            is_leaking |= late.grew(early)
    if is_leaking:
        typer.echo("soak: something grows", err=True)
        raise typer.Exit(1)


def _row(early: Count, late: Count) -> str:
    change = 100 * (late.rss / early.rss - 1)
    pairs = [
        f"{getattr(early, name)} -> {getattr(late, name)}"
        for name in ("descriptors", "threads", "objects")
    ]
    memory = f"{early.rss / 1e6:.1f} -> {late.rss / 1e6:.1f}"
    return " | ".join([memory, f"{change:+.2f}", *pairs])


if __name__ == "__main__":
    typer.run(main)

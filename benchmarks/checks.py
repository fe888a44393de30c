"""What it costs that ranks check each other, as a share of a training step.

    python -m benchmarks.checks                        # about 10 minutes on 2 busy cores
    python -m benchmarks.checks --steps 32 --methods topk

Trains the demo's GPT on 2 ranks and reads a clock before and after each function that checks
something: headers, the checksums in them, stamps with the hyperparameters they are of, the
fingerprint of what must be the same everywhere (every 32 steps), and what a hook looks at before a
round.  What one of them calls is counted as that one's.  Times are of the processor, not of the
clock on the wall, so that a machine that is busy with other things makes neither share larger nor
smaller.  The first steps are not counted, nor what is compared once, at the start.

Fails if the checks take more than 2 % of a step together, or the fingerprint more than 0.5 %, where
the model is one bucket, as in the demo.  Headers cost the same however small a payload is, so that
many small buckets cost more; they are shown for comparison.
"""

import contextlib
import functools
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Annotated, Any
from unittest import mock

import torch
import torch.distributed as dist
import typer

from benchmarks.lab.methods import parse_method
from benchmarks.lab.model import VOCABULARY, GPTConfig
from benchmarks.lab.processes import spawn_ranks
from benchmarks.lab.runs import Settings
from benchmarks.lab.training import closure_of, connect
from comm_hooks import Exchange
from comm_hooks.exchange import agreement
from comm_hooks.frameworks.ddp.model import AccumulationWatch
from comm_hooks.wire import gathered_header, summed_header
from comm_hooks.wire.gathered_header import GatheredHeader
from comm_hooks.wire.summed_header import SummedHeader

METHODS = (
    "topk",
    "topk in buckets of 1 MB",
    "count_sketch",
    "local_adamw:fragments=8",
    "local_variance_adam",
)
CHECKS = ("headers", "checksums", "stamps", "fingerprint", "hook")
MOST, MOST_OF_FINGERPRINT = 0.02, 0.005
_RANKS = 2
_WARM_UP_STEPS = 16  # until all fragments were exchanged once, and DDP has its buckets
_IN_BUCKETS = " in buckets of 1 MB"
# (owner, attribute, which check): an outer one does not count what an inner one takes.
_TIMED: tuple[tuple[Any, str, str], ...] = (
    (GatheredHeader, "write_", "headers"),
    (GatheredHeader, "check", "headers"),
    (SummedHeader, "write_", "headers"),
    (SummedHeader, "check", "headers"),
    (gathered_header, "checksums", "checksums"),
    (summed_header, "checksums", "checksums"),
    (Exchange, "_stamp", "stamps"),
    (agreement, "fingerprint", "fingerprint"),
    (AccumulationWatch, "look", "hook"),
)


class Clock:
    """Adds up the processor seconds of functions, each without those that it calls."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self._of_thread = threading.local()

    def around(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Return the function with a clock before and after it."""

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            inner = self._of_thread.__dict__.setdefault("inner", [0.0])
            inner.append(0.0)
            started = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                took = time.thread_time() - started
                self.seconds[name] += took - inner.pop()
                inner[-1] += took

        return timed


@contextlib.contextmanager
def timed_checks() -> Iterator[Clock]:
    """Put a clock around all checks for a while."""
    clock = Clock()
    with contextlib.ExitStack() as stack:
        for owner, attribute, name in _TIMED:
            function = clock.around(getattr(owner, attribute), name)
            stack.enter_context(mock.patch.object(owner, attribute, function))
        yield clock


def measure(method: str, settings: Settings, steps: int) -> dict[str, float]:
    """Return the processor seconds of a step, and of each check in one.  Collective."""
    warnings.simplefilter("ignore")
    in_buckets = {"bucket_cap_mb": 1} if method.endswith(_IN_BUCKETS) else {}
    trainer = connect(parse_method(method.removesuffix(_IN_BUCKETS)), settings, **in_buckets)
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = (settings.batch, settings.window)
    with timed_checks() as clock:
        for step in range(_WARM_UP_STEPS + steps):
            if step == _WARM_UP_STEPS:
                clock.seconds.clear()
                started = time.process_time()
            batch = torch.randint(VOCABULARY, shape, generator=generator)
            trainer.optimizer.step(closure_of(trainer, batch))
        total = time.process_time() - started
    return {"step": total / steps, **{name: clock.seconds[name] / steps for name in CHECKS}}


def main(
    steps: Annotated[int, typer.Option(help="That are measured; a multiple of 32.")] = 64,
    methods: Annotated[list[str] | None, typer.Option(help="As compare takes them.")] = None,
    layers: Annotated[int, typer.Option(help="Of the GPT.")] = GPTConfig.layers,
    width: Annotated[int, typer.Option(help="Of the GPT.")] = GPTConfig.width,
) -> None:
    """Print a table of shares."""
    print("| method | step, ms | " + " | ".join(f"{name}, %" for name in CHECKS) + " | all, % |")
    print("|---|---|" + "---|" * len(CHECKS) + "---|", flush=True)
    settings = Settings(nproc=_RANKS, model=GPTConfig(layers=layers, width=width))
    is_too_much = False
    for method in methods or METHODS:
        found = spawn_ranks(_RANKS, measure, method, settings, steps)
        mean = {name: sum(each[name] for each in found) / _RANKS for name in found[0]}
        shares = {name: mean[name] / mean["step"] for name in CHECKS}
        total = sum(shares.values())
        cells = [f"{100 * share:.3f}" for share in (*shares.values(), total)]
        print(f"| {method} | {1e3 * mean['step']:.0f} | {' | '.join(cells)} |", flush=True)
        is_over = total > MOST or shares["fingerprint"] > MOST_OF_FINGERPRINT
        is_too_much |= is_over and not method.endswith(_IN_BUCKETS)
    if is_too_much:
        typer.echo(f"checks: more than {MOST:.1%}, or {MOST_OF_FINGERPRINT:.1%} for fingerprints")
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)

"""The cost of the checks between ranks, as a share of a training step.

Trains the demo's GPT on 2 ranks and reads a clock before and after each function that checks
something: headers, the checksums in them, stamps with hyperparameters, the fingerprint of
shared settings (every 32 steps), and the checks of a hook before a round. A check that another one
calls is counted once. Times are of the processor, so that other load does not change the shares.
The first steps, and the comparison at the start, are not counted.

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
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.lab.methods import parse_method
from benchmarks.lab.model import VOCABULARY
from benchmarks.lab.processes import spawn_ranks
from benchmarks.lab.runs import Settings
from benchmarks.lab.tasks.whole_text import text_loss
from benchmarks.lab.training import closure_of
from benchmarks.lab.worker import connect
from benchmarks.micro.timing import print_head
from comm_hooks import Exchange
from comm_hooks.exchange import exchange
from comm_hooks.frameworks.ddp.model import AccumulationCheck
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
_STEPS = 64
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
    (exchange, "fingerprint", "fingerprint"),
    (AccumulationCheck, "check", "hook"),
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
    client = connect(parse_method(method.removesuffix(_IN_BUCKETS)), settings, **in_buckets)
    generator = torch.Generator().manual_seed(dist.get_rank())
    shape = (settings.batch, settings.window)
    with timed_checks() as clock:
        for step in range(_WARM_UP_STEPS + steps):
            if step == _WARM_UP_STEPS:
                clock.seconds.clear()
                started = time.process_time()
            windows = torch.randint(VOCABULARY, shape, generator=generator)
            batch = windows[:, :-1], windows[:, 1:]
            client.steps.step(closure_of(text_loss, client.model, batch))
        total = time.process_time() - started
    return {"step": total / steps, **{name: clock.seconds[name] / steps for name in CHECKS}}


def main() -> bool:
    """Print the table; return whether checks take too much of a step."""
    print_head("method", "step, ms", *(f"{name}, %" for name in CHECKS), "all, %")
    is_too_much = False
    for method in METHODS:
        found = spawn_ranks(_RANKS, measure, method, Settings(nproc=_RANKS), _STEPS)
        mean = {name: sum(each[name] for each in found) / _RANKS for name in found[0]}
        shares = {name: mean[name] / mean["step"] for name in CHECKS}
        total = sum(shares.values())
        cells = [f"{100 * share:.3f}" for share in (*shares.values(), total)]
        print(f"| {method} | {1e3 * mean['step']:.0f} | {' | '.join(cells)} |", flush=True)
        is_over = total > MOST or shares["fingerprint"] > MOST_OF_FINGERPRINT
        is_too_much |= is_over and not method.endswith(_IN_BUCKETS)
    return is_too_much

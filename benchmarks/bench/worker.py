"""One rank of one method: trains for the loss, then takes timed steps at each rate.

The loss does not depend on the rate, so training runs over links without a cap.  Before each rate
rank 0 tells ``rate``, and every rank waits for a byte on its standard input: the links then have
that rate.  Afterwards rank 0 tells ``timing`` (the fields of :class:`Timing`), and in between
``turn`` as a sign of life.
"""

import os
from collections.abc import Callable
from dataclasses import asdict

import torch.distributed as dist

from benchmarks.bench.rates import bits_per_second
from benchmarks.bench.results import Candidate, Timing
from benchmarks.bench.turns import Runner, measure_all_reduce, take_turns
from benchmarks.lab.events import Event, telling
from benchmarks.lab.methods import Method, parse_method
from benchmarks.lab.runs import CONTROL
from benchmarks.lab.training import (
    connect,
    draw_batches,
    read_tokens,
    train,
    worker_parser,
)

BUCKETS_MB = (1, 4, 25)
"""Sizes of DDP's buckets that are tried for what crosses uncompressed: small ones overlap with
backward, large ones cost fewer round trips. The fastest one counts."""

TUNED = ("all_reduce", "bf16")

# Of every trainer, before it is timed: DDP rearranges its buckets after the first step.
_WARM_UP_STEPS = 3


def time_at_rates(
    runners: dict[int | None, Runner],
    control: Runner,
    rates: list[str],
    steps: int,
    tell: Callable[[Event], None],
) -> None:
    """Time a method at each rate, as often as there are bucket sizes to try. Collective.

    Args:
        runners: the method's, by the size of DDP's buckets in MB.
        control: what it takes turns with.
        rates: in this order.
        steps: to take at each rate.
        tell: tells the launcher.
    """
    period = max(runner.period for runner in runners.values())
    for runner in (control, *runners.values()):
        runner.take(max(_WARM_UP_STEPS, period))
    for rate in rates:
        tell({"event": "rate", "rate": rate})
        if not os.read(0, 1):
            raise SystemExit("the launcher is gone")
        moved = measure_all_reduce(bits_per_second(rate))
        without, *blocks = take_turns(
            [control, *runners.values()], period, steps, lambda: tell({"event": "turn"})
        )
        candidates = [Candidate(size, own) for size, own in zip(runners, blocks, strict=True)]
        timing = Timing(rate, moved, period, Candidate(None, without), candidates)
        tell({"event": "timing", **asdict(timing)})


def main() -> None:
    """Run one rank as told by the command line, which only ``launch`` writes."""
    parser = worker_parser(__doc__)
    parser.add_argument("--rates", required=True, type=lambda text: text.split(","))
    parser.add_argument("--timing-steps", required=True, type=int)
    arguments = parser.parse_args()
    method, settings = arguments.method, arguments.settings

    with telling(arguments.events) as tell_all:
        tokens = read_tokens(arguments.corpus)
        dist.init_process_group("gloo")
        rank = dist.get_rank()

        def tell(event: Event) -> None:
            if rank == 0:
                tell_all(event)

        def run(method: Method, **ddp_arguments: int) -> Runner:
            trainer = connect(method, settings, **ddp_arguments)
            return Runner(trainer, draw_batches(tokens, settings, rank))

        trained = connect(method, settings)
        for event in train(trained, settings, tokens):
            tell(event)
        runners: dict[int | None, Runner]
        if method.crossing in TUNED:
            runners = {size: run(method, bucket_cap_mb=size) for size in BUCKETS_MB}
        else:
            batches = draw_batches(tokens, settings, rank)
            runners = {None: Runner(trained, batches, settings.steps)}
        control = run(parse_method(CONTROL))
        time_at_rates(runners, control, arguments.rates, arguments.timing_steps, tell)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

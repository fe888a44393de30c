"""One rank of one method: trains for the loss, then takes timed steps at each rate.

The loss does not depend on the rate, so training runs over links without a cap. Before each rate
rank 0 reports ``rate``, and every rank waits for a byte on its standard input: the links then have
that rate. Afterwards rank 0 reports ``timing`` (the fields of :class:`Timing`), and in between
``turn`` as a sign of life.
"""

import os
from dataclasses import asdict

import torch.distributed as dist

from benchmarks.bench.rates import bits_per_second
from benchmarks.bench.results import Candidate, Timing
from benchmarks.bench.turns import Runner, measure_all_reduce, take_turns
from benchmarks.lab.events import Report, reporting
from benchmarks.lab.methods import Pair, parse_method
from benchmarks.lab.runs import CONTROL
from benchmarks.lab.worker import connect, joined, train, worker_parser

BUCKETS_MB = (1, 4, 25)
"""Sizes of DDP's buckets that are tried without compression: small ones overlap with the backward
pass, large ones cost fewer round trips. The fastest one counts."""

TUNED = ("all_reduce", "bf16")

# Of every runner, before it is timed: DDP rearranges its buckets after the first step.
_WARM_UP_STEPS = 3


def time_at_rates(
    runners: dict[int | None, Runner],
    control: Runner,
    rates: list[str],
    steps: int,
    report: Report,
) -> None:
    """Time a method at each rate, as often as there are bucket sizes to try. Collective.

    Args:
        runners: the method's, by the size of DDP's buckets in MB.
        control: takes turns with it.
        rates: in this order.
        steps: to take at each rate.
        report: takes events.
    """
    period = max(runner.period for runner in runners.values())
    for runner in (control, *runners.values()):
        runner.take(max(_WARM_UP_STEPS, period))
    for rate in rates:
        report({"event": "rate", "rate": rate})
        if not os.read(0, 1):
            raise SystemExit("the launcher is gone")
        moved = measure_all_reduce(bits_per_second(rate))
        without, *blocks = take_turns(
            [control, *runners.values()], period, steps, lambda: report({"event": "turn"})
        )
        candidates = [Candidate(size, own) for size, own in zip(runners, blocks, strict=True)]
        timing = Timing(rate, moved, period, Candidate(None, without), candidates)
        report({"event": "timing", **asdict(timing)})


def main() -> None:
    """Run one rank as the command line says."""
    parser = worker_parser(__doc__)
    parser.add_argument("--rates", required=True, type=lambda text: text.split(","))
    parser.add_argument("--timing-steps", required=True, type=int)
    arguments = parser.parse_args()
    pair, settings = arguments.method, arguments.settings

    with reporting(arguments.folder) as report:
        rank, task = joined(arguments)

        def run(pair: Pair, **ddp_arguments: int) -> Runner:
            return Runner(connect(pair, settings, **ddp_arguments), task, settings, rank)

        trained = connect(pair, settings)
        train(trained, task, settings, report)
        runners: dict[int | None, Runner]
        if pair.communication in TUNED:
            runners = {size: run(pair, bucket_cap_mb=size) for size in BUCKETS_MB}
        else:
            runners = {None: Runner(trained, task, settings, rank)}
        control = run(parse_method(CONTROL))
        time_at_rates(runners, control, arguments.rates, arguments.timing_steps, report)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""One rank of one method in a process of its own: trains, and reports to the launcher.

Only rank 0 reports steps, points and figures; every rank reports its process id and its failure.
"""

import argparse
import gc
import json
import math
import os
import statistics
import sys
import threading
import time
import traceback
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.lab.clock import Starvation, quartile_range
from benchmarks.lab.events import Report, reporting
from benchmarks.lab.methods import Pair, parse_method
from benchmarks.lab.model import GPT
from benchmarks.lab.outcomes import Diverged
from benchmarks.lab.plain import rebuild
from benchmarks.lab.runs import Figures, Point, Settings
from benchmarks.lab.schedules import SCHEDULES, warmed_up
from benchmarks.lab.tasks import Task
from benchmarks.lab.tasks.whole_text import whole_text
from benchmarks.lab.training import Client, Plan, train_rank
from comm_hooks.collectives import TorchDistributed


class StepMeter:
    """Times steps, counts their bytes, and reports them.

    Args:
        client: the rank's part of the method.
        settings: of the comparison.
        report: takes events.
    """

    def __init__(self, client: Client, settings: Settings, report: Report) -> None:
        self._client = client
        self._settings = settings
        self._report = report
        self._durations: list[float] = []
        self._starved: list[float] = []
        self._totals = [(0, 0)]  # bytes sent and received after each step
        self._loss = math.nan

    def begin(self) -> None:
        """Start the clock."""
        self._started, self._starvation = time.perf_counter(), Starvation()

    def end(self, step: int, loss: Tensor) -> None:
        """Stop the clock, and report the step.

        Raises:
            FloatingPointError: if the loss is not finite.
        """
        value = float(loss)
        if not math.isfinite(value):
            raise FloatingPointError(f"diverged: the loss is {value} at step {step}")
        seconds = time.perf_counter() - self._started
        self._durations.append(seconds)
        self._starved.append(seconds * self._starvation.share())
        self._totals.append(self._bytes())
        sent, _ = self._totals[-1]
        self._report({"event": "step", "step": step, "loss": value, "bytes_sent": sent})

    def judged(self, point: Point) -> Point:
        """Report a point of the curve with the seconds of training so far."""
        self._totals[-1] = self._bytes()
        self._loss = point.loss
        point = replace(point, seconds=sum(self._durations))
        self._report({"event": "point", **asdict(point)})
        return point

    def figures(self, model: nn.Module) -> Figures:
        """Return the figures of the run. Collective.

        Means per step leave out the warm-up: some methods do not compress yet, and processes are
        slow at first. A run that is all warm-up has nothing else to show.
        """
        settings = self._settings
        start = settings.warmup if settings.warmup < settings.steps else 0
        durations = self._durations[start:]
        (sent, received), (first_sent, first_received) = self._totals[-1], self._totals[start]
        return Figures(
            loss=self._loss,
            drift=replica_drift(model),
            step_ms=1e3 * statistics.median(durations),
            sent_per_step=(sent - first_sent) / len(durations),
            received_per_step=(received - first_received) / len(durations),
            bytes_sent=sent,
            bytes_received=received,
            step_range_ms=1e3 * quartile_range(durations),
            starved=largest(sum(self._starved[start:]) / sum(durations)),
        )

    def _bytes(self) -> tuple[int, int]:
        totals = self._client.traffic.stats()
        return int(totals["bytes_sent"]), int(totals["bytes_received"])


def connect(pair: Pair, settings: Settings, **ddp_arguments: Any) -> Client:
    """Return a rank's part of a method with the GPT that all methods start from. Collective.

    Args:
        ddp_arguments: for ``DistributedDataParallel``, in place of the method's own.
    """
    torch.manual_seed(settings.seed)  # the same weights on every rank
    return pair.connect(GPT(settings.model), settings, **ddp_arguments)


def train(client: Client, task: Task, settings: Settings, report: Report) -> None:
    """Train on this rank's part of the text; report steps, points and figures. Collective.

    Raises:
        FloatingPointError: if a loss is not finite.
    """
    assert client.model is not None
    factor = warmed_up(SCHEDULES[settings.schedule], settings.warmup, settings.steps)
    plan = Plan(
        settings.steps,
        1,
        settings.batch,
        0,
        lambda over: factor(round(over * settings.steps)),
        every=settings.eval_every,
    )
    meter = StepMeter(client, settings, report)
    # All ranks judge the model together.
    judging = replace(client, agrees=False)
    try:
        train_rank(
            task,
            client.model,
            lambda named, transport: judging,
            plan,
            settings.seed,
            lambda: None,
            TorchDistributed(dist.group.WORLD),
            meter,
        )
    except Diverged:
        raise FloatingPointError("diverged: the loss on all data is not finite") from None
    report({"event": "figures", **asdict(meter.figures(client.model))})


@torch.no_grad()
def replica_drift(model: nn.Module) -> float:
    """Return the largest relative distance of a replica to that of rank 0. Collective."""
    own = torch.cat([parameter.flatten() for parameter in model.parameters()])
    first = own.clone()
    dist.broadcast(first, src=0)
    return largest(float((own - first).norm() / first.norm()))


def largest(value: float) -> float:
    """Return the largest of all ranks' values. Collective."""
    found = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return found.item()


def worker_parser(description: str | None) -> argparse.ArgumentParser:
    """Return the parser of a worker's command line, which only its launcher writes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--method", required=True, type=parse_method)
    parser.add_argument(
        "--settings", required=True, type=lambda line: rebuild(Settings, json.loads(line))
    )
    parser.add_argument("--corpus", required=True, type=Path)
    parser.add_argument("--folder", required=True, type=Path)
    return parser


def joined(arguments: argparse.Namespace) -> tuple[int, Task]:
    """Join the process group; return this rank and the task."""
    rank = int(os.environ["RANK"])
    dist.init_process_group(
        "gloo",
        init_method=f"file://{arguments.folder}/store",
        rank=rank,
        world_size=arguments.settings.nproc,
    )
    tokens = torch.frombuffer(bytearray(arguments.corpus.read_bytes()), dtype=torch.uint8)
    return rank, whole_text(tokens, arguments.settings)


def _exit_with_launcher() -> None:
    """End this process when the launcher is gone, for whatever reason.

    Standard input is a pipe, and only the launcher holds its other end.
    """

    def wait_for_end() -> None:
        while os.read(0, 1):
            pass
        os._exit(1)

    threading.Thread(target=wait_for_end, daemon=True).start()


def main() -> None:
    """Run one rank as the command line says."""
    arguments = worker_parser(__doc__).parse_args()
    _exit_with_launcher()
    try:
        with reporting(arguments.folder) as report:
            _, task = joined(arguments)
            client = connect(arguments.method, arguments.settings)
            train(client, task, arguments.settings, report)
        # DDP's reducer must not be the last to let go of the process group: it would wait for
        # gloo's threads and hold Python's lock meanwhile, which those threads may want.
        del client
        gc.collect()
        dist.destroy_process_group()
    except FloatingPointError:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # not by way of destructors, for the same reason


if __name__ == "__main__":
    main()

"""One rank plays a step of a method alone, on this device, and notes what it would have sent.

The real compressors, memories and optimizers run on tensors of the model's size; only the network
is missing.  What they ask of it gives the bytes, and the time between two requests is what the
method costs in arithmetic.
"""

import math
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.lab.crossings import CROSSINGS, build_exchange
from benchmarks.lab.methods import Method
from benchmarks.lab.optimizers import OPTIMIZERS
from benchmarks.lab.runs import Settings
from comm_hooks import Exchange
from comm_hooks.collectives import Transport
from comm_hooks.collectives.requests import (
    AllGather,
    AllGatherObject,
    AllReduce,
    AllToAll,
    Request,
)
from comm_hooks.config import COMPRESSORS
from comm_hooks.exchange.layout import Segment
from comm_hooks.launchers.advise.cost_model import (
    Collective,
    Exchanged,
    Plan,
    all_reduce,
    ready_shares,
)
from comm_hooks.launchers.advise.powersgd import PowerSGDStep
from comm_hooks.launchers.advise.step import Step
from comm_hooks.launchers.clock import Starvation, quartile_range, synchronize
from comm_hooks.wire.summed_header import MARKS_START

_LARGEST = 1 << 24
"""Elements: of larger models a part of this size is played, and the rest taken to be alike."""

_FIRST_BUCKET, _BUCKET = 1 << 20, 25 << 20  # DDP's defaults
_REPEAT = 5
_MIN_STEPS = 4


class Alone(Transport):
    """A world of N ranks of which only this one exists: the others send what this one sends."""

    def __init__(self, world_size: int, device: torch.device, ranks_per_node: int = 1) -> None:
        self._world_size = world_size
        self._device = device
        self._ranks_per_node = ranks_per_node
        self.start_noting()

    @property
    def rank(self) -> int:
        return 0

    @property
    def ranks(self) -> Sequence[int]:
        return [0] * self._world_size

    @property
    def world_size(self) -> int:
        return self._world_size

    @property
    def ranks_per_node(self) -> int:
        return self._ranks_per_node

    def start_noting(self) -> None:
        """Forget what was noted."""
        self._collectives: list[Collective] = []
        self._before, self._since = 0.0, self.clock()

    def noted(self) -> Exchanged:
        """Return what was asked for since :meth:`start_noting`, and the time it took to ask."""
        return Exchanged(tuple(self._collectives), self._before, self.clock() - self._since)

    def clock(self) -> float:
        """Return seconds, once the device has done what it was given."""
        synchronize(self._device)
        return time.perf_counter()

    def perform(self, request: Request) -> Any:
        self._before += self.clock() - self._since
        reply = self._answer(request)
        self._since = self.clock()
        return reply

    def start(self, request: Request) -> torch.futures.Future[Any]:
        raise NotImplementedError("a rehearsal is driven by run() alone")

    def _answer(self, request: Request) -> Any:
        payload, ranks = request.payload, self._world_size
        if request.group:
            ranks = len(request.group.members(self.rank, ranks))
        if isinstance(request, AllGatherObject):
            return [payload] * ranks
        assert isinstance(request, AllReduce | AllGather | AllToAll)
        self._collectives.append(Collective.of(request, ranks))
        if isinstance(request, AllReduce):
            total = payload * ranks
            # The others are this one, down to their marks.
            total[MARKS_START : MARKS_START + ranks] = payload[MARKS_START]
            return payload.copy_(total)
        row = payload if isinstance(request, AllGather) else payload[0]
        return row.expand(ranks, -1)


@dataclass(frozen=True)
class _Stage:
    """What a method is played on: parameters of the model's shapes, and gradients for them."""

    step: Step
    parameters: list[tuple[str, nn.Parameter]]
    gradients: list[Tensor]
    device: torch.device

    @classmethod
    def of(cls, step: Step, device: torch.device) -> "_Stage":
        generator = torch.Generator().manual_seed(0)
        gradients = [torch.randn(s, generator=generator).to(device) for s in step.shapes]
        parameters = [
            (f"parameter.{index}", nn.Parameter(torch.zeros_like(gradient)))
            for index, gradient in enumerate(gradients)
        ]
        return cls(step, parameters, gradients, device)


class Rehearsals:
    """Plays methods for one model.

    Args:
        step: the model.  If it has over 16.8 million parameters, a part of that size is played.
        ranks: of the world that is imagined.
        device: where training takes place.
        ranks_per_node: how many of the ranks share a node.

    Example::

        >>> from benchmarks.lab.methods import parse_method
        >>> rehearsals = Rehearsals(Step.of_numel(1 << 20, 100.0), ranks=2)
        >>> rehearsals.plan(parse_method("all_reduce")).sent_per_step()
        4194304.0
    """

    def __init__(
        self,
        step: Step,
        ranks: int,
        device: torch.device | str | None = None,
        ranks_per_node: int = 1,
    ) -> None:
        self.step = step
        self.ranks = ranks
        self.ranks_per_node = ranks_per_node
        played = step
        if step.numel > _LARGEST:
            played = Step.of_numel(_LARGEST, step.milliseconds, step.dtype)
        self._scale = step.numel / played.numel
        self._stage = _Stage.of(played, torch.device(device or "cpu"))

    def optimizer_seconds(self) -> float:
        """Return how long a step of AdamW takes, which the user's optimizer is taken to be like."""
        return self._play_optimizer("adamw", None, {}).optimizer or 0.0

    def plan(self, method: Method) -> Plan:
        """Return what the method does.

        What may be another load's in its times: by how much they differ between repetitions, or as
        much of them as this thread was kept waiting for a processor while it was played, if more.
        """
        starvation = Starvation()
        plan = self._plan(method)
        starved = starvation.share() * (plan.codec + (plan.optimizer or 0.0))
        return replace(plan, noise=max(plan.noise, starved))

    def _plan(self, method: Method) -> Plan:
        entry = OPTIMIZERS[method.optimizer]
        if entry.exchanges:
            exchange = None if entry.makes_exchange else self._make_exchange(method)
            return self._play_optimizer(method.optimizer, exchange, method.optimizer_options)
        plan = self._plan_crossing(method)
        if method.optimizer != "adamw":
            own = self._play_optimizer(method.optimizer, None, method.optimizer_options)
            plan = replace(plan, optimizer=own.optimizer, noise=plan.noise + own.noise)
        return plan

    def _plan_crossing(self, method: Method) -> Plan:
        if method.crossing == "none":
            return Plan()
        if method.crossing == "powersgd":
            return self._plan_powersgd(method.crossing_options["rank"])
        if method.crossing in COMPRESSORS:
            return self._play_hook(method)
        element_bytes = 2 if method.crossing == "bf16" else self.step.element_bytes
        casts = [0.0]
        if element_bytes < self.step.element_bytes:
            casts = self._takes(lambda: [g.to(torch.bfloat16) for g in self._stage.gradients])
        cast = self._scale * statistics.median(casts)
        rounds = []
        for bucket, ready in self._buckets(self.step, method):
            numel = sum(self._reversed_numels(self.step)[i] for i in bucket)
            part = cast * numel / self.step.numel
            collective = all_reduce(numel * element_bytes, self.ranks)
            rounds.append(Exchanged((collective,), part, part, ready))
        return Plan(tuple(rounds), noise=2 * self._scale * quartile_range(casts))

    def _plan_powersgd(self, rank: int) -> Plan:
        power = PowerSGDStep(self._stage.gradients, rank)
        takes = self._takes(power.run)
        seconds = self._scale * statistics.median(takes)
        payloads = [4 * round(self._scale * numel) for numel in power.payload_numels]
        collectives = tuple(all_reduce(nbytes, self.ranks) for nbytes in payloads if nbytes)
        exchanged = Exchanged(collectives, before=seconds)
        noise = self._scale * quartile_range(takes)
        return Plan((exchanged,), state_bytes=4 * self.step.numel, noise=noise)

    def _play_hook(self, method: Method) -> Plan:
        """Play the rounds of all buckets, then lay them out over the whole model's buckets."""
        exchange = self._make_exchange(method)
        transport = exchange.transport
        assert isinstance(transport, Alone)
        buckets = self._buckets(self._stage.step, method)
        backwards = [*zip(self._stage.parameters, self._stage.gradients, strict=True)][::-1]
        takes: list[list[Exchanged]] = [[] for _ in buckets]
        for take in range(1 + _REPEAT):
            for (members, ready), of_bucket in zip(buckets, takes, strict=True):
                segments, tensors = [], []
                for (name, parameter), gradient in backwards[members.start : members.stop]:
                    exempt = exchange.settings.exempts(parameter.shape)
                    segments.append(Segment(name, (parameter.numel(),), exempt))
                    tensors.append(gradient.flatten().clone())
                bucket = exchange.buckets.of_segments(segments, self._stage.device)
                transport.start_noting()
                transport.run(exchange.bucket_round(bucket, tensors))
                if take:  # the first makes workspaces
                    of_bucket.append(replace(transport.noted(), ready=ready))
            exchange.end_step()
        rounds = [_median(of_bucket) for of_bucket in takes]
        if self._scale > 1:
            rounds = self._spread(rounds, method)
        noise = sum(quartile_range([t.before + t.after for t in of_bucket]) for of_bucket in takes)
        return Plan(
            tuple(rounds),
            state_bytes=round(self._scale * _residual_bytes(exchange)),
            noise=self._scale * noise,
        )

    def _spread(self, played: Sequence[Exchanged], method: Method) -> list[Exchanged]:
        """Return rounds for the whole model's buckets, each like the part's largest in its size."""
        part = self._reversed_numels(self._stage.step)
        sizes = [
            sum(part[i] for i in members) for members, _ in self._buckets(self._stage.step, method)
        ]
        largest = max(range(len(sizes)), key=lambda index: sizes[index])
        whole = self._reversed_numels(self.step)
        return [
            replace(
                _scaled(played[largest], sum(whole[i] for i in members) / sizes[largest]),
                ready=ready,
            )
            for members, ready in self._buckets(self.step, method)
        ]

    def _play_optimizer(
        self, name: str, exchange: Exchange | None, options: Mapping[str, Any]
    ) -> Plan:
        """Play whole periods of an optimizer, past its warm-up."""
        # Those that freeze something do so after the first step of two periods.
        entry = OPTIMIZERS[name]
        settings = Settings(nproc=self.ranks, steps=2 * _MIN_STEPS, warmup=1)
        if entry.makes_exchange:  # nobody has said how long the training will be
            options = {**options, "total_steps": None}
        named = [(n, nn.Parameter(p.detach().clone())) for n, p in self._stage.parameters]
        transport = exchange.transport if exchange else self._make_transport()
        assert isinstance(transport, Alone)
        given = transport if entry.makes_exchange else exchange
        with warnings.catch_warnings():
            # Who builds it for a training is told there.
            warnings.filterwarnings("ignore", message="low_communication: with")
            optimizer = entry.build(named, given, settings, dict(options))
        if entry.makes_exchange:
            exchange = optimizer.exchange

        def closure() -> Tensor:
            for (_, parameter), gradient in zip(named, self._stage.gradients, strict=True):
                parameter.grad = gradient.clone()
            return torch.zeros(())

        copying = statistics.median(self._takes(closure))
        period = getattr(optimizer, "local_steps", None) or 1
        steps = period * math.ceil(_MIN_STEPS / period)
        played: list[Exchanged] = []
        with warnings.catch_warnings():
            # The others echo this rank, so a round lacks what other clients had contributed.
            warnings.filterwarnings("ignore", message="round .*: left out")
            for _ in range(max(_MIN_STEPS, period) + steps):
                transport.start_noting()
                optimizer.step(closure)
                played.append(transport.noted())
        played = played[-steps:]
        # Steps that exchange and steps that do not, each as they usually are.
        kinds = [
            [e.before + e.after for e in played if bool(e.collectives) == sends]
            for sends in (True, False)
        ]
        arithmetic = sum(len(kind) * (statistics.median(kind) - copying) for kind in kinds if kind)
        noise = sum(len(kind) * quartile_range(kind) for kind in kinds)
        collectives = tuple(collective for e in played for collective in e.collectives)
        rounds = (_scaled(Exchanged(collectives), self._scale),) if collectives else ()
        return Plan(
            in_optimizer=rounds,
            steps=steps,
            optimizer=self._scale * max(0.0, arithmetic / steps),
            state_bytes=round(self._scale * _residual_bytes(exchange)) if exchange else 0,
            noise=self._scale * noise / steps,
        )

    def _make_exchange(self, method: Method) -> Exchange:
        built = build_exchange(method.crossing, method.crossing_options, seed=0)
        return Exchange(built.settings, transport=self._make_transport())

    def _make_transport(self) -> Alone:
        return Alone(self.ranks, self._stage.device, self.ranks_per_node)

    def _buckets(self, step: Step, method: Method) -> list[tuple[range, float]]:
        sizes = [math.prod(shape) * step.element_bytes for shape in step.shapes]
        if "bucket_cap_mb" in CROSSINGS[method.crossing].ddp_arguments:
            return [(range(len(sizes)), 1.0)]  # those that need the whole gradient at once
        return ready_shares(sizes, _FIRST_BUCKET, _BUCKET)

    @staticmethod
    def _reversed_numels(step: Step) -> list[int]:
        return [math.prod(shape) for shape in reversed(step.shapes)]

    @torch.no_grad()
    def _takes(self, function: Callable[[], object]) -> list[float]:
        """Return how long a function takes, several times over."""
        clock = Alone(1, self._stage.device).clock
        durations = []
        for _ in range(1 + _REPEAT):
            started = clock()
            function()
            durations.append(clock() - started)
        return durations[1:]


def slowest(seconds: float) -> float:
    """Return the largest of all ranks' figures, if there are others: steps wait for the slowest."""
    if not dist.is_initialized():
        return seconds
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    largest = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)


def of_slowest_rank(plan: Plan) -> Plan:
    """Return the plan with the times of the slowest rank; also keeps ranks together."""

    def worst(exchanged: Exchanged) -> Exchanged:
        before, after = slowest(exchanged.before), slowest(exchanged.after)
        return replace(exchanged, before=before, after=after)

    return replace(
        plan,
        in_backward=tuple(worst(exchanged) for exchanged in plan.in_backward),
        in_optimizer=tuple(worst(exchanged) for exchanged in plan.in_optimizer),
        optimizer=None if plan.optimizer is None else slowest(plan.optimizer),
        noise=slowest(plan.noise),
    )


def _median(takes: Sequence[Exchanged]) -> Exchanged:
    return sorted(takes, key=lambda take: take.before + take.after)[len(takes) // 2]


def _scaled(exchanged: Exchanged, factor: float) -> Exchanged:
    """Return the same round for a bucket that is larger by a factor."""
    collectives = tuple(
        replace(collective, traffic=round(factor * collective.traffic))
        for collective in exchanged.collectives
    )
    return replace(
        exchanged,
        collectives=collectives,
        before=factor * exchanged.before,
        after=factor * exchanged.after,
    )


def _residual_bytes(exchange: Exchange) -> int:
    def count(value: object) -> int:
        if isinstance(value, Tensor):
            return value.nbytes
        if isinstance(value, Mapping):
            return sum(map(count, value.values()))
        return sum(map(count, value)) if isinstance(value, list | tuple) else 0

    return count(exchange.state_dict())

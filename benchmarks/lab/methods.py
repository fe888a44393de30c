"""What can be compared: pairs of a communication method and an optimizer.

Neither half can be judged alone. Top-k with error feedback works under SGD and ruins Adam, whose
second moment turns rare pulses into tiny steps; the same top-k of each rank's Adam update is among
the best. So a method is a pair, written ::

    <communication>[:option=value...][+<optimizer>[:option=value...]]

for instance ``all_reduce``, ``powersgd:rank=2`` or ``sign+local_variance_adam``. The optimizer is
``adamw`` unless named, and an optimizer named alone (``safl``) uses its published exchange.
Underscores do not matter: ``fetchsgd`` is ``fetch_sgd``.
"""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.lab.communication import (
    COMMUNICATION,
    Options,
    Traffic,
    build_exchange,
    stats_traffic,
)
from benchmarks.lab.model import GPT
from benchmarks.lab.optimizers import NOTES, exchange_of, needs_of
from benchmarks.lab.runs import BASELINE, CONTROL, Settings
from benchmarks.lab.training import Client, Closure, NamedParameters
from comm_hooks import Exchange, Identity, skip_hook
from comm_hooks.collectives import Simulated, Transport
from comm_hooks.config import COMPRESSORS, check_options, parse_spec, unknown
from comm_hooks.optim import SAFL, LocalRounds, ZeroOneAdam
from comm_hooks.optim.registry import OPTIMIZERS, Defaults, OptimizerEntry, lookup


@dataclass
class Stepper:
    """Takes the steps of one rank, and counts them.

    Args:
        optimizer: takes a step by a closure.
        parameters: of the model.
        traffic: the bytes (sent, received) in the first steps, given their number.
        average: averages gradients after the backward pass, where no hook of DDP does.
        clip_norm: to which gradients are clipped before the step: the mean where gradients are
            averaged, else each rank's own; None for no clipping.
    """

    optimizer: Any
    parameters: list[nn.Parameter]
    traffic: Traffic
    average: Callable[[], None] | None = None
    clip_norm: float | None = None
    taken: int = 0

    def step(self, closure: Closure) -> Any:
        """Compute gradients, average and clip them, and take the step."""
        self.taken += 1
        if self.average is None and self.clip_norm is None:
            return self.optimizer.step(closure)
        loss = closure()
        if self.average is not None:
            self.average()
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.parameters, self.clip_norm)
        self.optimizer.step()
        return loss

    def stats(self) -> dict[str, int]:
        """Return the bytes that this rank has sent and received."""
        sent, received = self.traffic(self.taken)
        return {"bytes_sent": sent, "bytes_received": received}


@dataclass(frozen=True)
class Pair:
    """A parsed and checked method: a communication method and an optimizer, with their options."""

    spec: str
    communication: str
    communication_options: Options
    optimizer: str
    optimizer_options: Options

    @property
    def entry(self) -> OptimizerEntry:
        """The optimizer in the registry."""
        return OPTIMIZERS[self.optimizer]

    @property
    def note(self) -> str:
        """One line on what the figures alone do not tell."""
        note = NOTES.get(self.optimizer, "")
        if self.entry.averages == "own":
            return note
        if self.communication in COMPRESSORS:
            exchange = build_exchange(self.communication, self.communication_options, seed=0)
            communication = f"{exchange.compressor}, {exchange.memory or 'no error feedback'}"
        else:
            communication = COMMUNICATION[self.communication].note
        return f"{communication}; {note}" if note else communication

    def build(
        self,
        named: NamedParameters,
        settings: Settings,
        exchange: Exchange | None = None,
        transport: Transport | None = None,
    ) -> Any:
        """Return the optimizer, with the settings of a comparison unless it has its own."""
        defaults = Defaults(
            settings.learning_rate,
            settings.betas,
            settings.weight_decay,
            settings.steps,
            settings.warmup,
        )
        own = {"transport": transport} if self.entry.averages == "own" else {}
        given = exchange if self.entry.averages == "exchange" else None
        options = {**self.optimizer_options, **own}
        return self.entry.build(named, given, defaults=defaults, **options)

    def check(self, settings: Settings) -> None:
        """Raise ``ValueError`` if the method cannot train with these settings."""
        if self.entry.averages == "own":
            # Whether it can meet its budget depends on the model.
            with torch.device("meta"):
                model = GPT(settings.model)
            self.build(list(model.named_parameters()), settings, None, Simulated(settings.nproc)[0])
            return
        # As many parameters as the fewest-layered model has, so that it can be cut into fragments,
        # half of them matrices.
        shapes = [(1, 1), (1,)] * 6 * settings.model.layers
        named = [(str(i), nn.Parameter(torch.ones(shape))) for i, shape in enumerate(shapes)]
        exchange = None
        if self.entry.averages == "exchange":
            exchange = build_exchange(self.communication, self.communication_options, 0)
        self.build(named, settings, exchange)

    @property
    def needs_ddp(self) -> bool:
        """Whether gradients are exchanged by a hook that only DDP can run."""
        return self.communication not in (*COMPRESSORS, BASELINE, CONTROL)

    def attach(
        self,
        named: NamedParameters,
        settings: Settings,
        transport: Transport,
        clip_norm: float | None = None,
    ) -> Client:
        """Return a rank's part of the method without DDP: for ranks of any transport.

        Args:
            named: the model's parameters.
            settings: shared with the other methods.
            transport: joins the ranks.
            clip_norm: see :class:`Stepper`.

        Raises:
            ValueError: for a hook that only DDP can run.
        """
        parameters = [p for _, p in named]
        exchanges = self.entry.averages != "before"
        if self.needs_ddp:
            raise ValueError(f"method {self.spec!r}: {self.communication} needs DDP")
        if self.communication in COMPRESSORS:
            exchange = build_exchange(
                self.communication, self.communication_options, settings.seed, transport
            )
        else:
            exchange = Exchange(Identity(), transport=transport)
        optimizer = self.build(named, settings, exchange, transport)
        if self.entry.averages == "own":
            exchange = optimizer.exchange

        def average() -> None:
            gradients = {str(i): p.grad for i, p in enumerate(parameters) if p.grad is not None}
            exchange.average_(gradients, compress=self.communication != BASELINE)

        alone = self.communication == CONTROL
        stepper = Stepper(
            optimizer,
            parameters,
            stats_traffic(exchange.stats),
            average=None if alone or exchanges else average,
            clip_norm=clip_norm,
        )
        return _client(stepper, agrees=exchanges or not alone)

    def connect(
        self,
        model: nn.Module,
        settings: Settings,
        clip_norm: float | None = None,
        **ddp_arguments: Any,
    ) -> Client:
        """Return a rank's part of the method, with the model under DDP. Collective.

        Args:
            model: the model to train.
            settings: shared with the other methods.
            clip_norm: see :class:`Stepper`.
            ddp_arguments: for ``DistributedDataParallel``, in place of the method's own.
        """
        communication = COMMUNICATION[self.communication]
        ddp = DistributedDataParallel(model, **{**communication.ddp_arguments, **ddp_arguments})
        named = list(model.named_parameters())
        exchanges, exchange = self.entry.averages != "before", None
        if not exchanges:
            traffic = communication.connect(ddp, self.communication_options, settings.seed)
        else:
            ddp.register_comm_hook(None, skip_hook)
        if self.entry.averages == "exchange":
            exchange = build_exchange(self.communication, self.communication_options, settings.seed)
        optimizer = self.build(named, settings, exchange)
        if exchanges:
            traffic = stats_traffic((exchange or optimizer.exchange).stats)
        stepper = Stepper(optimizer, [p for _, p in named], traffic, clip_norm=clip_norm)
        return _client(stepper, agrees=self.communication != CONTROL or exchanges, model=ddp)


def _client(stepper: Stepper, *, agrees: bool, model: nn.Module | None = None) -> Client:
    optimizer = stepper.optimizer
    # Of the two optimizers of SAFL the server's is the adaptive one.
    scheduled = optimizer.server if isinstance(optimizer, SAFL) else optimizer
    rounds = optimizer if isinstance(optimizer, LocalRounds) else None
    waits = isinstance(optimizer, LocalRounds | ZeroOneAdam)
    finish = optimizer.synchronize if waits else None
    return Client(stepper, stepper, scheduled, agrees, rounds, finish, model)


def period_of(client: Client) -> int:
    """Return the steps from one exchange of a method to the next."""
    assert isinstance(client.steps, Stepper)
    period: int = getattr(client.steps.optimizer, "local_steps", 1)
    return period


def parse_methods(specs: str) -> list[Pair]:
    """Parse a comma-separated list of methods.

    Raises:
        ValueError: a name, an option or a value is not known; the message is one line that says
            what would be.
    """
    methods = [parse_method(spec.strip()) for spec in specs.split(",")]
    for i, method in enumerate(methods):
        if method in methods[:i]:
            raise ValueError(f"method {method.spec!r} is named twice; every run would be the same")
    return methods


def parse_method(spec: str) -> Pair:
    """Parse one method; see :func:`parse_methods`."""
    # A "+" before a name joins the halves; one inside a number (1e+3) does not.
    first, *others = re.split(r"\+(?=[A-Za-z_])", spec)
    if len(others) > 1:
        raise ValueError(f"method {spec!r}: at most one optimizer may follow the '+'")
    name, given = parse_spec(first, "method")
    optimizer, own = parse_spec(others[0], "optimizer") if others else ("adamw", {})
    is_alone = not others and _known(name) is None and lookup(name) is not None
    if is_alone:
        optimizer, own, given = name, given, {}
    entry = lookup(optimizer)
    if entry is None:
        raise ValueError(unknown("optimizer", optimizer, OPTIMIZERS))
    communication = _default(entry) if is_alone else _known(name)
    if communication is None:
        raise ValueError(unknown("method", name, {**COMMUNICATION, **OPTIMIZERS}))
    if entry.averages == "own" and others:
        raise ValueError(
            f"method {spec!r}: {entry.name} chooses how it exchanges: name it without a '+'"
        )
    if entry.averages == "exchange" and communication not in COMPRESSORS:
        raise ValueError(
            f"method {spec!r}: {entry.name} exchanges by itself and needs a compressor before the "
            f"'+': {', '.join(COMPRESSORS)}"
        )
    options = {**COMMUNICATION[communication].defaults, **given}
    if entry.averages == "exchange":
        published, settings = exchange_of(entry)
        options = {**(settings if communication == published else needs_of(entry)), **options}
    if communication in COMPRESSORS:
        build_exchange(communication, options, seed=0)  # raises ValueError
    else:
        check_options(communication, options, COMMUNICATION[communication].defaults)
        for key, value in options.items():
            if type(value) is not int or value < 1:
                raise ValueError(f"{communication}:{key} must be a positive integer, got {value!r}")
    if "bits" in own:
        own["bits_per_parameter"] = own.pop("bits")
    if own.pop("muon", False):
        own["inner"] = "muon"
    rate = own.get("lr", 1.0)
    entry.check(own)
    if not 0 < rate < math.inf:
        raise ValueError(f"{entry.name}:lr must be positive, got {rate!r}")
    return Pair(spec, communication, options, entry.name, own)


def _default(entry: OptimizerEntry) -> str:
    """Return the communication method of an optimizer that is named alone."""
    if entry.averages == "exchange":
        return exchange_of(entry)[0]
    return CONTROL if entry.averages == "own" else BASELINE


def _known(name: str) -> str | None:
    """Return a communication method by its name, whatever its underscores."""
    plain = name.replace("_", "")
    return next((k for k in COMMUNICATION if plain and k.replace("_", "") == plain), None)

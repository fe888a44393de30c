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
from collections.abc import Callable, Mapping
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
from benchmarks.lab.optimizers import OPTIMIZERS, Kind
from benchmarks.lab.runs import BASELINE, CONTROL, Settings
from benchmarks.lab.training import Client, Closure, NamedParameters
from comm_hooks import Exchange, Identity, skip_hook
from comm_hooks.collectives import Simulated, Transport
from comm_hooks.config import COMPRESSORS, unknown
from comm_hooks.optim import SAFL, LocalRounds, ZeroOneAdam


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
    def note(self) -> str:
        """One line on what the figures alone do not tell."""
        if self.communication in COMPRESSORS:
            exchange = build_exchange(self.communication, self.communication_options, seed=0)
            communication = f"{exchange.compressor}, {exchange.memory or 'no error feedback'}"
        else:
            communication = COMMUNICATION[self.communication].note
        entry = OPTIMIZERS[self.optimizer]
        if entry.makes_exchange:
            return entry.note
        return f"{communication}; {entry.note}" if entry.note else communication

    def check(self, settings: Settings) -> None:
        """Raise ``ValueError`` if the method cannot train with these settings."""
        entry = OPTIMIZERS[self.optimizer]
        if entry.makes_exchange:
            # Whether it can meet its budget depends on the model.
            with torch.device("meta"):
                model = GPT(settings.model)
            transport = Simulated(settings.nproc)[0]
            entry.build(model.named_parameters(), transport, settings, self.optimizer_options)
            return
        # As many parameters as the fewest-layered model has, so that it can be cut into fragments,
        # half of them matrices.
        shapes = [(1, 1), (1,)] * 6 * settings.model.layers
        named = [(str(i), nn.Parameter(torch.ones(shape))) for i, shape in enumerate(shapes)]
        exchange = None
        if entry.communication:
            exchange = build_exchange(self.communication, self.communication_options, 0)
        entry.build(named, exchange, settings, self.optimizer_options)

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
        entry = OPTIMIZERS[self.optimizer]
        parameters = [p for _, p in named]
        if entry.makes_exchange:
            optimizer = entry.build(named, transport, settings, self.optimizer_options)
            stepper = Stepper(optimizer, parameters, stats_traffic(optimizer.exchange.stats))
            stepper.clip_norm = clip_norm
            return _client(stepper, agrees=True)
        if self.needs_ddp:
            raise ValueError(f"method {self.spec!r}: {self.communication} needs DDP")
        if self.communication in COMPRESSORS:
            exchange = build_exchange(
                self.communication, self.communication_options, settings.seed, transport
            )
        else:
            exchange = Exchange(Identity(), transport=transport)
        own = exchange if entry.communication else None
        optimizer = entry.build(named, own, settings, self.optimizer_options)

        def average() -> None:
            gradients = {str(i): p.grad for i, p in enumerate(parameters) if p.grad is not None}
            exchange.average_(gradients, compress=self.communication != BASELINE)

        alone = self.communication == CONTROL
        stepper = Stepper(
            optimizer,
            parameters,
            stats_traffic(exchange.stats),
            average=None if alone or entry.exchanges else average,
            clip_norm=clip_norm,
        )
        return _client(stepper, agrees=entry.exchanges or not alone)

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
        communication, entry = COMMUNICATION[self.communication], OPTIMIZERS[self.optimizer]
        ddp = DistributedDataParallel(model, **{**communication.ddp_arguments, **ddp_arguments})
        named = list(model.named_parameters())
        exchange = None
        if not entry.exchanges:
            traffic = communication.connect(ddp, self.communication_options, settings.seed)
        else:
            ddp.register_comm_hook(None, skip_hook)
            if entry.communication:
                exchange = build_exchange(
                    self.communication, self.communication_options, settings.seed
                )
        optimizer = entry.build(named, exchange, settings, self.optimizer_options)
        if entry.exchanges:
            traffic = stats_traffic((exchange or optimizer.exchange).stats)
        stepper = Stepper(optimizer, [p for _, p in named], traffic, clip_norm=clip_norm)
        return _client(stepper, agrees=self.communication != CONTROL or entry.exchanges, model=ddp)


def _client(stepper: Stepper, *, agrees: bool, model: nn.Module | None = None) -> Client:
    optimizer = stepper.optimizer
    # Of the two optimizers of SAFL the server's is the adaptive one.
    scheduled = optimizer.server if isinstance(optimizer, SAFL) else optimizer
    rounds = optimizer if isinstance(optimizer, LocalRounds) else None
    waits = isinstance(optimizer, LocalRounds | ZeroOneAdam)
    finish = optimizer.synchronize if waits else None
    return Client(stepper, stepper, scheduled, agrees, rounds, finish, model)


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
    first, *rest = re.split(r"\+(?=[A-Za-z_])", spec)
    if len(rest) > 1:
        raise ValueError(f"method {spec!r}: at most one optimizer may follow the '+'")
    communication, given = _parse_half(first)
    optimizer, optimizer_given = _parse_half(rest[0]) if rest else ("adamw", {})
    if (
        not rest
        and _known(communication, COMMUNICATION) is None
        and _known(communication, OPTIMIZERS)
    ):
        optimizer, optimizer_given, given = communication, given, {}
        alone = OPTIMIZERS[_known(optimizer, OPTIMIZERS) or ""]
        communication = alone.communication or (CONTROL if alone.makes_exchange else BASELINE)
    communication = _find("method", communication, COMMUNICATION, {**COMMUNICATION, **OPTIMIZERS})
    optimizer = _find("optimizer", optimizer, OPTIMIZERS, OPTIMIZERS)
    entry = OPTIMIZERS[optimizer]
    if entry.makes_exchange and rest:
        raise ValueError(
            f"method {spec!r}: {optimizer} chooses how it exchanges: name it without a '+'"
        )
    if entry.communication and communication not in COMPRESSORS:
        raise ValueError(
            f"method {spec!r}: {optimizer} exchanges by itself and needs a compressor before the "
            f"'+': {', '.join(COMPRESSORS)}"
        )
    pair_communication, pair_optimizer = _PAIRS.get((communication, optimizer), ({}, {}))
    own = entry.communication_options if communication == entry.communication else {}
    needed = {**entry.needs, **own, **pair_communication}
    options = {**COMMUNICATION[communication].defaults, **needed, **given}
    if communication in COMPRESSORS:
        build_exchange(communication, options, seed=0)  # raises ValueError
    else:
        kinds = dict.fromkeys(COMMUNICATION[communication].defaults, int)
        _check_options(communication, options, kinds)
    optimizer_options = {**pair_optimizer, **optimizer_given}
    _check_options(optimizer, optimizer_options, entry.options)
    return Pair(spec, communication, options, optimizer, optimizer_options)


def _parse_half(text: str) -> tuple[str, Options]:
    name, *settings = text.split(":")
    options: Options = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not (key and equals and value):
            raise ValueError(f"{text!r}: options are written {name}:option=value")
        options[key] = _parse_value(value)
    return name, options


def _parse_value(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    numerator, slash, denominator = text.partition("/")
    try:
        if slash:
            return float(numerator) / float(denominator)
        return int(text) if re.fullmatch(r"[+-]?\d+", text) else float(text)
    except (ValueError, ZeroDivisionError):
        return text


def _known(name: str, known: Mapping[str, object]) -> str | None:
    """Return the name as it is known, whatever its underscores."""
    return next((k for k in known if k.replace("_", "") == name.replace("_", "")), None)


def _find(kind: str, name: str, known: Mapping[str, object], listed: Mapping[str, object]) -> str:
    found = _known(name, known) if name else None
    if found is None:
        raise ValueError(unknown(kind, name, listed))
    return found


def _check_name(kind: str, name: str, known: Mapping[str, object]) -> None:
    if name not in known:
        raise ValueError(unknown(kind, name, known))


def _check_options(owner: str, options: Options, kinds: Mapping[str, Kind]) -> None:
    for name, value in options.items():
        if not kinds:
            raise ValueError(f"{owner} takes no options, got {name!r}")
        _check_name(f"option of {owner}", name, kinds)
        kind = kinds[name]
        if kind is bool:
            fits, wanted = isinstance(value, bool), "true or false"
        else:
            # type() and not isinstance(): True is an instance of int.
            fits = type(value) in (int, kind) and 0 < value < math.inf
            wanted = f"a positive {kind.__name__}"
        if not fits:
            raise ValueError(f"{owner}:{name} must be {wanted}, got {value!r}")


# Settings of a pair beyond the defaults of its halves: of communication, of the optimizer.
_PAIRS: Mapping[tuple[str, str], tuple[Options, Options]] = {
    # Entries compete for being among the largest, which is fair only in units of √v.
    ("topk", "compressed_adam"): ({"value_bits": 1}, {"scaled": True}),
}

"""What can be compared: pairs of *what crosses the wire* and *which optimizer uses what arrives*.

Neither half can be judged alone. Top-k with error feedback works under SGD and ruins Adam, whose
second moment turns rare pulses into tiny steps; the same top-k of what Adam makes of each rank's
gradient is among the best. So a method is a pair, written ::

    <crossing>[:option=value...][+<optimizer>[:option=value...]]

for instance ``all_reduce``, ``powersgd:rank=2`` or ``sign+local_variance_adam``. The
optimizer is ``adamw`` unless named, and an optimizer named alone (``safl``) crosses in the way that
it was published with. Underscores do not matter: ``fetchsgd`` is ``fetch_sgd``.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.lab.crossings import (
    CROSSINGS,
    Options,
    build_exchange,
    stats_traffic,
)
from benchmarks.lab.model import GPT
from benchmarks.lab.optimizers import OPTIMIZERS, Kind, Named, Trainer
from benchmarks.lab.runs import BASELINE, CONTROL, Settings
from comm_hooks import Exchange, Identity, skip_hook
from comm_hooks.collectives import Simulated, Transport
from comm_hooks.config import COMPRESSORS, unknown


@dataclass(frozen=True)
class Method:
    """A parsed and checked method: the pair, with the options of each half."""

    spec: str
    crossing: str
    crossing_options: Options
    optimizer: str
    optimizer_options: Options

    @property
    def note(self) -> str:
        """One line on what the figures alone do not tell."""
        if self.crossing in COMPRESSORS:
            exchange = build_exchange(self.crossing, self.crossing_options, seed=0)
            crossing = f"{exchange.compressor}, {exchange.memory or 'no error feedback'}"
        else:
            crossing = CROSSINGS[self.crossing].note
        entry = OPTIMIZERS[self.optimizer]
        if entry.makes_exchange:
            return entry.note
        return f"{crossing}; {entry.note}" if entry.note else crossing

    def check(self, settings: Settings) -> None:
        """Raise ``ValueError`` if the method cannot train with these settings."""
        entry = OPTIMIZERS[self.optimizer]
        exchange = (
            build_exchange(self.crossing, self.crossing_options, 0) if entry.crossing else None
        )
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
        entry.build(named, exchange, settings, self.optimizer_options)

    @property
    def exchanges_itself(self) -> bool:
        """Whether the optimizer owns the exchange; otherwise gradients are averaged before."""
        return OPTIMIZERS[self.optimizer].exchanges

    @property
    def needs_ddp(self) -> bool:
        """Whether gradients cross by a hook that only DDP can run."""
        return self.crossing not in (*COMPRESSORS, BASELINE, CONTROL)

    def attach(
        self, named: Named, settings: Settings, transport: Transport
    ) -> tuple[Any, Exchange]:
        """Return the optimizer and the exchange, without DDP: for ranks of any transport.

        Unless the optimizer :attr:`exchanges_itself`, whoever trains averages gradients with the
        exchange, which for ``all_reduce`` and ``none`` sends what it is given.

        Args:
            named: the model's parameters.
            settings: what the method shares with the others.
            transport: what connects the ranks.

        Raises:
            ValueError: for what crosses by a hook that only DDP can run.
        """
        entry = OPTIMIZERS[self.optimizer]
        if entry.makes_exchange:
            optimizer = entry.build(named, transport, settings, self.optimizer_options)
            return optimizer, optimizer.exchange
        if self.crossing in COMPRESSORS:
            exchange = build_exchange(
                self.crossing, self.crossing_options, settings.seed, transport=transport
            )
        elif self.needs_ddp:
            raise ValueError(f"method {self.spec!r}: {self.crossing} needs DDP")
        else:
            exchange = Exchange(Identity(), transport=transport)
        own = exchange if entry.crossing else None
        return entry.build(named, own, settings, self.optimizer_options), exchange

    def connect(self, model: nn.Module, settings: Settings, **ddp_arguments: Any) -> Trainer:
        """Wrap ``model`` for training with this method. Collective: every rank must call it.

        Args:
            model: what to train.
            settings: what the method shares with the others.
            ddp_arguments: for ``DistributedDataParallel``, in place of the method's own.
        """
        crossing, entry = CROSSINGS[self.crossing], OPTIMIZERS[self.optimizer]
        ddp = DistributedDataParallel(model, **{**crossing.ddp_arguments, **ddp_arguments})
        named = list(model.named_parameters())
        if not self.exchanges_itself:
            traffic = crossing.connect(ddp, self.crossing_options, settings.seed)
            return Trainer(ddp, entry.build(named, None, settings, self.optimizer_options), traffic)
        ddp.register_comm_hook(None, skip_hook)
        if entry.makes_exchange:
            optimizer = entry.build(named, None, settings, self.optimizer_options)
            return Trainer(ddp, optimizer, stats_traffic(optimizer.exchange.stats))
        exchange = build_exchange(self.crossing, self.crossing_options, settings.seed)
        optimizer = entry.build(named, exchange, settings, self.optimizer_options)
        return Trainer(ddp, optimizer, stats_traffic(exchange.stats))


def parse_methods(specs: str) -> list[Method]:
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


def parse_method(spec: str) -> Method:
    """Parse one method; see :func:`parse_methods`."""
    # A "+" before a name joins the halves; one inside a number (1e+3) does not.
    first, *rest = re.split(r"\+(?=[A-Za-z_])", spec)
    if len(rest) > 1:
        raise ValueError(f"method {spec!r}: at most one optimizer may follow the '+'")
    crossing, given = _parse_half(first)
    optimizer, optimizer_given = _parse_half(rest[0]) if rest else ("adamw", {})
    if not rest and _known(crossing, CROSSINGS) is None and _known(crossing, OPTIMIZERS):
        optimizer, optimizer_given, given = crossing, given, {}
        alone = OPTIMIZERS[_known(optimizer, OPTIMIZERS) or ""]
        crossing = alone.crossing or (CONTROL if alone.makes_exchange else BASELINE)
    crossing = _find("method", crossing, CROSSINGS, {**CROSSINGS, **OPTIMIZERS})
    optimizer = _find("optimizer", optimizer, OPTIMIZERS, OPTIMIZERS)
    entry = OPTIMIZERS[optimizer]
    if entry.makes_exchange and rest:
        raise ValueError(
            f"method {spec!r}: {optimizer} chooses how it exchanges: name it without a '+'"
        )
    if entry.crossing and crossing not in COMPRESSORS:
        raise ValueError(
            f"method {spec!r}: {optimizer} exchanges by itself and needs a compressor before the "
            f"'+': {', '.join(COMPRESSORS)}"
        )
    pair_crossing, pair_optimizer = _PAIRS.get((crossing, optimizer), ({}, {}))
    own = entry.crossing_options if crossing == entry.crossing else {}
    needed = {**entry.needs, **own, **pair_crossing}
    options = {**CROSSINGS[crossing].defaults, **needed, **given}
    if crossing in COMPRESSORS:
        build_exchange(crossing, options, seed=0)  # raises ValueError in the core's own words
    else:
        _check_options(crossing, options, dict.fromkeys(CROSSINGS[crossing].defaults, int))
    optimizer_options = {**pair_optimizer, **optimizer_given}
    _check_options(optimizer, optimizer_options, entry.options)
    return Method(spec, crossing, options, optimizer, optimizer_options)


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


# What a pair needs beyond the defaults of its halves: (crossing options, optimizer options).
_PAIRS: Mapping[tuple[str, str], tuple[Options, Options]] = {
    # Entries compete for being among the largest, which is fair only in units of √v.
    ("topk", "compressed_adam"): ({"value_bits": 1}, {"scaled": True}),
}

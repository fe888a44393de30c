"""The methods that ``advise`` compares: their notation, payloads and measured arithmetic.

A method is written ``compressor[:option=value...][+optimizer[:option=value...]]``, such as
``quantize:bits=2``, ``sign+local_variance_adam`` or ``low_communication:bits=0.12``.  Without an
optimizer a DDP hook averages the gradients for AdamW; an optimizer without a compressor uses the
exchange that it was published with.
"""

import math
import re
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from comm_hooks import Exchange, ExchangeSettings
from comm_hooks.config import COMPRESSORS, check_options, parse_spec, unknown
from comm_hooks.launchers.advise.cost_model import (
    Plan,
    Round,
    all_reduce,
    matrix_shapes,
    ready_shares,
)
from comm_hooks.launchers.advise.echo import Echo
from comm_hooks.optim.registry import OPTIMIZERS, Defaults, lookup

PLAIN = ("all_reduce", "none")
"""The methods without a compressor."""

_MOST_ELEMENTS = 1 << 22
"""The longest vector that is measured; bytes and times of longer ones are scaled up."""
_FIRST_BUCKET, _BUCKET = 1 << 20, 25 << 20  # bytes, the defaults of DDP
_REPEAT = 3
_MIN_STEPS = 4
_SHORT_RUN = Defaults(steps=2 * _MIN_STEPS, warmup=1)
"""The training for which optimizers are built: warm-ups end before steps are measured."""


@dataclass(frozen=True)
class Method:
    """A method: a compressor or an exchange without one, an optimizer, and their options.

    Attributes:
        spec: the text of the method, such as ``"quantize:bits=2"``.
        compressor: its name, or one of :data:`PLAIN`; empty for the optimizer's own exchange.
        options: the options of the compressor and of the exchange.
        optimizer: the optimizer's name; empty for AdamW after a DDP hook.
        optimizer_options: the keyword arguments of the optimizer.
    """

    spec: str
    compressor: str
    options: Mapping[str, Any]
    optimizer: str
    optimizer_options: Mapping[str, Any]

    @property
    def parts(self) -> tuple[Any, ...]:
        """All attributes but ``spec``, to find equal methods that are written differently."""
        return self.compressor, self.options, self.optimizer, self.optimizer_options

    def check(self) -> None:
        """Raise ``ValueError`` for an unknown name or option, with the nearest known one."""
        if self.compressor in PLAIN:
            check_options(self.compressor, self.options, ())
        elif self.compressor or not self.optimizer:
            self.settings()
        if not self.optimizer:
            return
        entry = lookup(self.optimizer)
        if entry is None:
            raise ValueError(unknown("method", self.optimizer, [*PLAIN, *COMPRESSORS, *OPTIMIZERS]))
        if (entry.averages != "exchange") if self.compressor else (entry.averages == "before"):
            wanted = "no compressor" if entry.averages == "own" else "gradients averaged by a hook"
            raise ValueError(f"method {self.spec!r}: {entry.name} takes {wanted}")
        if self.compressor in PLAIN:
            raise ValueError(
                f"method {self.spec!r}: {entry.name} needs a compressor before the '+'"
            )
        entry.check(self.optimizer_options)

    def settings(self) -> ExchangeSettings:
        """Return the settings of the method's exchange."""
        entry = lookup(self.optimizer)
        if self.compressor:
            needs = entry.needs if entry else {}
            return ExchangeSettings.of(self.compressor, **{**needs, **self.options})
        assert entry
        assert entry.published
        return ExchangeSettings.from_dict(entry.published)

    def build(self, named: list[tuple[str, nn.Parameter]], transport: Echo) -> Optimizer:
        """Return a new instance of the method's optimizer; the method must have one."""
        entry = OPTIMIZERS[self.optimizer]
        options = dict(self.optimizer_options)
        if entry.averages == "exchange":
            exchange = Exchange(self.settings(), transport=transport)
            return entry.build(named, exchange, defaults=_SHORT_RUN, **options)
        options = {"total_steps": None, **options, "transport": transport}
        return entry.build(named, defaults=_SHORT_RUN, **options)


def parse_methods(specs: str) -> list[Method]:
    """Return the methods in a text with commas between them.

    Raises:
        ValueError: for an unknown name, option or value, and for a method that is named twice.
    """
    methods: list[Method] = []
    for spec in map(str.strip, specs.split(",")):
        if not spec:
            raise ValueError(f"a method is missing in {specs!r}: write names with commas between")
        method = parse_method(spec)
        method.check()
        if any(method.parts == other.parts for other in methods):
            raise ValueError(f"method {method.spec!r} is named twice")
        methods.append(method)
    return methods


def parse_method(spec: str) -> Method:
    """Return the method of a text; its names and options are not checked.

    Raises:
        ValueError: if it is not written as ``name:option=value+name:option=value``.
    """
    # A "+" before a name joins two parts; a "+" inside a number (1e+3) does not.
    first, *others = re.split(r"\+(?=[A-Za-z_])", spec)
    if len(others) > 1:
        raise ValueError(f"method {spec!r}: at most one optimizer may follow the '+'")
    name, options = parse_spec(first, "method")
    if name in PLAIN or name in COMPRESSORS or others:
        optimizer, own = parse_spec(others[0], "method") if others else ("", {})
    else:
        name, options, optimizer, own = "", {}, name, options
    if "bits" in own:
        own["bits_per_parameter"] = own.pop("bits")
    entry = lookup(optimizer)
    return Method(spec, name, options, entry.name if entry else optimizer, own)


class Planner:
    """Finds the bytes and measures the arithmetic of methods, for one model, ranks and device.

    Args:
        shapes: the shapes of the parameters.
        ranks: the number of ranks.
        device: the device on which the arithmetic is measured.
        element_bytes: the bytes of an element of a gradient.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, ...]],
        ranks: int,
        device: torch.device,
        element_bytes: int = 4,
    ) -> None:
        self._sizes = [element_bytes * math.prod(shape) for shape in shapes]
        numel = sum(self._sizes) // element_bytes
        part = shapes if numel <= _MOST_ELEMENTS else matrix_shapes(_MOST_ELEMENTS)
        self._factor = max(1.0, numel / _MOST_ELEMENTS)
        self._echo = Echo(ranks, device)
        generator = torch.Generator().manual_seed(0)
        self._gradients = {
            str(index): torch.randn(shape, generator=generator).to(device)
            for index, shape in enumerate(part)
        }

    def plan(self, method: Method) -> Plan:
        """Return the exchanges of a method, with the seconds of its arithmetic on this device.

        Raises:
            ValueError: for values that the method refuses for this model.
        """
        try:
            return self._plan(method)
        except ValueError as error:
            raise ValueError(f"method {method.spec!r}: {error}") from None

    def _plan(self, method: Method) -> Plan:
        if method.optimizer:
            return self._optimizer_plan(lambda named: method.build(named, self._echo))
        if method.compressor == "none":
            return Plan()
        ends = [end for _, end in ready_shares(self._sizes, _FIRST_BUCKET, _BUCKET)]
        if method.compressor == "all_reduce":
            whole = Round((all_reduce(sum(self._sizes), self._echo.world_size),))
        else:
            whole = self._measure_round(method.settings())
            if COMPRESSORS[method.compressor].granularity == "bucket":
                ends = [1.0]  # a sketch compresses all gradients as one vector
        shares = zip([0.0, *ends], ends, strict=False)
        return Plan(tuple(whole.scaled(end - start, ready=end) for start, end in shares))

    def adamw_seconds(self) -> float:
        """Return the seconds of a step of AdamW, which stands for the user's optimizer."""
        plan = self._optimizer_plan(
            lambda named: AdamW([parameter for _, parameter in named], fused=True)
        )
        return plan.optimizer or 0.0

    def _measure_round(self, settings: ExchangeSettings) -> Round:
        """Return the exchange of all gradients with the median time of several measurements."""
        exchange = Exchange(settings, transport=self._echo)
        rounds = []
        for _ in range(1 + _REPEAT):  # the first one allocates memory
            tensors = {name: gradient.clone() for name, gradient in self._gradients.items()}
            self._echo.start_noting()
            exchange.average_(tensors)
            rounds.append(self._echo.stop())
        rounds = sorted(rounds[1:], key=lambda each: each.encode + each.decode)
        return rounds[_REPEAT // 2].scaled(self._factor)

    def _optimizer_plan(self, build: Callable[[list[tuple[str, nn.Parameter]]], Optimizer]) -> Plan:
        """Return the messages and the time of an optimizer per step, measured after its warm-up."""
        named = [(n, nn.Parameter(torch.zeros_like(g))) for n, g in self._gradients.items()]
        with warnings.catch_warnings():
            # They are about real trainings: their length, and ranks with other payloads.
            warnings.filterwarnings("ignore", message="low_communication: with")
            warnings.filterwarnings("ignore", message="round .*: left out")
            optimizer = build(named)
            period = getattr(optimizer, "local_steps", 1)
            steps = period * math.ceil(_MIN_STEPS / period)
            rounds = []
            for _ in range(max(_MIN_STEPS, period) + steps):
                for name, parameter in named:
                    parameter.grad = self._gradients[name].clone()
                self._echo.start_noting()
                optimizer.step()
                rounds.append(self._echo.stop())
        rounds = rounds[-steps:]
        # Steps with an exchange and steps without differ; of each kind the median counts.
        seconds = 0.0
        for exchanges in (True, False):
            kind = [r.encode + r.decode for r in rounds if bool(r.collectives) == exchanges]
            seconds += len(kind) * statistics.median(kind) if kind else 0.0
        collectives = Round(tuple(c for each in rounds for c in each.collectives))
        return Plan(
            optimizer_rounds=(collectives.scaled(self._factor),) if collectives.traffic else (),
            steps=steps,
            optimizer=self._factor * seconds / steps,
        )

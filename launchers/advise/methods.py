"""The methods that can be compared: how they are written, their payloads and their arithmetic.

A method is written ``compressor[:option=value...][+optimizer[:option=value...]]``, such as
``quantize:bits=2``, ``sign+local_variance_adam`` or ``low_communication:bits=0.12``.  Without an
optimizer a DDP hook averages the gradients for AdamW; an optimizer without a compressor uses the
exchange that it was published with.
"""

import inspect
import math
import re
import statistics
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from comm_hooks import Exchange, ExchangeSettings
from comm_hooks.config import COMPRESSORS, unknown
from comm_hooks.launchers.advise.cost_model import Plan, Round, all_reduce, ready_shares
from comm_hooks.launchers.advise.echo import Echo
from comm_hooks.launchers.advise.step import Step
from comm_hooks.optim import LocalVarianceAdam, OneBitAdam, low_communication

PLAIN: Mapping[str, tuple[str, ...]] = {
    "all_reduce": (),
    "none": (),
    "bf16": (),
    "powersgd": ("rank",),
}
"""PyTorch's own, and their options: predicted from their bytes alone."""

OPTIMIZERS: Mapping[str, Callable[..., Any]] = {
    "local_variance_adam": LocalVarianceAdam,
    "low_communication": low_communication,
    "one_bit_adam": OneBitAdam,
}
_SHORT = {"bits": "bits_per_parameter"}
"""Options of optimizers that are also written shorter."""

_MOST_ELEMENTS = 1 << 22
"""Of a longer vector a part is measured; its bytes and times are scaled up."""
_FIRST_BUCKET, _BUCKET = 1 << 20, 25 << 20  # bytes, the defaults of DDP
_REPEAT = 3
_MIN_STEPS = 4
_POWERSGD_RANK = 4


@dataclass(frozen=True)
class Method:
    """A method, split into its parts.

    Attributes:
        spec: the method as it is written.
        compressor: its name, or one of :data:`PLAIN`; empty for the optimizer's own exchange.
        options: of the compressor and of the exchange.
        optimizer: its name; empty for AdamW after a DDP hook.
        optimizer_options: its keyword arguments.
    """

    spec: str
    compressor: str
    options: Mapping[str, Any]
    optimizer: str
    optimizer_options: Mapping[str, Any]

    @property
    def parts(self) -> tuple[Any, ...]:
        """All but the text, to compare methods that are written differently."""
        return self.compressor, self.options, self.optimizer, self.optimizer_options

    def check(self) -> None:
        """Raise ``ValueError`` for an unknown name or option, with the nearest known one."""
        if self.compressor in PLAIN:
            _check_options(self.compressor, self.options, PLAIN[self.compressor])
            if self.optimizer:
                raise ValueError(
                    f"method {self.spec!r}: {self.optimizer} needs a compressor before the '+', "
                    f"one of {', '.join(COMPRESSORS)}"
                )
        elif self.compressor:
            self.settings()
        if self.optimizer and self.optimizer not in OPTIMIZERS:
            raise ValueError(unknown("method", self.optimizer, [*PLAIN, *COMPRESSORS, *OPTIMIZERS]))
        if self.optimizer:
            keywords = list(inspect.signature(OPTIMIZERS[self.optimizer]).parameters)[1:]
            _check_options(self.optimizer, self.optimizer_options, keywords)
        if self.compressor and self.optimizer == "low_communication":
            raise ValueError(f"method {self.spec!r}: low_communication chooses its own compressor")

    def settings(self) -> ExchangeSettings:
        """Return the settings of the exchange, for a method with a compressor."""
        return ExchangeSettings.of(self.compressor, **self.options)

    def build(self, named: list[tuple[str, nn.Parameter]], transport: Echo) -> Optimizer:
        """Return the optimizer of a method that has one."""
        make = OPTIMIZERS[self.optimizer]
        options = dict(self.optimizer_options)
        if make is low_communication:
            return make(named, lr=1e-3, transport=transport, **options)
        if "freeze_step" in inspect.signature(make).parameters:
            options.setdefault("freeze_step", 1)
        published: Mapping[str, Any] = make.published  # type: ignore[attr-defined]
        settings = self.settings() if self.compressor else ExchangeSettings.from_dict(published)
        return make(named, Exchange(settings, transport=transport), lr=1e-3, **options)


def parse_methods(specs: str) -> list[Method]:
    """Return the methods of a list separated by commas.

    Raises:
        ValueError: for an unknown name, option or value, and for a method that is named twice.
    """
    methods: list[Method] = []
    for spec in specs.split(","):
        method = parse_method(spec.strip())
        method.check()
        if any(method.parts == other.parts for other in methods):
            raise ValueError(f"method {method.spec!r} is named twice")
        methods.append(method)
    return methods


def parse_method(spec: str) -> Method:
    """Split a method into its parts; the names may be unknown.

    Raises:
        ValueError: if it is not written as ``name:option=value+name:option=value``.

    Example::

        >>> parse_method("topk:density=1/64").options
        {'density': 0.015625}
        >>> parse_method("low_communication:bits=0.12").optimizer_options
        {'bits_per_parameter': 0.12}
    """
    # A "+" before a name joins two parts; a "+" inside a number (1e+3) does not.
    first, *others = re.split(r"\+(?=[A-Za-z_])", spec)
    if len(others) > 1:
        raise ValueError(f"method {spec!r}: at most one optimizer may follow the '+'")
    name, options = _split_options(first)
    if name not in PLAIN and name not in COMPRESSORS and not others:
        return Method(spec, "", {}, name, _long(options))
    optimizer, own = _split_options(others[0]) if others else ("", {})
    return Method(spec, name, options, optimizer, _long(own))


class Planner:
    """Makes the plan of each method for one model, number of ranks and device.

    Args:
        step: the model.
        ranks: N.
        device: on which the arithmetic is measured.
        ranks_per_node: of a hierarchical exchange.

    Example::

        >>> planner = Planner(Step.of_numel(1 << 20, 100.0), 2, torch.device("cpu"))
        >>> planner.plan(parse_method("all_reduce")).traffic
        4194304.0
    """

    def __init__(
        self, step: Step, ranks: int, device: torch.device, ranks_per_node: int = 1
    ) -> None:
        self._step = step
        part = step
        if step.numel > _MOST_ELEMENTS:
            part = Step.of_numel(_MOST_ELEMENTS, step.milliseconds, step.dtype)
        self._factor = step.numel / part.numel
        self._echo = Echo(ranks, device, ranks_per_node)
        generator = torch.Generator().manual_seed(0)
        self._gradients = {
            str(index): torch.randn(shape, generator=generator).to(device)
            for index, shape in enumerate(part.shapes)
        }

    def plan(self, method: Method) -> Plan:
        """Return the bytes of a method, and the seconds of its arithmetic on this device.

        Raises:
            ValueError: for values that the method refuses for this model.
        """
        if method.optimizer:
            return self._optimizer_plan(lambda named: method.build(named, self._echo))
        if method.compressor == "none":
            return Plan()
        one_bucket = method.compressor == "powersgd"
        if method.compressor in COMPRESSORS:
            whole = self._measure_round(method.settings())
            # A sketch compresses all gradients as one vector.
            one_bucket = COMPRESSORS[method.compressor].granularity == "bucket"
        else:
            whole = self._plain_round(method)
        sizes = [math.prod(shape) * self._step.element_bytes for shape in self._step.shapes]
        ends = [end for _, end in ready_shares(sizes, _FIRST_BUCKET, _BUCKET)]
        ends = [1.0] if one_bucket else ends
        shares = zip([0.0, *ends], ends, strict=False)
        return Plan(tuple(whole.scaled(end - start, ready=end) for start, end in shares))

    def adamw_seconds(self) -> float:
        """Return the seconds of a step of AdamW, which stands for the user's optimizer."""
        plan = self._optimizer_plan(
            lambda named: AdamW([parameter for _, parameter in named], fused=True)
        )
        return plan.optimizer or 0.0

    def _plain_round(self, method: Method) -> Round:
        ranks, numel = self._echo.world_size, self._step.numel
        if method.compressor == "powersgd":
            numels = _powersgd_numels(self._step, method.options.get("rank", _POWERSGD_RANK))
            return Round(tuple(all_reduce(4 * numel, ranks) for numel in numels if numel))
        element_bytes = 2 if method.compressor == "bf16" else self._step.element_bytes
        return Round((all_reduce(numel * element_bytes, ranks),))

    def _measure_round(self, settings: ExchangeSettings) -> Round:
        """Return the exchange of all gradients: the median of several."""
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
        """Return whole periods of an optimizer, after its warm-up."""
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


def _powersgd_numels(step: Step, rank: int) -> tuple[int, int, int]:
    """Return the elements of the three all-reduces of PyTorch's ``powerSGD_hook``.

    Parameters that two factors would not halve are sent as they are; then P, then Q.
    """
    uncompressed = left = right = 0
    for shape in step.shapes:
        numel = math.prod(shape)
        rows = shape[0] if shape else 1
        columns = numel // max(1, rows)
        if len(shape) < 2 or 2 * (rows + columns) * rank >= numel:
            uncompressed += numel
        else:
            left += rows * min(rank, rows, columns)
            right += columns * min(rank, rows, columns)
    return uncompressed, left, right


def _split_options(text: str) -> tuple[str, dict[str, Any]]:
    name, *settings = text.split(":")
    options: dict[str, Any] = {}
    for setting in settings:
        key, equals, value = setting.partition("=")
        if not (key and equals and value):
            raise ValueError(f"method {text!r}: options are written {name}:option=value")
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


def _long(options: Mapping[str, Any]) -> dict[str, Any]:
    return {_SHORT.get(name, name): value for name, value in options.items()}


def _check_options(owner: str, options: Mapping[str, Any], known: Mapping[str, Any] | Any) -> None:
    for name in options:
        if name not in known:
            raise ValueError(unknown(f"option of {owner}", name, known))

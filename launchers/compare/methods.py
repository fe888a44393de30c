"""What can be compared: pairs of *what crosses the wire* and *which optimizer uses what arrives*.

Neither half can be judged alone. Top-k with error feedback works under SGD and ruins Adam, whose
second moment turns rare pulses into tiny steps; the same top-k of the momentum, with the second
moment frozen, is among the best. So a method is a pair, written ::

    <crossing>[:option=value...][+<optimizer>[:option=value...]]

for instance ``all_reduce``, ``powersgd:rank=2`` or ``topk:density=1/64+compressed_adam``. The
optimizer is ``adamw`` unless named.

To add a method, add one entry: to ``_CROSSINGS`` for a way to exchange gradients, to
``_OPTIMIZERS`` for an optimizer, to ``_PAIRS`` for what only a certain pair needs. The compressors
of :data:`comm_hooks.config.COMPRESSORS` are crossings already; their options are their own and
those of :func:`comm_hooks.register`, such as ``collective=sharded`` or ``memory=none``.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer

from comm_hooks import Exchange, register, skip_hook
from comm_hooks.config import COMPRESSORS, build_compressor, build_memory, unknown
from comm_hooks.launchers.compare.runs import Settings
from comm_hooks.optim import CompressedAdam

DEFAULT_METHODS = (
    "all_reduce,none,bf16,powersgd,count_sketch,topk+compressed_adam,sign+compressed_adam,topk"
)
# Fewer, and with more of the values: the few steps of a quick run leave little time to catch up.
QUICK_METHODS = (
    "all_reduce,none,powersgd,sign+compressed_adam,topk:density=1/16+compressed_adam,topk"
)

Options = dict[str, Any]
Kind = type[bool] | type[int] | type[float] | tuple[str, ...]
"""What an option's value may be: a truth value, a positive number, or one of some words."""
Traffic = Callable[[int], tuple[int, int]]
"""Bytes this rank has (sent, received) in its first ``step`` steps, asked after that step."""


class Trainer(NamedTuple):
    """A model ready to train: what a step needs, and what tells the bytes it moved."""

    ddp: DistributedDataParallel
    optimizer: Optimizer
    traffic: Traffic


@dataclass(frozen=True)
class _Crossing:
    """One way for gradients to cross between ranks, as a DDP hook."""

    connect: Callable[[DistributedDataParallel, Options, int], Traffic]
    """Registers the hook, given its options and a seed."""
    defaults: Mapping[str, int] = field(default_factory=dict)
    note: str = ""
    ddp_arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Optimizer:
    """One optimizer, and how it gets at the gradients of other ranks."""

    connect: Callable[["Method", DistributedDataParallel, Settings], tuple[Optimizer, Traffic]]
    options: Mapping[str, Kind]
    note: str = ""
    compresses: bool = False  # it exchanges by itself, so the crossing must be a compressor


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
            exchange = _build_exchange(self.crossing, self.crossing_options, seed=0)
            memory = "with error feedback" if exchange.memory else "no error feedback"
            crossing = f"{exchange.compressor}, {memory}"
        else:
            crossing = _CROSSINGS[self.crossing].note
        optimizer = _OPTIMIZERS[self.optimizer].note
        return f"{crossing}; {optimizer}" if optimizer else crossing

    def connect(self, model: nn.Module, settings: Settings) -> Trainer:
        """Wrap ``model`` for training with this method. Collective: every rank must call it."""
        ddp = DistributedDataParallel(model, **_CROSSINGS[self.crossing].ddp_arguments)
        optimizer, traffic = _OPTIMIZERS[self.optimizer].connect(self, ddp, settings)
        return Trainer(ddp, optimizer, traffic)


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
    _check_name("method", crossing, _CROSSINGS)
    _check_name("optimizer", optimizer, _OPTIMIZERS)
    if _OPTIMIZERS[optimizer].compresses and crossing not in COMPRESSORS:
        raise ValueError(
            f"method {spec!r}: {optimizer} exchanges its momentum by itself and needs a "
            f"compressor before the '+': {', '.join(COMPRESSORS)}"
        )
    pair_crossing, pair_optimizer = _PAIRS.get((crossing, optimizer), ({}, {}))
    options = {**_CROSSINGS[crossing].defaults, **pair_crossing, **given}
    if crossing in COMPRESSORS:
        _build_exchange(crossing, options, seed=0)  # raises ValueError in the core's own words
    else:
        _check_options(crossing, options, dict.fromkeys(_CROSSINGS[crossing].defaults, int))
    optimizer_options = {**pair_optimizer, **optimizer_given}
    _check_options(optimizer, optimizer_options, _OPTIMIZERS[optimizer].options)
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


def _check_name(kind: str, name: str, known: Mapping[str, object]) -> None:
    if name not in known:
        raise ValueError(unknown(kind, name, known))


def _check_options(owner: str, options: Options, kinds: Mapping[str, Kind]) -> None:
    for name, value in options.items():
        if not kinds:
            raise ValueError(f"{owner} takes no options, got {name!r}")
        _check_name(f"option of {owner}", name, kinds)
        kind = kinds[name]
        if isinstance(kind, tuple):
            fits, wanted = value in kind, f"one of {', '.join(kind)}"
        elif kind is bool:
            fits, wanted = isinstance(value, bool), "true or false"
        else:
            # type() and not isinstance(): True is an instance of int.
            fits = type(value) in (int, kind) and 0 < value < math.inf
            wanted = f"a positive {kind.__name__}"
        if not fits:
            raise ValueError(f"{owner}:{name} must be {wanted}, got {value!r}")


# --- crossings -------------------------------------------------------------------------------


def _ring_bytes(payload: float) -> int:
    """Bytes one rank sends, and receives, in a ring all-reduce of ``payload`` bytes."""
    world = dist.get_world_size()
    return round(2 * (world - 1) / world * payload)


def _numel(ddp: DistributedDataParallel) -> int:
    return sum(parameter.numel() for parameter in ddp.parameters())


def _connect_all_reduce(ddp: DistributedDataParallel, options: Options, seed: int) -> Traffic:
    per_step = _ring_bytes(4 * _numel(ddp))
    return lambda step: (step * per_step, step * per_step)


def _connect_none(ddp: DistributedDataParallel, options: Options, seed: int) -> Traffic:
    ddp.register_comm_hook(None, skip_hook)
    return lambda step: (0, 0)


def _bf16_hook(
    group: dist.ProcessGroup,
    bucket: dist.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    # DDP refuses bf16_compress_hook without CUDA, and knows it by its name; gloo can do it.
    return bf16_compress_hook(group, bucket)


def _connect_bf16(ddp: DistributedDataParallel, options: Options, seed: int) -> Traffic:
    ddp.register_comm_hook(ddp.process_group, _bf16_hook)
    per_step = _ring_bytes(2 * _numel(ddp))
    return lambda step: (step * per_step, step * per_step)


def _connect_powersgd(ddp: DistributedDataParallel, options: Options, seed: int) -> Traffic:
    state = powersgd.PowerSGDState(
        process_group=None,
        matrix_approximation_rank=options["rank"],
        start_powerSGD_iter=2,  # the least that error feedback and warm start allow
        use_error_feedback=True,
        warm_start=True,
        random_seed=seed,
    )
    ddp.register_comm_hook(state, powersgd.powerSGD_hook)
    numel = _numel(ddp)

    def traffic(step: int) -> tuple[int, int]:
        # The statistics leave out the first steps, which go uncompressed.
        _, _, compressed = state.compression_stats()
        uncompressed = min(step, state.start_powerSGD_iter) * numel
        total = _ring_bytes(4 * (uncompressed + compressed))
        return total, total

    return traffic


def _stats_traffic(stats: Callable[[], Mapping[str, Any]]) -> Traffic:
    def traffic(step: int) -> tuple[int, int]:
        totals = stats()
        return totals["bytes_sent"], totals["bytes_received"]

    return traffic


# More than any model here has, so that DDP never makes a second bucket.
_ONE_BUCKET = {"bucket_cap_mb": 1 << 20}
# With granularity=bucket these then sketch the whole gradient at once, as SAFL does.
_SKETCHES = ("count_sketch", "srht", "gaussian_sketch")
_EXCHANGE_OPTIONS = frozenset({"memory", "collective", "min_numel", "granularity"})


def _build_exchange(name: str, options: Options, seed: int) -> Exchange:
    """Return the exchange that :func:`comm_hooks.register` would make of these options."""
    own = {key: value for key, value in options.items() if key in _EXCHANGE_OPTIONS}
    rest = {key: value for key, value in options.items() if key not in _EXCHANGE_OPTIONS}
    compressor = build_compressor(name, **rest)
    memory = build_memory(own.pop("memory", "auto"), compressor)
    return Exchange(compressor, memory, seed=seed, **own)


def _compressor_crossing(name: str) -> _Crossing:
    def connect(ddp: DistributedDataParallel, options: Options, seed: int) -> Traffic:
        return _stats_traffic(register(ddp, name, seed=seed, **options).stats)

    return _Crossing(connect, ddp_arguments=_ONE_BUCKET if name in _SKETCHES else {})


_CROSSINGS: Mapping[str, _Crossing] = {
    "all_reduce": _Crossing(_connect_all_reduce, note="fp32; what the others are measured by"),
    "none": _Crossing(_connect_none, note="control: the ranks never exchange anything"),
    "bf16": _Crossing(_connect_bf16, note="PyTorch's bf16_compress_hook"),
    "powersgd": _Crossing(
        _connect_powersgd,
        defaults={"rank": 4},
        note="PyTorch's powerSGD_hook, in one bucket: with two or more it hangs on gloo",
        ddp_arguments=_ONE_BUCKET,
    ),
    **{name: _compressor_crossing(name) for name in COMPRESSORS},
}


# --- optimizers ------------------------------------------------------------------------------


def _connect_adamw(
    method: Method, ddp: DistributedDataParallel, settings: Settings
) -> tuple[Optimizer, Traffic]:
    crossing = _CROSSINGS[method.crossing]
    traffic = crossing.connect(ddp, method.crossing_options, settings.seed)
    optimizer = AdamW(
        ddp.parameters(),
        lr=method.optimizer_options.get("lr", settings.learning_rate),
        betas=settings.betas,
        weight_decay=settings.weight_decay,
        fused=True,  # a sixth of the step's time on a CPU
    )
    return optimizer, traffic


def _connect_compressed_adam(
    method: Method, ddp: DistributedDataParallel, settings: Settings
) -> tuple[Optimizer, Traffic]:
    ddp.register_comm_hook(None, skip_hook)
    exchange = _build_exchange(method.crossing, method.crossing_options, settings.seed)
    options = {"lr": settings.learning_rate, "freeze_step": settings.warmup}
    optimizer = CompressedAdam(
        ddp.named_parameters(),
        exchange=exchange,
        betas=settings.betas,
        weight_decay=settings.weight_decay,
        **{**options, **method.optimizer_options},
    )
    return optimizer, _stats_traffic(exchange.stats)


_OPTIMIZERS: Mapping[str, _Optimizer] = {
    "adamw": _Optimizer(_connect_adamw, options={"lr": float}),
    "compressed_adam": _Optimizer(
        _connect_compressed_adam,
        options={
            "lr": float,
            "freeze_step": int,
            "scaled": bool,
            "variance": ("tracked", "frozen"),
        },
        note="compresses the momentum, after a warm-up without compression",
        compresses=True,
    ),
}

# What a pair needs beyond the defaults of its halves: (crossing options, optimizer options).
_PAIRS: Mapping[tuple[str, str], tuple[Options, Options]] = {
    # Adam makes steps of signal over noise. One sketch of everything has the same noise everywhere,
    # above which layers of large gradients (embeddings) stand out; a sketch per layer gives each
    # layer noise in proportion, and every coordinate is as lost as the others.
    **{(name, "adamw"): ({"granularity": "bucket"}, {}) for name in _SKETCHES},
    # Entries compete for being among the largest, which is fair only in units of √v.
    ("topk", "compressed_adam"): ({"value_bits": 1}, {"scaled": True}),
}

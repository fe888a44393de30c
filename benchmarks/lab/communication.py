"""Communication methods: how gradients, or an optimizer's updates, are exchanged between ranks.

To add one, add an entry to :data:`COMMUNICATION`. Every compressor of
:data:`comm_hooks.config.COMPRESSORS` is one; its options are its own and those of the exchange,
such as ``collective=sharded`` or ``memory=none``.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from comm_hooks import CompressionState, Exchange, ExchangeSettings, compression_hook, skip_hook
from comm_hooks.collectives import Transport
from comm_hooks.config import COMPRESSORS

Options = dict[str, Any]
Traffic = Callable[[int], tuple[int, int]]
"""Bytes this rank has (sent, received) in its first ``step`` steps, asked after that step."""


@dataclass(frozen=True)
class Communication:
    """One way to exchange gradients, as a hook of DDP."""

    connect: Callable[[DistributedDataParallel, Options, int], Traffic]
    """Registers the hook, given its options and a seed."""
    defaults: Mapping[str, int] = field(default_factory=dict)
    note: str = ""
    ddp_arguments: Mapping[str, Any] = field(default_factory=dict)


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


def stats_traffic(stats: Callable[[], Mapping[str, Any]]) -> Traffic:
    def traffic(step: int) -> tuple[int, int]:
        totals = stats()
        return totals["bytes_sent"], totals["bytes_received"]

    return traffic


# More than any model here has, so that DDP never makes a second bucket.
_ONE_BUCKET = {"bucket_cap_mb": 1 << 20}


def build_exchange(
    name: str, options: Options, seed: int, transport: Transport | None = None
) -> Exchange:
    """Return the exchange with these settings, and options of the compressor among them.

    Raises:
        ValueError: for unknown options and values out of range.
    """
    settings = ExchangeSettings.of(name, seed=seed, **options)
    return Exchange(settings, transport=transport)


def _compressed(name: str) -> Communication:
    def connect(ddp: DistributedDataParallel, options: Options, seed: int) -> Traffic:
        exchange = build_exchange(name, options, seed)
        state = CompressionState(exchange, named_parameters=ddp.module.named_parameters())
        ddp.register_comm_hook(state, compression_hook)
        return stats_traffic(state.stats)

    # What is compressed as one vector then sees the whole gradient at once, as SAFL does.
    whole = COMPRESSORS[name].granularity == "bucket"
    return Communication(connect, ddp_arguments=_ONE_BUCKET if whole else {})


COMMUNICATION: Mapping[str, Communication] = {
    "all_reduce": Communication(_connect_all_reduce, note="fp32; the baseline of the others"),
    "none": Communication(_connect_none, note="control: the ranks never exchange anything"),
    "bf16": Communication(_connect_bf16, note="PyTorch's bf16_compress_hook"),
    "powersgd": Communication(
        _connect_powersgd,
        defaults={"rank": 4},
        note="PyTorch's powerSGD_hook, in one bucket: with two or more it hangs on gloo",
        ddp_arguments=_ONE_BUCKET,
    ),
    **{name: _compressed(name) for name in COMPRESSORS},
}

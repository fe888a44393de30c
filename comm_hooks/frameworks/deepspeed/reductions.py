"""Let a DeepSpeed engine average gradients through an exchange instead of its own all-reduce.

DeepSpeed still scales the loss and accumulates before, and clips and steps after.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from comm_hooks.exchange import Exchange
from comm_hooks.exchange.routes.route import fill_nan_
from comm_hooks.exchange.sparse import average_sparse


def replace(engine: Any, exchange: Exchange, start_compression_step: int = 0) -> None:
    """Let an engine average its gradients through an exchange.

    Args:
        engine: an engine at ZeRO stage 0, 1 or 2.
        exchange: an exchange over the engine's data-parallel group.
        start_compression_step: the number of first steps with exact averages; see
            :class:`~comm_hooks.frameworks.deepspeed.settings.EngineSettings`.
    """
    begun = 0

    def compresses() -> bool:
        nonlocal begun
        taken: int = engine.global_steps - engine.skipped_steps
        if exchange.step == 0:
            # Earlier steps were another optimizer's: one that begins has a warm-up.
            begun = taken
        return taken - begun >= start_compression_step

    if hasattr(engine.optimizer, "gradient_reduction_w_predivide"):
        _replace_partitioned(engine, exchange, compresses)
    else:
        _replace_whole(engine, exchange, compresses)


def _replace_whole(engine: Any, exchange: Exchange, compresses: Callable[[], bool]) -> None:
    """Replace the averaging of ZeRO stage 0, BF16_Optimizer and pipelines, once per step."""

    @torch.no_grad()
    @exchange.failing_together()
    def reduce(grads: Sequence[Any], elements_per_buffer: int) -> None:
        # As DeepSpeed would send them, though it accumulates in float32.
        dtype = torch.bfloat16 if engine.communication_data_type == torch.bfloat16 else None
        averaged: list[torch.Tensor] = []
        for parameters, tensors in _buckets(_whole(engine, exchange, grads), elements_per_buffer):
            _average(engine, exchange, parameters, tensors, compresses(), dtype)
            averaged += tensors
        _end_step(exchange, averaged)

    engine._reduce_non_expert_gradients = reduce


def _whole(
    engine: Any, exchange: Exchange, grads: Sequence[Any]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (parameter, gradient) for dense gradients; average sparse gradients on the way."""
    flat_groups = getattr(engine.optimizer, "fp32_groups_gradients", None)
    if flat_groups is not None:
        # BF16_Optimizer passes one flat tensor per parameter group; these are views of it.
        for parameters, views in zip(engine.optimizer.bf16_groups, flat_groups, strict=True):
            yield from zip(parameters, views, strict=True)
        return
    parameters = [p for p in engine.module.parameters() if p.requires_grad and p.numel() > 0]
    for parameter, gradient in zip(parameters, grads, strict=True):
        if isinstance(gradient, torch.Tensor):
            yield parameter, gradient
        else:
            # DeepSpeed's wrapper of a sparse gradient, which it would put back like this.
            parameter.grad.data = average_sparse(exchange, parameter.grad.data).value()


def _buckets(
    items: Iterable[tuple[torch.Tensor, torch.Tensor]], limit: int
) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Yield buckets of one dtype, each closed by the tensor that exceeds ``limit`` elements."""
    open_: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    numels: Counter[torch.dtype] = Counter()
    for parameter, tensor in items:
        parameters, tensors = open_.setdefault(tensor.dtype, ([], []))
        parameters.append(parameter)
        tensors.append(tensor)
        numels[tensor.dtype] += tensor.numel()
        if numels[tensor.dtype] > limit:
            yield open_.pop(tensor.dtype)
            numels[tensor.dtype] = 0
    yield from open_.values()


def _replace_partitioned(engine: Any, exchange: Exchange, compresses: Callable[[], bool]) -> None:
    """Replace the averaging of ZeRO stages 1 and 2, bucket by bucket.

    With ``reduce_scatter`` off, ZeRO passes whole buckets to ``gradient_reduction_w_predivide`` and
    takes this rank's part out of the mean afterwards.
    """
    optimizer = engine.optimizer
    finish = optimizer.overlapping_partition_gradients_reduce_epilogue
    has_exchanged = False

    @torch.no_grad()
    @exchange.failing_together()
    def reduce(bucket: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        nonlocal has_exchanged
        if bucket.numel() == 0:
            return bucket
        # Without a dtype: DeepSpeed before 0.17.6, where there is one bucket.
        entries = optimizer.ipg_buckets[dtype].params if dtype else optimizer.params_in_ipg_bucket
        parameters = [optimizer.param_dict[entry[2]] for entry in entries]
        mean = bucket if dtype is None else bucket.to(dtype)
        tensors = mean.split([parameter.numel() for parameter in parameters])
        _average(engine, exchange, parameters, tensors, compresses())
        has_exchanged = True
        if mean is not bucket:
            bucket.copy_(mean)
        return mean

    def finish_and_count(*args: Any, **kwargs: Any) -> None:
        # The next buckets have new gradients of the same parameters.
        nonlocal has_exchanged
        finish(*args, **kwargs)
        if has_exchanged:
            of_groups = (getattr(optimizer, "averaged_gradients", None) or {}).values()
            _end_step(exchange, [g for of_group in of_groups for g in of_group or ()])
        has_exchanged = False

    optimizer.reduce_scatter = False
    optimizer.gradient_reduction_w_predivide = reduce
    optimizer.overlapping_partition_gradients_reduce_epilogue = finish_and_count


def _average(
    engine: Any,
    exchange: Exchange,
    parameters: Sequence[torch.Tensor],
    tensors: Sequence[torch.Tensor],
    compress: bool,
    dtype: torch.dtype | None = None,
) -> None:
    """Average a bucket's gradients in place; a step may have several buckets."""
    bucket = exchange.buckets.of_parameters(parameters, tensors, engine.param_names.__getitem__)
    loss_scale = getattr(engine.optimizer, "loss_scale", None)  # None for bfloat16, too
    scale = 1.0 if loss_scale is None else float(loss_scale)
    exchange.transport.run(
        exchange.bucket_round(
            bucket, tensors, compress=compress, scale=scale, partial=True, dtype=dtype
        )
    )


def _end_step(exchange: Exchange, gradients: Iterable[torch.Tensor | None]) -> None:
    """End a step; fill all gradients with NaN if some gradient was not finite on some rank."""
    health = exchange.end_step()
    for gradient in gradients:
        if gradient is not None:
            fill_nan_(gradient, health.to(gradient.device))

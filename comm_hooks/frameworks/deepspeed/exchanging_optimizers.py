"""Let a DeepSpeed engine use an optimizer that exchanges by itself or takes local steps."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from comm_hooks.checkpoints.optimizer_state import OptimizerState
from comm_hooks.collectives.requests import AllReduce
from comm_hooks.exchange import Exchange
from comm_hooks.optim import Adam, LocalRounds
from comm_hooks.optim.exchanging import ExchangingOptimizer
from comm_hooks.shared_model import attach_shared_model

# Sums over ranks of gradient norms above it may have squares outside of float32 on some rank.
_LARGEST_NORM = 1e19


@contextmanager
def paused(optimizer: Any) -> Iterator[None]:
    """Let ``optimizer.step()`` do nothing within this context, while an engine is constructed.

    DeepSpeed's wrapper for 16-bit models takes a step with zero gradients, so that torch's
    optimizers make their state.  An exchanging optimizer would send zeros, count a step and decay
    the weights.
    """
    if not isinstance(optimizer, ExchangingOptimizer):
        yield
        return
    optimizer.is_paused = True
    try:
        yield
    finally:
        optimizer.is_paused = False


def attach(engine: Any) -> OptimizerState | LocalRounds | None:
    """Let a constructed engine use an optimizer that exchanges, and average no gradients itself.

    Sends nothing.

    Returns:
        The state that every rank saves; None for an optimizer without an exchange.

    Raises:
        ValueError: if DeepSpeed has put the optimizer behind a wrapper that divides parameters or
            gradients between ranks.
    """
    # Older releases have no attribute where there is no optimizer.
    optimizer, wrapper = getattr(engine, "basic_optimizer", None), engine.optimizer
    name, keeps_copies = type(optimizer).__name__, type(wrapper).__name__ == "FP16_UnfusedOptimizer"
    if isinstance(optimizer, Adam) and keeps_copies:
        # The step with zero gradients has decayed the copies.
        optimizer.state.clear()
        wrapper.refresh_fp32_params()
    if isinstance(optimizer, LocalRounds):
        _attach_rounds(engine, optimizer)
        return optimizer
    if not isinstance(optimizer, ExchangingOptimizer):
        return None
    if wrapper is not optimizer:
        if engine.pipeline_parallelism:
            raise ValueError(
                f"{name} works in a PipelineModule in float32 only: switch bf16 and fp16 off"
            )
        if not keeps_copies:
            raise ValueError(
                f"{name} cannot work inside DeepSpeed's {type(wrapper).__name__}, which does not "
                "keep whole parameters on every rank: use ZeRO stage 0"
            )
        _share_norm(wrapper, optimizer.exchange)
        _scale_loss(engine)
    _stop_averaging(engine)
    # The engine has no DDP inside, and takes a step before the optimizer can ask the other ranks.
    optimizer.averaging_ruled_out = True

    def set_parameters(values: Sequence[torch.Tensor]) -> None:
        # The optimizer's parameters are the model's, or float32 copies of them.
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if engine.optimizer is not optimizer:
            models = [p for group in engine.optimizer.fp16_groups for p in group]
            parameters, values = parameters + models, [*values, *values]
        with torch.no_grad():
            for parameter, value in zip(parameters, values, strict=True):
                parameter.copy_(value)

    return OptimizerState(optimizer, set_parameters)


def _attach_rounds(engine: Any, rounds: LocalRounds) -> None:
    if engine.optimizer is not rounds:
        raise ValueError(
            f"{type(rounds).__name__} keeps a copy of the model in float32 and cannot work "
            f"inside DeepSpeed's {type(engine.optimizer).__name__}: switch bf16 and fp16 off, and "
            'use "torch_autocast": {"enabled": true, "dtype": "bfloat16"}'
        )
    if rounds.participation is not None and engine.gradient_accumulation_steps() > 1:
        raise ValueError(
            "gradient_accumulation_steps: must be 1 where rounds have clients: DeepSpeed does not "
            "start its count of micro-batches anew with each client's turn"
        )
    attach_shared_model(engine.module, rounds)
    _stop_averaging(engine)

    def clip() -> None:
        torch.nn.utils.clip_grad_norm_(engine.module.parameters(), engine.gradient_clipping())

    # By the rank's own norm: DeepSpeed all-reduces it, at every local step.
    engine.clip_fp32_gradients = clip


def _stop_averaging(engine: Any) -> None:
    # Both the engine and the pipeline engine average by this method.
    engine.allreduce_gradients = lambda *args, **kwargs: None


def _share_norm(wrapper: Any, exchange: Exchange) -> None:
    """Give DeepSpeed's 16-bit wrapper one gradient norm for all ranks, instead of each rank's own.

    The wrapper (``FP16_UnfusedOptimizer``) keeps float32 copies of a bfloat16 or float16 model's
    parameters, scales the loss, skips steps that overflowed and clips.  It expects averaged
    gradients: it would clip each rank's gradients by another norm, and a norm outside float32's
    range on one rank only would make that rank skip a step in which the others wait for it.

    The norm here is the mean over ranks of the norms of their gradients, an upper bound of the norm
    of their mean; DeepSpeed itself clips by it in float32.  One all-reduce of 4 bytes per step, in
    place of DeepSpeed's own.
    """
    unscale_and_clip, shared = wrapper.unscale_and_clip_grads, 0.0

    def overflows(param_groups: object = None) -> bool:
        nonlocal shared
        parameters = [p for group in wrapper.fp16_groups for p in group]
        gradients = [p.grad for p in parameters if p.grad is not None]
        norms = [torch.linalg.vector_norm(g, dtype=torch.float32) for g in gradients]
        norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
        transport = exchange.transport
        request = AllReduce(norm.to(parameters[0].device).reshape(1))
        total = float(transport.perform(request))
        exchange.count_sent(request.traffic(transport.world_size))
        shared = total / transport.world_size
        return not total <= _LARGEST_NORM  # NaN, too

    def unscale_and_clip_by_shared(total_norm: float, apply_scale: bool = True) -> float:
        scale = unscale_and_clip(shared, apply_scale)
        wrapper._global_grad_norm = shared / wrapper.loss_scale
        return float(scale)

    wrapper.overflow_checker.check = overflows
    wrapper.unscale_and_clip_grads = unscale_and_clip_by_shared


def _scale_loss(engine: Any) -> None:
    """Let ``engine.backward`` scale the loss of a float16 model, where DeepSpeed forgets to.

    Since DeepSpeed 0.19, ZeRO optimizers scale the loss; at stage 0 nothing does, but the wrapper
    still divides the gradients by the scale: small ones vanish, and nothing is clipped.
    """
    from deepspeed.runtime.base_optimizer import ZeROOptimizer

    wrapper = engine.optimizer
    leaves_it = hasattr(ZeROOptimizer, "scale_if_loss") and not hasattr(wrapper, "scale_if_loss")
    if wrapper.low_precision_dtype != torch.float16 or not leaves_it:
        return
    backward = engine.backward

    def scaled_backward(loss: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        scale = wrapper.loss_scale
        result: torch.Tensor = backward(loss.float() * scale, *args, **kwargs)
        return result / scale

    engine.backward = scaled_backward

"""Features of DeepSpeed that compression does not support, refused before the first step."""

from collections.abc import Mapping
from typing import Any

import torch

from comm_hooks.frameworks.deepspeed.settings import BLOCK
from comm_hooks.warnings import warn_program


def check_parallelism(engine: Any) -> None:
    """Raise ``ValueError`` unless each rank holds the same whole model."""
    stages = getattr(engine.module, "num_stages", 1)
    _refuse(
        {
            "mixture-of-experts layers: their gradients are averaged over other groups": (
                engine.has_moe_layers
            ),
            "a pipeline of several stages: tied parameters would be exchanged by each stage on its "
            "own and drift apart. PipelineModule(num_stages=1) works": stages > 1,
            "sequence parallelism: gradients are sums over a sequence group there": (
                engine.sequence_parallel_size > 1
            ),
            "tensor parallelism: each rank has other parameters under the same names": (
                _has_tensor_parallelism(engine)
            ),
        }
    )


def check_averaging(engine: Any) -> None:
    """Raise ``ValueError`` for features that average gradients without the exchange."""
    stage, optimizer = engine.zero_optimization_stage(), engine.optimizer
    name = type(getattr(optimizer, "optimizer", optimizer)).__name__
    autocast = getattr(engine, "torch_autocast_enabled", lambda: False)()
    in_parts = not getattr(optimizer, "contiguous_gradients", True)
    _refuse(
        {
            "zero_optimization.stage 3: a rank's gradients are cut into shards while they are "
            "averaged, and no method of DeepSpeed gives access to them before. Use stage 0, 1 or "
            "2": stage == 3,
            "zero_optimization.contiguous_gradients false: gradients are not in one bucket. Leave "
            "it out": stage in (1, 2) and in_parts,
            "zero_optimization.zenflow: it exchanges and delays gradients itself": (
                getattr(engine, "zenflow", False)
            ),
            "optimizer.type Muon with ZeRO: it needs matrices that are cut by ZeRO. Use stage 0": (
                stage > 0 and "Muon" in name
            ),
            "compile.deepcompile: gradients are reduced inside the compiled graph": (
                engine.is_deepcompile_enabled()
            ),
            'gradient_allreduce_op "sum": the exchange averages. Use "mean", and scale the '
            "learning rate": not engine.gradient_average,
            "prescale_gradients: the exchange divides in float32. Leave it out": (
                not engine.postscale_gradients()
            ),
            "gradient_predivide_factor: the exchange divides in float32. Leave it out": (
                engine.gradient_predivide_factor() != 1.0
            ),
            "torch_autocast with float16: use the fp16 block, or bfloat16": (
                autocast and engine.torch_autocast_dtype() == torch.float16
            ),
        }
    )
    if engine._config.communication_data_type is not None:
        warn_program(
            f"communication_data_type is ignored for gradients that the {BLOCK} block averages"
        )


def _has_tensor_parallelism(engine: Any) -> bool:
    sizes = [getattr(engine, "autotp_size", lambda: 0)()]
    world_size = getattr(engine.mpu, "get_model_parallel_world_size", None)
    if world_size is not None:
        sizes.append(world_size())
    return max(sizes) > 1


def _refuse(features: Mapping[str, bool]) -> None:
    for feature, is_used in features.items():
        if is_used:
            raise ValueError(f"{BLOCK} cannot be used with {feature}")

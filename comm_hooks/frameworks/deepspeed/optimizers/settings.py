"""What the ``optimizer`` block of a DeepSpeed configuration asks for."""

import inspect
import itertools
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from typing import Any

import torch

from comm_hooks.config import unknown
from comm_hooks.exchange import Exchange, ExchangeSettings
from comm_hooks.frameworks.deepspeed.block import BLOCK, value_of
from comm_hooks.frameworks.deepspeed.optimizers.in_engine import in_engine
from comm_hooks.frameworks.deepspeed.optimizers.rounds import asks_for_rounds, rounds_of
from comm_hooks.frameworks.deepspeed.optimizers.types import REFUSED, TYPES, OptimizerType
from comm_hooks.frameworks.deepspeed.reductions import START, Averaging
from comm_hooks.optim.exchanging import ExchangingOptimizer
from comm_hooks.optim.rounds import LocalRounds

_KEYS = ("type", "params", "legacy_fusion")
# DeepSpeed never minded the case of its own optimizers' names.
_SPELLINGS = {key.lower(): key for key in (*TYPES, *REFUSED)}


def prepare(
    config: Mapping[str, Any], *, model: torch.nn.Module, optimizer: Any, model_parameters: Any
) -> Any:
    """Return the optimizer that an engine shall be constructed with.

    1. An optimizer that the user passed stays what it is, and decides, as in DeepSpeed.
    2. Else, if the ``comm_hooks`` block names a method (``low_communication``), it is a function to
       those rounds of local steps, in place of AdamW.
    3. Else, if ``optimizer.type`` is a key of :data:`TYPES` (case does not matter), it is a
       function from parameters to that optimizer, for DeepSpeed to call after it has moved and
       cast the model.  One that owns its exchange gets it from the ``comm_hooks`` block; a block
       without a ``compressor`` changes the published exchange.  At ZeRO stages 1 and 2 it is what
       can work on parts (``OptimizerType.in_parts``).
    4. Else it is None, and DeepSpeed goes on by itself.

    Everything that the configuration can get wrong is found here, before anything is sent.

    Args:
        config: of DeepSpeed; not changed.
        model: not yet moved or cast; names the parameters.
        optimizer: what the user passed.
        model_parameters: what the user passed; not read, DeepSpeed hands it to the function.

    Raises:
        ValueError: for an unknown name or parameter, with its path and the nearest known one; for
            values out of range; for an exchange that the optimizer cannot use; for ZeRO stages
            and other settings under which no rank has the whole gradients of its own that the
            optimizer needs.

    Not supported: ZeRO, tensor, sequence and expert parallelism, and pipelines of several stages
    for optimizers that own their exchange.

    Example::

        >>> config = {"optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 100}}}
        >>> make = prepare(config, model=model, optimizer=None, model_parameters=None)
        >>> make(list(model.parameters())).freeze_step
        100
    """
    if optimizer is not None:
        name = _name(config)
        if name.lower() in _SPELLINGS:
            warnings.warn(
                f"optimizer.type: {name} is not used, because an optimizer was passed to "
                "initialize(): pass none, or remove the block",
                stacklevel=3,
            )
        if isinstance(optimizer, ExchangingOptimizer | LocalRounds):
            _check_engine(config, type(optimizer).__name__)
            if BLOCK in config:
                raise ValueError(
                    f"{BLOCK}: the {type(optimizer).__name__} that was passed has an exchange of "
                    "its own: remove the block, or name the optimizer in the configuration"
                )
        return optimizer
    if asks_for_rounds(config):
        method, make_rounds = rounds_of(config)
        _check_engine(config, method)
        _check_precision(config, method)
        return lambda members: make_rounds(named_groups(members, model))
    chosen = _chosen(config)
    if chosen is None:
        return None
    block = config["optimizer"]
    for key in block:
        if key not in _KEYS:
            raise ValueError(f"optimizer.{key}: {unknown('setting', key, _KEYS)}")
    kind = _kind(config, chosen)
    params = _params(chosen, kind, block.get("params") or {})
    make = in_engine(kind.optimizer)
    if kind.exchange is None:
        _try(make, "optimizer.params", params)
        if kind.needs_block and BLOCK not in config:
            raise ValueError(
                f"{BLOCK}: missing; {chosen} is for gradients that an exchange averages, for "
                'instance {"compressor": "count_sketch", "ratio": 0.05}'
            )
        if chosen == "SAFL":
            _check_sketch(config[BLOCK])
        return lambda members: make(named_groups(members, model), **params)

    _check_engine(config, chosen)
    # With the published exchange first, so that what is wrong can be told apart.
    _try(
        make,
        "optimizer.params",
        {"exchange": Exchange(ExchangeSettings.from_dict(kind.exchange)), **params},
    )
    exchange = _exchange(kind, config.get(BLOCK))
    _try(make, BLOCK, {"exchange": exchange, **params})
    return lambda members: make(named_groups(members, model), exchange=exchange, **params)


def averaging(
    config: Mapping[str, Any], block: Mapping[str, Any] | None, optimizer: Any
) -> Averaging | None:
    """Return how an engine shall average its gradients.

    None if there is nothing of ours in that: no block, or one that belongs to the optimizer that
    :func:`prepare` makes, and that was checked there.

    Args:
        config: of DeepSpeed.
        block: the ``comm_hooks`` block in it.
        optimizer: what the user passed.

    Raises:
        ValueError: for anything unknown in the block, or that cannot work.
    """
    chosen = None
    if optimizer is None:
        if asks_for_rounds(config):
            return None
        chosen = _chosen(config)
    elif isinstance(optimizer, ExchangingOptimizer | LocalRounds):
        return None
    if chosen is not None:
        kind = _kind(config, chosen)
        if kind.exchange is not None:
            return None
        named = TYPES[chosen]
        if kind is not named:
            if block is not None and START in block:
                raise ValueError(
                    f"{BLOCK}.{START}: {chosen} starts at optimizer.params.freeze_step: leave it "
                    "out"
                )
            params = {**named.defaults, **(config["optimizer"].get("params") or {})}
            block = {**_completed(named, block), START: params["freeze_step"]}
    return None if block is None else Averaging.from_block(block)


def named_groups(members: Iterable[Any], model: torch.nn.Module) -> list[dict[str, Any]]:
    """Return parameter groups in which every trainable parameter has its name in the model.

    Args:
        members: parameters or groups of them.
        model: whose ``named_parameters()`` have the names.

    Raises:
        ValueError: for a group with ``non_freeze``, which 1-bit Adam in DeepSpeed knew.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    members = list(members)
    groups = members if members and isinstance(members[0], Mapping) else [{"params": members}]
    numbers = itertools.count()
    result = []
    for index, group in enumerate(groups):
        group = dict(group)
        if group.get("non_freeze"):
            raise ValueError(
                f"parameter group {index}: non_freeze is not supported: parameters with at most "
                f"one dimension or fewer than {BLOCK}.min_numel elements travel exactly anyway"
            )
        if group.pop("exp_avg_mask", None) is not None:
            warnings.warn(
                f"parameter group {index}: exp_avg_mask is not needed and not used: elements "
                "without a gradient in the warm-up take no steps",
                stacklevel=2,
            )
        parameters = group["params"]
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        # DeepSpeed leaves the others out, too, but later, when they have been given names.
        parameters = [p for p in parameters if p.requires_grad and p.numel()]
        group["params"] = [
            (names[p] if p in names else f"parameter.{next(numbers)}", p) for p in parameters
        ]
        if parameters:
            result.append(group)
    return result


def _name(config: Mapping[str, Any]) -> str:
    """Return ``optimizer.type``; an empty string for none."""
    block = config.get("optimizer")
    name = block.get("type") if isinstance(block, Mapping) else None
    return name if isinstance(name, str) else ""


def _chosen(config: Mapping[str, Any]) -> str | None:
    """Return the key of TYPES that a configuration names; None for what DeepSpeed knows."""
    name = _name(config)
    key = _SPELLINGS.get(name.lower())
    if key is not None and key in REFUSED:
        raise ValueError(f"optimizer.type: {key} cannot be used: {REFUSED[key]}")
    if key is None and name and not _is_known_to_deepspeed(name):
        if get_close_matches(name.lower(), _SPELLINGS, n=1, cutoff=0.7):
            raise ValueError(
                f"optimizer.type: {unknown('optimizer', name, TYPES)}, and those of DeepSpeed and "
                "torch.optim"
            )
    return key


def _is_known_to_deepspeed(name: str) -> bool:
    from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

    return hasattr(torch.optim, name) or name.lower() in DEEPSPEED_OPTIMIZERS


def _params(name: str, kind: OptimizerType, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of an optimizer's class."""
    if not isinstance(given, Mapping):
        raise ValueError(f"optimizer.params: must be an object, got {given!r}")
    signature = inspect.signature(kind.optimizer).parameters
    own = {k: p for k, p in signature.items() if k not in ("params", "exchange")}
    known = [*own, *(k for k in (*kind.ignored, *kind.refused) if k not in own)]
    params = dict(kind.defaults)
    ignored = []
    for key, value in given.items():
        path = f"optimizer.params.{key}"
        if key not in known:
            raise ValueError(f"{path}: {unknown(f'parameter of {name}', key, known)}")
        if key in kind.refused:
            if value:
                raise ValueError(f"{path}: not supported: {kind.refused[key]}")
        elif key in kind.ignored:
            ignored.append(key)
        else:
            params[key] = value_of(path, key, value)
    if ignored:
        warnings.warn(
            f"optimizer.params: {', '.join(ignored)} of {name} decide nothing here and are not "
            "used: ranks reach each other over torch.distributed, there is no bias correction, and "
            "eps is added to the root",
            stacklevel=4,
        )
    for key, parameter in own.items():
        if parameter.default is inspect.Parameter.empty and key not in params:
            raise ValueError(f"optimizer.params.{key}: missing; {name} has no default for it")
    return params


def _exchange(kind: OptimizerType, block: Any) -> Exchange:
    """Return the exchange of a user's block, completed by what is published or needed."""
    return Exchange(ExchangeSettings.from_dict(_completed(kind, block), path=BLOCK))


def _completed(kind: OptimizerType, block: Any) -> Any:
    """Return a user's block, completed by what is published or needed."""
    assert kind.exchange is not None
    block = {} if block is None else block
    if isinstance(block, Mapping):
        block = {**(kind.needs if "compressor" in block else kind.exchange), **block}
    return block


def _stage(config: Mapping[str, Any]) -> int:
    """Return the stage of ZeRO, for which DeepSpeed takes numbers in quotes as well."""
    zero = config.get("zero_optimization")
    stage = zero.get("stage", 0) if isinstance(zero, Mapping) else int(zero is True)
    try:
        return int(stage)
    except (TypeError, ValueError):
        raise ValueError(f"zero_optimization.stage: must be 0 to 3, got {stage!r}") from None


def _kind(config: Mapping[str, Any], chosen: str) -> OptimizerType:
    """Return what a key of TYPES stands for at the configuration's stage of ZeRO."""
    kind = TYPES[chosen]
    if kind.in_parts is None or _stage(config) not in (1, 2):
        return kind
    return replace(kind, optimizer=kind.in_parts)


def _check_engine(config: Mapping[str, Any], name: str) -> None:
    """Raise for settings under which a rank has no whole gradients of its own."""
    if stage := _stage(config):
        raise ValueError(
            f"zero_optimization.stage: {name} exchanges something else than gradients and needs "
            f"all of them on every rank, but ZeRO stage {stage} divides them: use stage 0. At "
            f"stages 1 and 2 OneBitAdam works, or AdamW with a {BLOCK} block"
        )
    if config.get("gradient_allreduce_op", "mean") != "mean":
        raise ValueError(
            f"gradient_allreduce_op: {name} takes the mean over ranks, not the "
            f"{config['gradient_allreduce_op']}: remove it and scale the learning rate"
        )
    compile_ = config.get("compile")
    if isinstance(compile_, Mapping) and compile_.get("deepcompile"):
        raise ValueError(
            f"compile.deepcompile: averages gradients inside the compiled graph, before {name} "
            "sees them: remove it"
        )


def _check_precision(config: Mapping[str, Any], method: str) -> None:
    """Raise for 16-bit models, of which DeepSpeed keeps copies that only its wrapper knows."""
    for key in ("bf16", "fp16"):
        block = config.get(key)
        if isinstance(block, Mapping) and block.get("enabled"):
            raise ValueError(
                f"{key}.enabled: {method} keeps a model of its own in float32: use "
                '"torch_autocast": {"enabled": true, "dtype": "bfloat16"}, which computes in 16 '
                "bits"
            )


def _check_sketch(block: Any) -> None:
    """Raise unless gradients cross through a sketch."""
    compressor = ExchangeSettings.from_dict(block, path=BLOCK).compressor
    if not (compressor.linear and compressor.unbiased):
        raise ValueError(
            f"{BLOCK}.compressor: SAFL needs a sketch (count_sketch, srht, gaussian_sketch), got "
            f"{block['compressor']}: use that with AMSGrad"
        )


def _try(
    make: Callable[..., torch.optim.Optimizer], path: str, arguments: Mapping[str, Any]
) -> None:
    """Construct an optimizer of one number, so that it refuses what it must before all else."""
    try:
        make([torch.nn.Parameter(torch.zeros(1))], **arguments)
    except (ValueError, TypeError) as error:  # torch's own compare a string with a number
        raise ValueError(f"{path}: {error}") from None

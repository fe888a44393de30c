"""Read and check the settings of a DeepSpeed configuration that concern comm-hooks."""

import difflib
import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from comm_hooks.config import unknown
from comm_hooks.exchange import Exchange, ExchangeSettings
from comm_hooks.optim import LocalRounds
from comm_hooks.optim.exchanging import ExchangingOptimizer
from comm_hooks.optim.registry import OPTIMIZERS, OptimizerEntry, lookup
from comm_hooks.requirements import require_integer, require_within
from comm_hooks.warnings import warn_program

if TYPE_CHECKING:
    from comm_hooks.optim.private import RankLevel

BLOCK = "comm_hooks"
START = "start_compression_step"
PRIVATE = "private"

Make = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]


@dataclass(frozen=True)
class EngineSettings:
    """The settings of an engine: its optimizer and its exchange of gradients.

    Attributes:
        make_optimizer: a function from parameter groups with names to the engine's optimizer; None
            if DeepSpeed makes it, or the user has.
        exchange: that of gradients; None if DeepSpeed averages them, or the optimizer exchanges.
        start_compression_step: the number of first steps with exactly averaged gradients.  Skipped
            steps do not count, nor those of a checkpoint that was loaded without its ranks' files.
        private: the privacy of each rank's gradients; None without it.
    """

    make_optimizer: Make | None = None
    exchange: ExchangeSettings | None = None
    start_compression_step: int = 0
    private: "RankLevel | None" = None

    @classmethod
    def read(cls, config: Mapping[str, Any], optimizer: Any = None) -> "EngineSettings":
        """Return the settings of a DeepSpeed configuration.

        1. An optimizer of the user takes precedence, as in DeepSpeed; if it does not exchange, it
           gets gradients averaged as the ``comm_hooks`` block says.
        2. Else a method in the block (``low_communication``), with local steps, replaces AdamW.
        3. Else, if ``optimizer.type`` names one of :mod:`comm_hooks.optim.registry`, the
           engine gets that optimizer.  If it owns its exchange, a block with a ``compressor``
           replaces the published exchange, and a block without overrides single settings of it.
        4. Else DeepSpeed makes the optimizer, and gradients are averaged as the block says.

        Args:
            config: the configuration of DeepSpeed; not changed.
            optimizer: the optimizer that was passed to DeepSpeed; None if there is none.

        Raises:
            ValueError: for an unknown name or setting, with its path and the nearest known one; for
                ZeRO stages and other settings under which no rank has whole gradients of its own.

        Not supported: ZeRO, tensor, sequence and expert parallelism, and pipelines of several
        stages for optimizers that own their exchange.
        """
        block = find_block(config)
        if optimizer is not None:
            return cls._with_passed(config, block, optimizer)
        if isinstance(block, Mapping) and "method" in block:
            return cls(_rounds(config, block))
        entry = _chosen(config)
        if entry is None:
            return cls._averaging(block)
        for key in config["optimizer"]:
            if key not in _KEYS:
                raise ValueError(f"optimizer.{key}: {unknown('setting', key, _KEYS)}")
        name = entry.name if entry is _ADAMW else entry.type_name
        published = entry.published
        if published is not None and isinstance(block, Mapping | None):
            needs = entry.needs if "compressor" in (block or {}) else published
            block = {**needs, **(block or {})}
        params = _params(name, entry, config["optimizer"].get("params") or {})
        if entry.averages == "before":
            if entry is _ADAMW and block is None:
                raise ValueError(
                    f"{BLOCK}: missing; {name} is for gradients that an exchange averages, for "
                    'instance {"compressor": "count_sketch", "ratio": 0.05}'
                )
            found = cls._averaging(block)
            make = _checked("optimizer.params", entry.build, params)
            return replace(found, make_optimizer=make)
        _check_engine(config, name)
        settings = ExchangeSettings.from_dict(block, path=BLOCK)
        path = f"optimizer.params or {BLOCK}" if BLOCK in config else "optimizer.params"
        return cls(_checked(path, lambda g, **p: entry.build(g, Exchange(settings), **p), params))

    @classmethod
    def _with_passed(cls, config: Mapping[str, Any], block: Any, passed: Any) -> "EngineSettings":
        name = _type(config)
        if name.lower() not in ("adam", "adamw") and _entry(name):
            warn_program(
                f"optimizer.type: {name} is not used, because an optimizer was passed to "
                "initialize(): pass none, or remove the block"
            )
        if not isinstance(passed, ExchangingOptimizer | LocalRounds):
            return cls._averaging(block)
        _check_engine(config, type(passed).__name__)
        if block is not None:
            raise ValueError(
                f"{BLOCK}: the {type(passed).__name__} that was passed has an exchange of "
                "its own: remove the block, or name the optimizer in the configuration"
            )
        return cls()

    @classmethod
    def _averaging(cls, block: Any) -> "EngineSettings":
        if block is None:
            return cls()
        start, private = 0, None
        if isinstance(block, Mapping):
            block = dict(block)
            start, private = block.pop(START, 0), block.pop(PRIVATE, None)
        require_integer(BLOCK, START, start)
        require_within(BLOCK, START, start, "[0, inf)")
        if private is not None:
            from comm_hooks.optim.private import RankLevel

            try:
                private = RankLevel.of(private)
            except ValueError as error:
                raise ValueError(f"{BLOCK}.{PRIVATE}: {error}") from None
        return cls(None, ExchangeSettings.from_dict(block, path=BLOCK), start, private)


def find_block(config: Mapping[str, Any]) -> Any:
    """Return the ``comm_hooks`` block of a DeepSpeed configuration, unchecked; None without one.

    Raises:
        ValueError: for a key of the top level that looks like a misspelt block.
    """
    for key in config:
        is_similar = difflib.get_close_matches(str(key).lower(), [BLOCK], cutoff=0.8)
        if key != BLOCK and is_similar:
            raise ValueError(
                f"{key}: unknown block in the DeepSpeed configuration: did you mean {BLOCK!r}?"
            )
    if BLOCK not in config:
        return None
    return {} if config[BLOCK] is None else config[BLOCK]


def named_groups(members: Iterable[Any], model: torch.nn.Module) -> list[dict[str, Any]]:
    """Return parameter groups of (name, parameter), with the names that the model gives.

    Args:
        members: parameters or parameter groups.
        model: the model that names them.

    Raises:
        ValueError: for a group with ``non_freeze``, a setting of DeepSpeed's own 1-bit Adam.
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
            warn_program(
                f"parameter group {index}: exp_avg_mask is not needed and not used: elements "
                "without a gradient in the warm-up take no steps"
            )
        parameters = group["params"]
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        # DeepSpeed leaves the others out, too, but only after they were named.
        parameters = [p for p in parameters if p.requires_grad and p.numel()]
        group["params"] = [
            (names[p] if p in names else f"parameter.{next(numbers)}", p) for p in parameters
        ]
        if parameters:
            result.append(group)
    return result


# AdamW under a name that DeepSpeed refuses where comm-hooks is missing.
_ADAMW = OptimizerEntry("CommHooksAdamW", torch.optim.AdamW, lambda defaults: {})
_KEYS = ("type", "params", "legacy_fusion")

# Keys of DeepSpeed's own 1-bit optimizers.
_ONE_BIT = ("OneBitAdam", "OneBitLamb", "ZeroOneAdam")
_ONE_BIT_IGNORED = ("cuda_aware", "comm_backend_name", "bias_correction", "eps_inside_sqrt")
_ONE_BIT_REFUSED = {
    "amsgrad": "there is no AMSGrad variant, as in DeepSpeed: use CDAdam, which is AMSGrad",
    "max_grad_norm": "use gradient_clipping at the top level, as in DeepSpeed",
}

_ROUNDS_PARAMS = ("lr", "betas", "eps", "weight_decay")
_ROUNDS_IGNORED = ("eps", "torch_adam", "fused", "foreach", "bias_correction")


def _type(config: Mapping[str, Any]) -> str:
    block = config.get("optimizer")
    name = block.get("type") if isinstance(block, Mapping) else None
    return name if isinstance(name, str) else ""


def _entry(name: str) -> OptimizerEntry | None:
    return _ADAMW if name.lower() == _ADAMW.name.lower() else lookup(name)


def _chosen(config: Mapping[str, Any]) -> OptimizerEntry | None:
    """Return the entry of the optimizer in ``optimizer.type``; None if DeepSpeed makes it."""
    name = _type(config)
    entry = _entry(name)
    if entry is None:
        known = [*(entry.type_name for entry in OPTIMIZERS.values()), _ADAMW.name]
        if difflib.get_close_matches(name.lower(), map(str.lower, known), n=1, cutoff=0.7):
            from deepspeed.runtime.config import DEEPSPEED_OPTIMIZERS

            if not hasattr(torch.optim, name) and name.lower() not in DEEPSPEED_OPTIMIZERS:
                raise ValueError(
                    f"optimizer.type: {unknown('optimizer', name, known)}, and those of DeepSpeed "
                    "and torch.optim"
                )
        return None
    if entry.name in ("adam", "adamw"):
        return None
    if entry.name == "marina":
        raise ValueError(
            "optimizer.type: Marina cannot be used: it needs the gradients of a minibatch at two "
            "points, for which the engine calls backward() once: use EF21, or "
            "comm_hooks.optim.Marina without DeepSpeed"
        )
    if entry.works_in_rounds:
        raise ValueError(
            f"optimizer.type: {entry.type_name} cannot be used: it takes local steps. Write "
            f'"comm_hooks": {{"method": "{entry.name}"}} and "type": "CommHooksAdamW", or pass '
            "the optimizer to initialize(optimizer=...)"
        )
    return entry


def _params(name: str, entry: OptimizerEntry, given: Any) -> dict[str, Any]:
    """Return the checked options of an optimizer, given ``optimizer.params``."""
    ignored, refused = (_ONE_BIT_IGNORED, _ONE_BIT_REFUSED) if name in _ONE_BIT else ((), {})
    params: dict[str, Any] = {}
    if name in _ONE_BIT:  # DeepSpeed's default
        params["var_freeze_step" if name == "ZeroOneAdam" else "freeze_step"] = 100_000
    skipped = []
    for key, value in _items("optimizer.params", given):
        path = f"optimizer.params.{key}"
        if key in refused:
            if value:
                raise ValueError(f"{path}: not supported: {refused[key]}")
        elif key in ignored:
            skipped.append(key)
        else:
            try:
                entry.check({key: value})
            except ValueError as error:
                raise ValueError(f"{path}: {error}") from None
            params[key] = tuple(value) if isinstance(value, list) else value
    if skipped:
        warn_program(
            f"optimizer.params: {', '.join(skipped)} of {name} are not used: ranks reach each "
            "other over torch.distributed, there is no bias correction, and eps is added to the "
            "root"
        )
    for option in entry.options.values():
        if option.is_required and option.name not in params:
            raise ValueError(
                f"optimizer.params.{option.name}: missing; {name} has no default for it"
            )
    return params


def _rounds(config: Mapping[str, Any], block: Mapping[str, Any]) -> Make:
    """Return a function that makes the optimizer of local steps that replaces AdamW."""
    method = block["method"]
    entry = lookup(method) if isinstance(method, str) else None
    if entry is None or not entry.works_in_rounds:
        known = [each.name for each in OPTIMIZERS.values() if each.works_in_rounds]
        raise ValueError(f"{BLOCK}.method: {unknown('method', method, known)}")
    if _type(config).lower() not in ("adamw", "adam", "commhooksadamw"):
        raise ValueError(
            f"optimizer.type: {method} takes the place of AdamW and uses its learning rate: write "
            '"CommHooksAdamW", which DeepSpeed refuses where comm-hooks is missing'
        )
    params = dict(_items("optimizer.params", config["optimizer"].get("params") or {}))
    if params.pop("adam_w_mode", True) is not True:
        raise ValueError(f"optimizer.params.adam_w_mode: must be true for {method}: leave it out")
    # Arguments of AdamW in torch and DeepSpeed that the method does not have.
    unused = [key for key in _ROUNDS_IGNORED if key not in entry.options]
    if ignored := [key for key in unused if params.pop(key, None) is not None]:
        warn_program(f"optimizer.params: {', '.join(ignored)} are not used by {method}")
    of_adamw = [key for key in _ROUNDS_PARAMS if key in entry.options]
    own = [key for key in entry.options if key not in _ROUNDS_PARAMS]
    if misplaced := [key for key in params if key not in of_adamw]:
        key = misplaced[0]
        raise ValueError(f"optimizer.params.{key}: {unknown('setting', key, of_adamw)}")
    options = {"lr": 1e-3, **params, **{key: block[key] for key in own if key in block}}
    rest = {key: value for key, value in block.items() if key not in ("method", *own)}
    if entry.averages == "own" and rest:
        key = next(iter(rest))
        raise ValueError(f"{BLOCK}.{key}: {unknown('setting', key, ['method', *own])}")
    _check_engine(config, method)
    for key in ("bf16", "fp16"):
        if isinstance(config.get(key), Mapping) and config[key].get("enabled"):
            raise ValueError(
                f"{key}.enabled: {method} keeps a copy of the model in float32: use "
                '"torch_autocast": {"enabled": true, "dtype": "bfloat16"}, which computes in 16 '
                "bits"
            )
    path = f"{BLOCK} or optimizer.params"
    if entry.averages == "own":
        return _checked(path, entry.make, options)
    published = entry.needs if "compressor" in rest else entry.published or {}
    settings = ExchangeSettings.from_dict({**published, **rest}, path=BLOCK)
    return _checked(path, lambda g, **o: entry.build(g, Exchange(settings), **o), options)


def _checked(path: str, make: Callable[..., Any], params: Mapping[str, Any]) -> Make:
    """Return a function from parameter groups to an optimizer; its errors name the path."""

    def make_optimizer(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        try:
            return make(groups, **params)
        except (ValueError, TypeError) as error:  # torch's own compare a string with a number
            raise ValueError(f"{path}: {error}") from None

    return make_optimizer


def _items(path: str, given: Any) -> Iterable[tuple[str, Any]]:
    if not isinstance(given, Mapping):
        raise ValueError(f"{path}: must be an object, got {given!r}")
    return given.items()


def _stage(config: Mapping[str, Any]) -> int:
    """Return the ZeRO stage of a configuration, which may be a number in quotes."""
    zero = config.get("zero_optimization")
    stage = zero.get("stage", 0) if isinstance(zero, Mapping) else int(zero is True)
    try:
        return int(stage)
    except (TypeError, ValueError):
        raise ValueError(f"zero_optimization.stage: must be 0 to 3, got {stage!r}") from None


def _check_engine(config: Mapping[str, Any], name: str) -> None:
    if stage := _stage(config):
        raise ValueError(
            f"zero_optimization.stage: {name} needs whole gradients on every rank for its own "
            f"exchange, but ZeRO stage {stage} divides gradients between ranks: use stage 0, or "
            f"AdamW with a {BLOCK} block at stages 1 and 2"
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

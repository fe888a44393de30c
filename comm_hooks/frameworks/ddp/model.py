"""Find the DistributedDataParallel inside a framework's model, and register one hook with it."""

import functools
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from comm_hooks.warnings import warn_program

_PYTHON_REDUCER = (
    "torch._dynamo.config.optimize_ddp = 'python_reducer' calls hooks parameter by parameter and "
    "ignores their results: set it to 'ddp_optimizer', the default, before DDP is constructed"
)


class AccumulationCheck:
    """Warns once if gradients are averaged a second time because they were not cleared.

    A second backward pass adds to gradients that the first has averaged.  Averaging the sum is
    legal, but a compressor then drops parts of the first average again.

    Not detected: with ``gradient_as_bucket_view=True``, where gradients never move.
    """

    def __init__(self) -> None:
        self._gradient: weakref.ref[torch.Tensor] | None = None
        self._version = -1
        self._warned = False

    def check(self, bucket: dist.GradBucket) -> None:  # type: ignore[name-defined]
        """Warn if the backward pass of this first bucket averages averaged gradients again."""
        if self._warned or bucket.buffer().is_sparse:
            return
        parameter = bucket.parameters()[0]
        gradient = parameter.grad
        if gradient is None or gradient.data_ptr() == bucket.buffer().data_ptr():
            return
        kept = self._gradient is not None and self._gradient() is gradient
        stepped = parameter._version != self._version
        self._gradient, self._version = weakref.ref(gradient), parameter._version
        # A rank that has left a join() passes zeros while its old gradients stand.
        if kept and not stepped and torch.equal(gradient, bucket.gradients()[0]):
            self._warned = True
            warnings.warn(
                "gradients are averaged again, with no optimizer step and no zero_grad() between: "
                "the first average is compressed a second time; accumulate under no_sync(), "
                "except in the last backward pass",
                stacklevel=2,
            )


def find_ddp(model: nn.Module) -> DistributedDataParallel | None:
    """Return the one ``DistributedDataParallel`` that is ``model`` or inside it, or None.

    It may be inside the models of ``torch.compile``, Fabric and Accelerate, or of your own.  A
    ``LightningModule`` is inside the DDP model of its trainer.

    Raises:
        ValueError: if there are several DDP models, and if ``model`` is no module.
    """
    trainer = getattr(model, "_trainer", None)
    if trainer is not None and isinstance(model, nn.Module):
        model = trainer.strategy.model
    if not isinstance(model, nn.Module):
        raise ValueError(f"register() takes a model, got {_kind(model)}")
    found = list(dict.fromkeys(_outermost(model)))
    if len(found) > 1:
        raise ValueError(
            f"{_kind(model)} has {len(found)} DistributedDataParallel models inside: register each "
            "on its own"
        )
    return found[0] if found else None


def require_ddp(model: nn.Module) -> DistributedDataParallel:
    """Return the DDP model that is ``model`` or inside it; raise ``ValueError`` if none is."""
    found = find_ddp(model)
    if found is None:
        raise ValueError(f"register() needs a DistributedDataParallel model, {_advice(model)}")
    return found


def register_hook(ddp: DistributedDataParallel, state: object, hook: Callable[..., Any]) -> None:
    """Register a communication hook with a DDP model, which then refuses a second hook."""
    ddp.register_comm_hook(state, hook)
    # DDP would add the second hook to its list before it fails.
    refuse = functools.partial(_refuse_another, hook.__name__)
    ddp.register_comm_hook = refuse  # type: ignore[method-assign]
    if ddp.static_graph:
        _refuse_to_start_without_sync(ddp)


def check_options(ddp: DistributedDataParallel) -> None:
    """Raise ``ValueError`` for options of DDP under which a hook cannot work."""
    if ddp.mixed_precision is not None:
        raise ValueError(
            "DistributedDataParallel(mixed_precision=...) takes the only communication hook for "
            "itself: use torch.autocast, or parameters in bfloat16"
        )
    if ddp._use_python_reducer:
        raise ValueError(_PYTHON_REDUCER)
    if getattr(ddp, "skip_all_reduce_unused_params", False):  # absent from PyTorch 2.6
        raise ValueError(
            "skip_all_reduce_unused_params=True may skip the last bucket, which ends a step: drop "
            "it; find_unused_parameters=True alone works"
        )
    if any(hasattr(p, "_in_backward_optimizers") for p in ddp.module.parameters()):
        raise ValueError(
            "an optimizer runs in the backward pass (_apply_optimizer_in_backward), for which DDP "
            "takes the only communication hook: remove it, and call step() after backward()"
        )
    # The logger also knows built-in hooks, which are missing in _comm_hooks.
    if name := ddp._get_ddp_logging_data().get("comm_hook"):
        raise ValueError(
            f"this model has a communication hook already, {name}, and DDP takes only one: "
            "register once, right after the model is wrapped"
        )
    if delayed := ddp._delay_all_reduce_params:
        warn_program(
            f"{len(delayed)} parameters in delay_all_reduce_named_params never reach a hook: DDP "
            "averages them uncompressed, and stats() does not count them"
        )


def check_private_options(ddp: DistributedDataParallel) -> None:
    """Raise ``ValueError`` for options of DDP by which it sends what no hook can protect."""
    if ddp.find_unused_parameters or ddp.static_graph:
        raise ValueError(
            "private: with find_unused_parameters or static_graph DDP tells all ranks which "
            "parameters a rank has used, without noise: leave both out, and use all parameters in "
            "each step"
        )
    ignored = [n for n, p in ddp.module.named_parameters() if n in ddp.parameters_to_ignore]
    if ignored:
        raise ValueError(
            f"private: {', '.join(ignored)} never reach a hook, so they would be trained without "
            "noise: drop delay_all_reduce_named_params and parameters to ignore"
        )


def named_parameters(ddp: DistributedDataParallel) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield (name, parameter), with names that do not change under ``torch.compile``."""
    for name, parameter in ddp.module.named_parameters():
        yield name.replace("_orig_mod.", ""), parameter


def hooks_of(module: nn.Module) -> list[Callable[..., Any] | str]:
    """Return the communication hook of a module under DDP or ``replicate``: a list of 0 or 1.

    PyTorch's built-in hooks are not functions; they are returned by their names.
    """
    if isinstance(module, DistributedDataParallel):
        ddp: Any = module
    elif is_replicated(module):
        from torch.distributed._composable.replicate import replicate

        composable: Any = replicate.state(module)
        if not composable.has_initialized:
            return [args[1] for args, _ in composable._comm_hook_args]
        ddp = composable._ddp
    else:
        return []
    name = ddp._get_ddp_logging_data().get("comm_hook")
    return [hook for hook, _ in ddp._comm_hooks] or ([name] if name else [])


def is_replicated(module: nn.Module) -> bool:
    """Return whether the composable ``replicate`` was applied to this module."""
    # replicate() changes the class of a module to one that derives from this one.
    return _has_base(module, "torch.distributed._composable.replicate", "DDP")


def require_bucket(bucket: object) -> None:
    """Raise ``ValueError`` unless ``bucket`` is a ``GradBucket`` from DDP's C++ reducer."""
    if not isinstance(bucket, dist.GradBucket):  # type: ignore[attr-defined]
        raise ValueError(_PYTHON_REDUCER)


def gradients_in(bucket: dist.GradBucket) -> list[torch.Tensor]:  # type: ignore[name-defined]
    """Return views of a bucket's gradients in the shapes of its parameters.

    ``bucket.gradients()`` reads elements in the order of the shape, but DDP stores them in the
    memory order of the parameter: with ``channels_last`` the orders differ.
    """
    parameters = bucket.parameters()
    sizes = [p.numel() for p in parameters]
    if sum(sizes) != bucket.buffer().numel():  # DDP gives views of complex gradients as real ones
        raise ValueError("complex parameters cannot be exchanged: split them into real ones")
    pieces = bucket.buffer().split(sizes)
    return [
        piece.view(p.shape)
        if p.is_contiguous() or not _is_dense(p)
        else piece.as_strided(p.shape, p.stride(), piece.storage_offset())
        for p, piece in zip(parameters, pieces, strict=True)
    ]


def loss_scale_of(model: nn.Module) -> Callable[[], float] | None:
    """Return a function that returns a Fabric or Lightning model's loss scale; None without one."""
    owner = getattr(model, "_trainer", None) or model
    strategy = getattr(owner, "strategy", None) or getattr(owner, "_strategy", None)
    for plugin in ("precision_plugin", "precision"):
        scaler = getattr(getattr(strategy, plugin, None), "scaler", None)
        if scaler is not None:
            return scaler.get_scale
    return None


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements fill its memory without gaps, in any dimension order."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


def _refuse_another(name: str, *args: object, **kwargs: object) -> NoReturn:
    raise ValueError(
        f"this model has a communication hook already, {name}, and DDP takes only one; an "
        "optimizer that runs in the backward pass needs one as well"
    )


def _refuse_to_start_without_sync(ddp: DistributedDataParallel) -> None:
    def check(module: nn.Module, args: tuple[Any, ...]) -> None:
        if not torch.is_grad_enabled():
            return
        if not ddp.require_backward_grad_sync:
            raise ValueError(
                "static_graph=True: the first backward pass must not be under no_sync(), where "
                "PyTorch fails with an internal assertion: accumulate from the second step on, "
                "or drop static_graph=True"
            )
        handle.remove()

    handle = ddp.register_forward_pre_hook(check)


def _outermost(module: nn.Module) -> Iterator[DistributedDataParallel]:
    """Yield the DDP models in ``module`` that are not inside another DDP model."""
    if isinstance(module, DistributedDataParallel):
        yield module
    else:
        for child in module.children():
            yield from _outermost(child)


def _advice(model: nn.Module) -> str:
    """Return the end of the error message for a model without DDP: its class and the remedy."""
    if any(is_replicated(m) or _has_base(m, "replicate", "Replicate") for m in model.modules()):
        return (
            f"got {_kind(model)} of replicate(), a private interface of PyTorch: use "
            "DistributedDataParallel, or fully_shard with comm_hooks.frameworks.fsdp"
        )
    if any(_has_base(m, "torch.distributed.fsdp", "FSDP", "Fully") for m in model.modules()):
        return f"got {_kind(model)}, sharded by FSDP: see comm_hooks.frameworks.fsdp"
    if _has_base(model, "deepspeed", "DeepSpeedEngine"):
        return f"got {_kind(model)}: see comm_hooks.frameworks.deepspeed"
    if isinstance(model, nn.DataParallel):
        return "got DataParallel, which has one process for all devices: start one per device"
    return (
        f"got {_kind(model)}: wrap the model first (Accelerate, Fabric and Lightning do so where "
        "there is more than one process)"
    )


def _has_base(module: nn.Module, package: str, *prefixes: str) -> bool:
    return any(
        package in kind.__module__ and kind.__name__.startswith(prefixes)
        for kind in type(module).__mro__
    )


def _kind(thing: object) -> str:
    return type(getattr(thing, "_orig_mod", thing)).__name__

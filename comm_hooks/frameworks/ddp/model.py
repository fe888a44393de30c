"""DistributedDataParallel: finding it inside what a framework returns, and what it cannot do."""

import functools
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class AccumulationWatch:
    """Warns, once, of gradients that are averaged again because nobody has cleared them.

    A second backward pass adds to what the first has averaged already.  Averaging that is legal,
    but a compressor then loses part of it a second time.

    Not noticed: with ``gradient_as_bucket_view=True``, where gradients always stand in one place.
    """

    def __init__(self) -> None:
        self._gradient: weakref.ref[torch.Tensor] | None = None
        self._version = -1
        self._warned = False

    def look(self, bucket: dist.GradBucket) -> None:  # type: ignore[name-defined]
        """Compare a bucket, always the first of a backward pass, with what it was last time."""
        if self._warned or bucket.buffer().is_sparse:
            return
        parameter = bucket.parameters()[0]
        gradient = parameter.grad
        if gradient is None or gradient.data_ptr() == bucket.buffer().data_ptr():
            return
        kept = self._gradient is not None and self._gradient() is gradient
        stepped = parameter._version != self._version
        self._gradient, self._version = weakref.ref(gradient), parameter._version
        if stepped or not kept:
            return
        # A rank that has left a join() passes zeros while its old gradients stand.
        if torch.equal(gradient, bucket.gradients()[0]):
            self._warned = True
            warnings.warn(
                "gradients are averaged again, with no optimizer step and no zero_grad() since "
                "they were: what has been averaged is compressed a second time; accumulate under "
                "no_sync() and leave it for the last backward pass only",
                stacklevel=2,
            )


class DataParallelModel:
    """The one model inside ``model`` whose gradients DDP averages, ready to take a hook.

    That is the ``DistributedDataParallel`` which is ``model``, or which is somewhere inside it
    (``torch.compile``, Fabric, a module of your own), or which a Lightning trainer made of it; or
    else the module in it that the composable ``replicate`` was applied to.

    Attributes:
        module: the module whose parameters are averaged.
        process_group: the group to average over; None for the default group.
        loss_scale: what returns the present loss scale, where the wrapper knows it (Fabric and
            Lightning), else None.

    Raises:
        ValueError: if there is none in ``model``, or several, or one that cannot take a hook.

    Example::

        >>> from comm_hooks.frameworks.ddp.model import DataParallelModel
        >>> DataParallelModel(torch.compile(ddp_model)).module is model
        True
    """

    def __init__(self, model: nn.Module) -> None:
        found = _find(model)
        self.loss_scale = _loss_scale(model)
        self._entrance: nn.Module = found
        self._composable: Any = None
        self._ddp: DistributedDataParallel | None = None
        if isinstance(found, DistributedDataParallel):
            self._ddp = found
            self.module: nn.Module = found.module
        else:
            from torch.distributed._composable.replicate import replicate

            self._composable = replicate.state(found)
            self.module = found
            # It makes its DDP in the first forward pass, from these arguments.
            self._ddp = self._composable._ddp if self._composable.has_initialized else None
        _require_free(self._options(), self._hook_name())

    @property
    def process_group(self) -> dist.ProcessGroup | None:
        if self._ddp is not None:
            return self._ddp.process_group
        mesh = self._options().get("device_mesh")
        return mesh.get_group() if mesh is not None else self._options().get("process_group")

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters under names that do not depend on ``torch.compile``."""
        for name, parameter in self.module.named_parameters():
            yield name.replace("_orig_mod.", ""), parameter

    def broadcast_bytes(self) -> int:
        """Return the bytes of buffers that DDP sends from one rank at every forward pass."""
        if self._ddp is None or not self._ddp.broadcast_buffers:
            return 0
        return sum(buffer.nbytes for buffer in self._ddp.modules_buffers)

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Register a hook, and refuse any other and what would break it from then on."""
        if self._ddp is not None:
            self._ddp.register_comm_hook(state, hook)
        else:
            self._composable._comm_hook_args.append(((state, hook), {}))
        # DDP would note the second hook before it fails.
        refuse = functools.partial(_refuse_another, hook.__name__)
        self._entrance.register_comm_hook = refuse  # type: ignore[assignment]
        if self._options().get("static_graph"):
            self._refuse_to_start_without_sync()

    def _options(self) -> dict[str, Any]:
        """Return the options of DDP that matter here, as it was or will be made."""
        if self._ddp is None:
            return dict(self._composable._init_kwargs, module=self.module)
        return {
            "mixed_precision": self._ddp.mixed_precision,
            "static_graph": self._ddp.static_graph,
            "delay_all_reduce_named_params": self._ddp._delay_all_reduce_params,
            "python_reducer": self._ddp._use_python_reducer,
            # PyTorch 2.6 does not have it.
            "skip_all_reduce_unused_params": getattr(
                self._ddp, "skip_all_reduce_unused_params", False
            ),
            "module": self._ddp.module,
        }

    def _hook_name(self) -> str | None:
        if self._ddp is not None:
            # The logger knows built-in hooks too, which _comm_hooks does not.
            return self._ddp._get_ddp_logging_data().get("comm_hook")
        pending = self._composable._comm_hook_args
        return pending[0][0][1].__name__ if pending else None

    def _refuse_to_start_without_sync(self) -> None:
        def check(module: nn.Module, args: tuple[Any, ...]) -> None:
            if not torch.is_grad_enabled():
                return
            composable = self._composable
            syncs = not composable._no_sync if composable else module.require_backward_grad_sync
            if not syncs:
                raise ValueError(
                    "static_graph=True: the first backward pass must not be under no_sync(), where "
                    "PyTorch fails with an internal assertion: accumulate from the second step on, "
                    "or drop static_graph=True"
                )
            handle.remove()

        handle = self._entrance.register_forward_pre_hook(check)


def hooks_of(module: nn.Module) -> list[Callable[..., Any] | str]:
    """Return the communication hooks of a module under DDP or ``replicate``, in fact one at most.

    PyTorch's built-in ones, which are not functions, by their name.
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


def require_bucket(bucket: object) -> None:
    """Raise ``ValueError`` unless it is a bucket of gradients that DDP's C++ reducer passes."""
    if not isinstance(bucket, dist.GradBucket):  # type: ignore[attr-defined]
        raise ValueError(_PYTHON_REDUCER)


def gradients_in(bucket: dist.GradBucket) -> list[torch.Tensor]:  # type: ignore[name-defined]
    """Return views of a bucket in the shapes of its parameters, each element at its own place.

    ``bucket.gradients()`` takes elements as they lie in memory, and DDP lays them out as in the
    parameter: with ``channels_last`` both are not the same.
    """
    parameters = bucket.parameters()
    pieces = bucket.buffer().split([p.numel() for p in parameters])
    return [
        piece.view(p.shape)
        if p.is_contiguous() or not _is_dense(p)
        else piece.as_strided(p.shape, p.stride(), piece.storage_offset())
        for p, piece in zip(parameters, pieces, strict=True)
    ]


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements fill its memory, in whatever order: DDP keeps that."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()


_PYTHON_REDUCER = (
    "torch._dynamo.config.optimize_ddp = 'python_reducer' calls hooks parameter by parameter and "
    "ignores what they return: set it to 'ddp_optimizer', the default, before DDP is constructed"
)


def _require_free(options: dict[str, Any], hook_name: str | None) -> None:
    """Raise ``ValueError`` for what keeps a hook from working; warn of what it does not see."""
    if options.get("mixed_precision") is not None:
        raise ValueError(
            "DistributedDataParallel(mixed_precision=...) takes the only communication hook for "
            "itself: use torch.autocast, or parameters in bfloat16"
        )
    if options.get("python_reducer"):
        raise ValueError(_PYTHON_REDUCER)
    if options.get("skip_all_reduce_unused_params"):
        raise ValueError(
            "skip_all_reduce_unused_params=True may skip the last bucket, by which steps are "
            "counted: drop it; find_unused_parameters=True alone works"
        )
    if any(hasattr(p, "_in_backward_optimizers") for p in options["module"].parameters()):
        raise ValueError(
            "an optimizer runs in the backward pass (_apply_optimizer_in_backward), for which DDP "
            "takes the only communication hook: step the optimizer after backward()"
        )
    if hook_name:
        raise ValueError(
            f"this model has a communication hook already, {hook_name}, and DDP takes only one: "
            "register once, right after the model is wrapped"
        )
    delayed = options.get("delay_all_reduce_named_params")
    if delayed:
        warnings.warn(
            f"{len(delayed)} parameters in delay_all_reduce_named_params never reach a hook: DDP "
            "averages them uncompressed, and stats() does not count them",
            stacklevel=4,
        )


def _refuse_another(name: str, *args: object, **kwargs: object) -> NoReturn:
    raise ValueError(
        f"this model has a communication hook already, {name}, and DDP takes only one; an "
        "optimizer that runs in the backward pass needs one as well"
    )


def _find(model: nn.Module) -> nn.Module:
    found = find_data_parallel(model)
    if found is None:
        raise ValueError(f"register() needs a DistributedDataParallel model, {_advice(model)}")
    return found


def find_data_parallel(model: nn.Module) -> nn.Module | None:
    """Return the one module inside a model that DDP or ``replicate`` averages; None if none is.

    Raises:
        ValueError: if there are several, and for what is no model.
    """
    # A LightningModule is inside the DDP model that its trainer has made of it.
    trainer = getattr(model, "_trainer", None)
    if trainer is not None and isinstance(model, nn.Module):
        model = trainer.strategy.model
    if not isinstance(model, nn.Module):
        raise ValueError(f"register() takes a model, got {_kind(model)}")
    found = list(_outermost(model, lambda m: isinstance(m, DistributedDataParallel)))
    found = found or list(_outermost(model, is_replicated))
    if len(found) > 1:
        raise ValueError(
            f"{_kind(model)} has {len(found)} DistributedDataParallel models inside: register each"
        )
    return found[0] if found else None


def _outermost(model: nn.Module, wanted: Callable[[nn.Module], bool]) -> Iterable[nn.Module]:
    """Yield the wanted modules that are not inside another one, each once."""
    pending, seen = [model], set()
    while pending:
        module = pending.pop()
        if module in seen:
            continue
        seen.add(module)
        if wanted(module):
            yield module
        else:
            pending.extend(module.children())


def is_replicated(module: nn.Module) -> bool:
    """Return whether the composable ``replicate`` was applied to this module."""
    # What replicate() makes of a module is an instance of a class derived from this one.
    return _has_base(module, "torch.distributed._composable.replicate", "DDP")


def _advice(model: nn.Module) -> str:
    """Return what to do with a model that has no DDP."""
    if any(_has_base(m, "replicate_with_fsdp", "ReplicateModule") for m in model.modules()):
        return (
            f"got {_kind(model)} of replicate_with_fsdp, which has no place for a hook: use "
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
    """Return whether a class of a package, which need not be installed, is among the bases."""
    return any(
        package in kind.__module__ and kind.__name__.startswith(prefixes)
        for kind in type(module).__mro__
    )


def _kind(thing: object) -> str:
    return type(getattr(thing, "_orig_mod", thing)).__name__


def _loss_scale(model: nn.Module) -> Callable[[], float] | None:
    """Return how to ask for the loss scale of a Fabric or Lightning model, if it has one."""
    owner = getattr(model, "_trainer", None) or model
    strategy = getattr(owner, "strategy", None) or getattr(owner, "_strategy", None)
    for plugin in ("precision_plugin", "precision"):
        scaler = getattr(getattr(strategy, plugin, None), "scaler", None)
        if scaler is not None:
            return scaler.get_scale
    return None

"""Checks that a model is fit for private training: clipping must bound a sample's influence."""

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel

from comm_hooks.frameworks.ddp.hook import skip_hook
from comm_hooks.frameworks.ddp.model import hooks_of
from comm_hooks.optim.private.errors import PrivacyError
from comm_hooks.wire.checksum import fingerprint


def check_model(model: nn.Module) -> None:
    """Refuse a model that cannot be trained privately, before any sample is used.

    Args:
        model: the model to train, possibly in ``DistributedDataParallel``.

    Raises:
        PrivacyError: for modules that mix the samples of a batch or keep statistics of them (batch
            normalization, and instance normalization with running statistics, unless they are in
            ``eval()`` mode), for embeddings
            with rows that the forward pass writes (``max_norm``), and for a communication hook,
            except :func:`~comm_hooks.skip_hook`, which sends nothing.
        ValueError: for complex or sharded parameters, and for a ``DeepSpeedEngine``.

    Not detected: modules of your own that mix samples.

    Example::

        >>> from torch import nn
        >>> from comm_hooks.optim.private.gradients.model_checks import check_model
        >>> check_model(nn.Sequential(nn.Linear(8, 8), nn.GroupNorm(2, 8)))
    """
    # Without an import of DeepSpeed the model cannot be one of its engines.
    deepspeed = sys.modules.get("deepspeed")
    if deepspeed is not None and isinstance(model, deepspeed.DeepSpeedEngine):
        raise ValueError(
            "the model is a DeepSpeedEngine, which averages raw gradients; private training needs "
            "those of single samples: train the engine's module without DeepSpeed"
        )
    trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
    for what, names in (
        ("complex", [n for n, p in trainable.items() if p.is_complex()]),
        ("sharded", [n for n, p in trainable.items() if isinstance(p, DTensor)]),
    ):
        if names:
            raise ValueError(f"{what} parameters are not supported: {', '.join(names)}")
    for is_refused, problem, instead in _REFUSED:
        if found := [name or "the model" for name, m in model.named_modules() if is_refused(m)]:
            raise PrivacyError(f"{problem}: {', '.join(found)}. {instead}")
    for hook in [hook for module in model.modules() for hook in hooks_of(module)]:
        if hook is not skip_hook:
            raise PrivacyError(
                f"the communication hook {getattr(hook, '__name__', hook)} would see the raw "
                "gradient, neither clipped nor noised: give the engine an exchange instead, and "
                "register no hook or comm_hooks.skip_hook"
            )


def padding_rows(model: nn.Module) -> list[tuple[torch.Tensor, int]]:
    """Return the weights and rows of embeddings' ``padding_idx``, whose gradients are always zero.

    Noise would move them.  Rows of weights that other modules use, too, are trained there.
    """
    modules = list(model.modules())
    uses: Counter[torch.Tensor | None] = Counter(
        p for module in modules for p in module._parameters.values()
    )
    embeddings = [m for m in modules if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    return [
        (m.weight, m.padding_idx)
        for m in embeddings
        if m.padding_idx is not None and m.weight.requires_grad and uses[m.weight] == 1
    ]


def refuse_later_hooks(model: nn.Module) -> None:
    """Make ``register_comm_hook`` raise ``PrivacyError`` on every DDP module inside a model."""
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            module.register_comm_hook = _refuse_later_hook  # type: ignore[method-assign]


def _refuse_later_hook(state: object, hook: object) -> None:
    raise PrivacyError(
        "register_comm_hook: this model is trained privately, and DDP averages nothing: a "
        "communication hook would never be called. Pass the exchange to make_private() instead"
    )


@contextmanager
def unchanged_modules(trained: Iterable[torch.Tensor]) -> Iterator[None]:
    """Refuse changes of the modules that are called inside the context.

    Args:
        trained: the parameters that may change; all others, and all buffers, may not.

    Raises:
        PrivacyError: at the end of the context, if another parameter or a buffer has changed.
    """
    may_change = set(map(id, trained))
    before: dict[nn.Module, dict[str, torch.Tensor]] = {}

    # Fingerprints, since neither batch norm's kernels nor writes to p.data count as writes.
    def values(module: nn.Module) -> dict[str, torch.Tensor]:
        return {n: fingerprint([t]) for n, t in _own(module) if id(t) not in may_change}

    def note(module: nn.Module, arguments: object) -> None:
        if module not in before:
            before.update({part: values(part) for part in module.modules() if part not in before})

    hook = register_module_forward_pre_hook(note)
    try:
        yield
    finally:
        hook.remove()
    changed = {
        f"{type(module).__name__}.{name}"
        for module, was in before.items()
        for name, value in values(module).items()
        if name not in was or value.item() != was[name].item()
    }
    if changed:
        raise PrivacyError(
            "a client's turn has changed what its rounds do not train: "
            f"{', '.join(sorted(changed))}. It would be published without noise. Give the rounds "
            "all parameters that train, restore a client's own ones at the end of its turn, and "
            "use GroupNorm or LayerNorm, or eval() for modules with running statistics"
        )


@contextmanager
def unwritten(model: nn.Module, *, in_first_pass: bool = False) -> Iterator[None]:
    """Refuse writes to a model's buffers and parameters inside the context.

    Args:
        model: the model, whose buffers are restored.
        in_first_pass: whether to compare and restore values of parameters, too, which some modules
            initialize by their first inputs.

    Raises:
        PrivacyError: at the end of the context, if a buffer or parameter was written to.
    """
    before = {
        f"{path}.{name}".strip("."): (module, name, tensor, tensor._version, value)
        for path, module in model.named_modules()
        for name, tensor in _own(module)
        for is_read in [in_first_pass or not isinstance(tensor, nn.Parameter)]
        for value in [tensor.detach().clone() if is_read else None]
    }
    written = []
    try:
        yield
    finally:
        for path, module in model.named_modules():
            for name, _ in _own(module):
                if (where := f"{path}.{name}".strip(".")) not in before:
                    delattr(module, name)
                    written.append(where)
        for where, (module, name, tensor, version, value) in before.items():
            is_same = getattr(module, name, None) is tensor and tensor._version == version
            # The kernels of batch norm do not count that they have written.
            if not is_same or (value is not None and not _equal(tensor, value)):
                if value is not None:
                    with torch.no_grad():
                        tensor.copy_(value)
                setattr(module, name, tensor)
                written.append(where)
    if written:
        raise PrivacyError(
            "the forward pass writes to the model, which would keep a trace of samples without "
            f"noise: {', '.join(written)}. Use modules that do not, eval() for those "
            "that write in training only, or initialize them by public data"
        )


def _equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.layout is torch.strided:
        return torch.equal(one, other)
    return bool(fingerprint([one]) == fingerprint([other]))


def _own(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [*module.named_buffers(recurse=False), *module.named_parameters(recurse=False)]


def replace_batch_norm(model: nn.Module, groups: int = 32) -> nn.Module:
    """Replace batch normalization by group normalization, which sees one sample at a time.

    Weights and biases are kept, running statistics are lost: train the model anew, or start from
    one that was trained with group normalization.

    Args:
        model: the model, which is changed in place.  Make the optimizer afterwards.
        groups: the number of groups; if it does not divide the number of channels, the greatest
            common divisor of both is taken.

    Returns:
        The same model; a new module only if the model itself is a batch normalization.

    Raises:
        ValueError: if ``groups`` is not positive.

    Example::

        >>> from torch import nn
        >>> from comm_hooks.optim.private.gradients.model_checks import replace_batch_norm
        >>> replace_batch_norm(nn.Sequential(nn.BatchNorm2d(48)))[0].num_groups
        16
    """
    if groups < 1:
        raise ValueError(f"replace_batch_norm: groups must be positive, got {groups!r}")
    replaced = {m: _group_norm(m, groups) for m in model.modules() if isinstance(m, _BatchNorm)}
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, _BatchNorm):
                setattr(module, name, replaced[child])
    return replaced.get(model, model)  # type: ignore[call-overload]


def _group_norm(module: _BatchNorm, groups: int) -> nn.GroupNorm:
    channels = module.num_features
    norm = nn.GroupNorm(math.gcd(groups, channels), channels, module.eps, module.affine)
    if module.affine:
        # The parameters themselves, with their dtype, device and whether they are frozen.
        norm.weight, norm.bias = module.weight, module.bias
    return norm.train(module.training)


# Refused modules: the test, the problem, and the alternative.
_REFUSED: tuple[tuple[Callable[[Any], bool], str, str], ...] = (
    (
        lambda module: (
            isinstance(module, _BatchNorm) and (module.training or module.running_mean is None)
        ),
        "batch normalization mixes samples, so that clipping does not bound their influence",
        "Use GroupNorm (replace_batch_norm(model) makes it) or LayerNorm, or eval() for them",
    ),
    (
        lambda module: module.training and getattr(module, "running_mean", None) is not None,
        "running statistics of the samples are part of the model but have no noise",
        "Use track_running_stats=False, or eval() for these modules",
    ),
    (
        lambda module: (
            isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None
        ),
        "max_norm shortens the rows that a batch looks up, in the forward pass, without noise",
        "Leave max_norm out",
    ),
)

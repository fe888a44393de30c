"""Adam and AMSGrad against an independent NumPy reference and against torch's."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, OneCycleLR
from torch.utils._python_dispatch import TorchDispatchMode

from comm_hooks.optim.adam import Adam, AMSGrad
from tests.optim.gradients import HYPER, SHAPES, STEPS, gradient, parameters_of, run, start

each_class = pytest.mark.parametrize("optimizer_class", [Adam, AMSGrad])
each_correction = pytest.mark.parametrize("bias_correction", [False, True])
each_path = pytest.mark.parametrize("foreach", [None, False])


def reference(
    amsgrad: bool, bias_correction: bool, weight_decay: float, maximize: bool
) -> dict[str, np.ndarray]:
    """The docstrings' algorithm, without any of the library."""
    lr, (beta1, beta2), eps = HYPER["lr"], HYPER["betas"], HYPER["eps"]
    results = {}
    for name in SHAPES:
        x = start(name)
        m = v = v_hat = np.zeros_like(x)
        t = 0
        for step in range(STEPS):
            u = gradient(name, step)
            if u is None:
                continue
            t += 1
            m = beta1 * m + (1 - beta1) * u
            v = beta2 * v + (1 - beta2) * u**2
            v_hat = np.maximum(v_hat, v)
            second = v_hat if amsgrad else v
            c1, c2 = (1 - beta1**t, 1 - beta2**t) if bias_correction else (1.0, 1.0)
            direction = (m / c1) / (np.sqrt(second / c2) + eps)
            x = (1 - lr * weight_decay) * x - lr * (-direction if maximize else direction)
        results[name] = x
    return results


@each_class
@each_correction
@each_path
@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize("maximize", [False, True])
def test_matches_the_reference(
    optimizer_class: type[Adam] | type[AMSGrad],
    bias_correction: bool,
    foreach: bool | None,
    weight_decay: float,
    maximize: bool,
) -> None:
    parameters = parameters_of()
    optimizer = optimizer_class(
        parameters.values(),
        **HYPER,
        weight_decay=weight_decay,
        bias_correction=bias_correction,
        foreach=foreach,
        maximize=maximize,
    )
    actual = run(parameters, optimizer)
    is_amsgrad = optimizer_class is AMSGrad
    expected = reference(is_amsgrad, bias_correction, weight_decay, maximize)
    for name in SHAPES:
        np.testing.assert_allclose(actual[name].numpy(), expected[name], rtol=1e-11, atol=1e-13)


@each_class
@each_path
@pytest.mark.parametrize("weight_decay", [0.0, 0.3])
@pytest.mark.parametrize(
    "schedule",
    [
        lambda o: CosineAnnealingLR(o, STEPS),
        # It changes betas[0], too.
        lambda o: OneCycleLR(o, max_lr=0.1, total_steps=STEPS + 1),
    ],
    ids=["cosine", "one cycle"],
)
def test_with_bias_correction_it_is_torchs_adamw_also_under_schedulers(
    optimizer_class: type[Adam] | type[AMSGrad],
    foreach: bool | None,
    weight_decay: float,
    schedule: Callable[[torch.optim.Optimizer], LRScheduler],
) -> None:
    hyper = HYPER | {"weight_decay": weight_decay, "foreach": foreach}
    ours, theirs = parameters_of(), parameters_of()
    optimizer = optimizer_class(ours.values(), **hyper, bias_correction=True)
    is_amsgrad = optimizer_class is AMSGrad
    peer: torch.optim.Optimizer = torch.optim.AdamW(theirs.values(), **hyper, amsgrad=is_amsgrad)
    if not weight_decay:
        peer = torch.optim.Adam(theirs.values(), **hyper, amsgrad=is_amsgrad)
    actual = run(ours, optimizer, schedule(optimizer))
    expected = run(theirs, peer, schedule(peer))
    for name in SHAPES:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-11, atol=1e-13)


class Kernels(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


@each_class
@each_correction
def test_kernels_do_not_multiply_with_parameters_and_wait_for_nothing(
    optimizer_class: type[Adam] | type[AMSGrad], bias_correction: bool
) -> None:
    launched = []
    for count in (2, 20):
        xs = [nn.Parameter(torch.ones(3)) for _ in range(count)]
        optimizer = optimizer_class(xs, weight_decay=0.1, bias_correction=bias_correction)
        for _ in range(2):
            for x in xs:
                x.grad = torch.ones(3)
            with Kernels() as kernels:
                optimizer.step()
        launched.append(kernels.names)
    assert launched[0] == launched[1]
    assert not any("_local_scalar_dense" in name for name in launched[0])


@each_class
def test_one_group_may_mix_dtypes(optimizer_class: type[Adam] | type[AMSGrad]) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.bfloat16]
    results = []
    for together in (True, False):
        xs = [nn.Parameter(torch.linspace(1, 2, 9, dtype=d)) for d in dtypes]
        for x in xs:
            x.grad = x.detach() - 1.5
        groups: list[Any] = [xs] if together else [[x] for x in xs]
        for members in groups:
            optimizer_class(members, lr=0.1, weight_decay=0.1).step()
        results.append(xs)
    for mixed, alone in zip(*results, strict=True):
        assert mixed.dtype == alone.dtype
        assert torch.equal(mixed, alone)


@each_class
@each_path
@pytest.mark.parametrize("kind", ["sparse", "complex"])
def test_a_refused_gradient_changes_nothing(
    optimizer_class: type[Adam] | type[AMSGrad], foreach: bool | None, kind: str
) -> None:
    x = nn.Parameter(torch.ones(2))
    x.grad = torch.ones(2)
    if kind == "sparse":
        table = nn.Embedding(4, 2, sparse=True)
        table(torch.tensor([1])).sum().backward()
        bad = table.weight
    else:
        bad = nn.Parameter(torch.ones(2, dtype=torch.complex64))
        bad.grad = torch.ones_like(bad)
    optimizer = optimizer_class([{"params": [x]}, {"params": [bad]}], foreach=foreach)
    message = f"^{optimizer_class.__name__} does not support {kind} gradients: "
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert torch.equal(x, torch.ones(2))
    assert not optimizer.state

"""What every optimizer over noised gradients promises, whatever it makes of them."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.studies.private_optimizers.baselines import PDADPMD, DPAdamPub, DPRPub
from comm_hooks.optim.private import (
    DP2,
    DPSGD,
    AdaDPS,
    AdaS,
    DPAdam,
    DPAdamBC,
    DPMicroAdam,
    DPRMSProp,
    NoisedOptimizer,
    ScaleThenPrivatize,
)
from tests.optim.gradients import SHAPES, parameters_of, run
from tests.optim.private.saving import resumes_exactly


def public() -> dict[str, torch.Tensor]:
    return {name: torch.full(shape, 0.3) for name, shape in SHAPES.items()}


MAKE: dict[str, Callable[..., NoisedOptimizer]] = {
    "DPSGD": partial(DPSGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    "DPRMSProp": partial(DPRMSProp, lr=0.01, momentum=0.5, weight_decay=0.1),
    "DPAdam": partial(DPAdam, lr=0.01, weight_decay=0.1),
    "DPAdamBC": partial(DPAdamBC, lr=0.01, weight_decay=0.1),
    "DPMicroAdam": partial(DPMicroAdam, lr=0.01, weight_decay=0.1, density=0.2, min_numel=16),
    "DP2": partial(DP2, lr=0.1, sgd_steps=2, preconditioned_steps=2, weight_decay=0.1),
    "AdaDPS": partial(AdaDPS, lr=0.1, public_gradients=public, momentum=0.5, weight_decay=0.1),
    "AdaS": partial(AdaS, lr=0.1, public_gradients=public, preconditioner="adam"),
    "ScaleThenPrivatize": partial(ScaleThenPrivatize, lr=0.01, weight_decay=0.1),
    "DPRPub": partial(DPRPub, lr=0.01, public_gradients=public, weight_decay=0.1),
    "DPAdamPub": partial(DPAdamPub, lr=0.01, public_gradients=public, weight_decay=0.1),
    "PDADPMD": partial(PDADPMD, lr=0.1, public_gradients=public, total_steps=9, momentum=0.5),
}
# Public gradients go by names, which parameters without them do not have.
WITHOUT_NAMES = [n for n, make in MAKE.items() if "public_gradients" not in make.keywords]  # type: ignore[attr-defined]


def step(optimizer: NoisedOptimizer) -> None:
    """Do what the engine does."""
    optimizer.noise_variance = 0.01
    optimizer.transform()
    optimizer.step()


def advance(parameters: Any, optimizer: Any, steps: range) -> None:
    run(parameters, optimizer, steps=steps, step=lambda: step(optimizer))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", MAKE)
def test_a_resumed_run_ends_as_one_that_was_not_interrupted(name: str, dtype: torch.dtype) -> None:
    assert resumes_exactly(MAKE[name], dtype, advance=advance)


@pytest.mark.parametrize("name", WITHOUT_NAMES)
def test_narrow_parameters_are_rounded_once(name: str) -> None:
    dtype = torch.bfloat16
    generator = torch.Generator().manual_seed(0)
    narrow = nn.Parameter(torch.randn(1000, generator=generator).to(dtype))
    wide = nn.Parameter(narrow.detach().float())
    wide.grad = torch.randn(1000, generator=generator).to(dtype).float()
    narrow.grad = wide.grad.to(dtype)
    for x in (narrow, wide):
        optimizer = MAKE[name]([x])
        step(optimizer)
        kept = [v for k, v in optimizer.state[x].items() if k not in ("step", "noise_avg")]
        assert all(value.dtype == torch.float32 for value in kept)
    assert torch.equal(narrow, wide.to(dtype))
    assert not torch.equal(wide, narrow.float())


@pytest.mark.parametrize("name", WITHOUT_NAMES)
def test_groups_may_differ_and_mix_dtypes(name: str) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.bfloat16]
    results = []
    for together in (True, False):
        xs = [nn.Parameter(torch.linspace(1, 2, 9, dtype=d)) for d in dtypes]
        frozen = nn.Parameter(torch.ones(3))
        for x in [*xs, frozen]:
            x.grad = x.detach() - 1.52
        for members in [xs] if together else [[x] for x in xs]:
            optimizer = MAKE[name](members)
            optimizer.add_param_group({"params": [frozen], "lr": 0.0})
            step(optimizer)
        assert torch.equal(frozen, torch.ones(3))
        results.append(xs)
    for mixed, alone in zip(*results, strict=True):
        assert mixed.dtype == alone.dtype
        assert torch.equal(mixed, alone)


@pytest.mark.parametrize("kind", ["sparse", "complex"])
@pytest.mark.parametrize("name", WITHOUT_NAMES)
def test_a_refused_gradient_changes_nothing(name: str, kind: str) -> None:
    x = nn.Parameter(torch.ones(2))
    x.grad = torch.ones(2)
    bad = nn.Parameter(torch.ones(2, dtype=torch.complex64 if kind == "complex" else torch.float32))
    bad.grad = torch.ones_like(bad).to_sparse() if kind == "sparse" else torch.ones_like(bad)
    optimizer = MAKE[name]([{"params": [x]}, {"params": [bad]}])
    if not isinstance(optimizer, DP2 | ScaleThenPrivatize):  # whose transform makes states
        optimizer.transform()
    optimizer.noise_variance = 0.01
    with pytest.raises(ValueError, match=f"^{name} does not support {kind} gradients: "):
        optimizer.step()
    assert torch.equal(x, torch.ones(2))
    assert not optimizer.state


BETAS = {"DPRMSProp": (0.9,), "DP2": (0.9,), "DPAdamPub": (0.9, 0.9, 0.9)}
BAD: list[tuple[str, dict[str, Any], str]] = [
    *((name, {"lr": -1.0}, r"lr must lie in \[0, inf\), got -1.0") for name in MAKE),
    *(
        (name, {"betas": (1.0, *BETAS.get(name, (0.9, 0.9))[1:])}, r"betas must lie in \[0, 1\).*")
        for name in MAKE
        if name not in ("DPSGD", "PDADPMD", "DPRPub")
    ),
    ("DPMicroAdam", {"density": 0.0}, "density must lie in .* got 0.0"),
    ("DPMicroAdam", {"window": 0}, "window must be an integer of at least 1, got 0"),
    ("DPMicroAdam", {"bias_correction": "all"}, "bias_correction must be one of .* got 'all'"),
    ("DPMicroAdam", {"value_bits": 2}, "value_bits must be one of 4, 16, 32, got 2"),
    ("DPMicroAdam", {"block_size": 1 << 17}, "block_size must be at most 65536, got 131072"),
    ("DPMicroAdam", {"min_numel": 1.5}, "min_numel must be an integer of at least 1, got 1.5"),
    ("DPSGD", {"momentum": 0.0, "nesterov": True}, "nesterov needs momentum: set .*, say"),
    ("DPAdam", {"eps": -1e-8}, r"eps must lie in \[0, inf\), got -1e-08"),
    ("DPAdamBC", {"gamma": -1.0}, r"gamma must lie in \(0, inf\), got -1.0"),
    *(
        (name, {"eps": 0.0}, r"eps must lie in \(0, inf\), got 0.0")
        for name in (*BETAS, "AdaDPS", "AdaS", "DPRPub", "ScaleThenPrivatize")
    ),
]


@pytest.mark.parametrize("name", ["AdaDPS", "DP2", "ScaleThenPrivatize"])
def test_a_step_without_transform_is_refused(name: str) -> None:
    parameters = parameters_of()
    optimizer = MAKE[name](parameters.items())
    advance(parameters, optimizer, range(1))
    with pytest.raises(RuntimeError, match=rf"{name}: transform\(\) was not called for this step"):
        optimizer.step()


@pytest.mark.parametrize(("name", "options", "message"), BAD, ids=str)
def test_bad_hyperparameters_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    x, y = ((n, nn.Parameter(torch.zeros(2))) for n in "xy")
    with pytest.raises(ValueError, match=f"^{name}: {message}$"):
        MAKE[name]([x], **options)
    optimizer = MAKE[name]([x])
    with pytest.raises(ValueError, match=f"^{name}: {message}$"):
        optimizer.add_param_group({"params": [y], **options})
    assert len(optimizer.param_groups) == 1

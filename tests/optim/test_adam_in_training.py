"""Adam and AMSGrad with what surrounds an optimizer: scalers, compilers, checkpoints, ranks."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from comm_hooks.optim.adam import Adam, AMSGrad
from tests.optim.gradients import HYPER, SHAPES, STEPS, parameters_of, run
from tests.optim.scenarios import RanksOf, rarely

each_class = pytest.mark.parametrize("optimizer_class", [Adam, AMSGrad])
each_path = pytest.mark.parametrize("foreach", [None, False])


@each_class
@each_path
def test_under_a_grad_scaler(
    optimizer_class: type[Adam] | type[AMSGrad], foreach: bool | None
) -> None:
    """Scaling by powers of two changes no bit, and a step that overflows did not happen."""
    models = [nn.Linear(5, 3) for _ in "ab"]
    models[1].load_state_dict(models[0].state_dict())
    optimizers = [optimizer_class(m.parameters(), lr=0.05, foreach=foreach) for m in models]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    for t in range(8):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(t))
        overflows = t in (2, 5)
        optimizers[0].zero_grad()
        loss = models[0](x).square().mean() * (float("inf") if overflows else 1)
        scaler.scale(loss).backward()
        scaler.step(optimizers[0])
        scaler.update()
        if not overflows:
            optimizers[1].zero_grad()
            models[1](x).square().mean().backward()
            optimizers[1].step()
        assert all(map(torch.equal, models[0].parameters(), models[1].parameters()))
    assert all(s["step"] == 6 for s in optimizers[0].state.values())


@pytest.mark.parametrize(
    ("optimizer_class", "options"),
    [
        (AMSGrad, {"weight_decay": 0.1}),
        *rarely(
            (Adam, {"bias_correction": True, "maximize": True}),
            (AMSGrad, {"bias_correction": True, "foreach": False}),
        ),
    ],
)
def test_the_step_compiles_to_one_graph_whatever_the_learning_rate(
    optimizer_class: type[Adam] | type[AMSGrad], options: dict[str, Any]
) -> None:
    results = []
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    for compiled in (False, True):
        torch._dynamo.reset()
        parameters = parameters_of(torch.float32)
        optimizer = optimizer_class(parameters.values(), **HYPER, **options)
        update: Callable[[], object] = optimizer.step
        if compiled:
            update = torch.compile(optimizer.step, backend=counter, fullgraph=True)

        def step(optimizer: Adam | AMSGrad = optimizer, update: Any = update) -> None:
            update()
            optimizer.param_groups[0]["lr"] *= 0.9

        # Only such in which all parameters have gradients.
        steps = range(0, STEPS, 3)
        results.append(run(parameters, optimizer, steps=steps, step=step))
    for name in SHAPES:
        torch.testing.assert_close(results[1][name], results[0][name], rtol=1e-6, atol=1e-6)
    # Once without and once with a state; the second learning rate makes it a variable.
    assert counter.frame_count <= 3


@each_class
def test_it_goes_on_where_torchs_adamw_stopped(
    optimizer_class: type[Adam] | type[AMSGrad],
) -> None:
    theirs, ours = parameters_of(), parameters_of()
    is_amsgrad = optimizer_class is AMSGrad
    peer = torch.optim.AdamW(theirs.values(), **HYPER, amsgrad=is_amsgrad)
    for name, value in run(theirs, peer, steps=range(9)).items():
        ours[name].data.copy_(value)
    optimizer = optimizer_class(ours.values(), bias_correction=True)
    optimizer.load_state_dict(copy.deepcopy(peer.state_dict()))
    expected = run(theirs, peer, steps=range(9, STEPS))
    actual = run(ours, optimizer, steps=range(9, STEPS))
    for name in SHAPES:
        torch.testing.assert_close(actual[name], expected[name], rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize(
    ("saved", "own"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float64),
        (torch.float64, torch.bfloat16),
    ],
    ids=str,
)
def test_a_checkpoint_in_another_precision_is_brought_to_this_ones(
    saved: torch.dtype, own: torch.dtype
) -> None:
    """Torch's AdamW has bfloat16 moments for bfloat16 parameters."""
    theirs, ours = parameters_of(saved), parameters_of(own)
    peer = torch.optim.AdamW(theirs.values(), **HYPER, amsgrad=True)
    run(theirs, peer, steps=range(3))
    optimizer = AMSGrad(ours.values())
    optimizer.load_state_dict(copy.deepcopy(peer.state_dict()))
    run(ours, optimizer, steps=[3])
    for parameter in ours.values():
        state = optimizer.state[parameter]
        assert state["step"] > 2
        precise = torch.promote_types(own, torch.float32)
        assert {v.dtype for k, v in state.items() if k != "step"} == {precise}


def test_amsgrad_goes_on_where_adam_stopped() -> None:
    """From then on it takes the maximum."""
    parameters = parameters_of()
    adam, amsgrad = (c(parameters.values(), **HYPER) for c in (Adam, AMSGrad))
    run(parameters, adam, steps=range(9))
    amsgrad.load_state_dict(copy.deepcopy(adam.state_dict()))
    run(parameters, adam, steps=[9])
    run(parameters, amsgrad, steps=[9])
    for parameter in parameters.values():
        v = adam.state[parameter]["exp_avg_sq"]
        assert torch.equal(amsgrad.state[parameter]["max_exp_avg_sq"], v)


def train_sharded(
    optimizer_class: type[Adam] | type[AMSGrad], dtype: torch.dtype, foreach: bool | None
) -> bool:
    models = []
    for is_sharded in (True, False):
        torch.manual_seed(7)
        model = nn.Linear(4, 3).to(dtype)
        if is_sharded:
            fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        optimizer = optimizer_class(
            model.parameters(), lr=0.02, weight_decay=0.1, bias_correction=True, foreach=foreach
        )
        for step in range(4):
            optimizer.zero_grad()
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
            model(x.to(dtype)).square().mean().backward()
            optimizer.step()
        models.append(model)
    sharded, whole = ([*model.parameters()] for model in models)
    assert all(isinstance(p, DTensor) for p in sharded)
    return all(torch.equal(p.full_tensor(), q) for p, q in zip(sharded, whole, strict=True))


@pytest.mark.skipif(
    not hasattr(torch.cpu.Stream, "record_event"), reason="this torch has no FSDP2 on the CPU"
)
@each_class
@each_path
@pytest.mark.parametrize("dtype", [torch.bfloat16, *rarely(torch.float32)])
def test_sharded_parameters(
    ranks_of: RanksOf,
    optimizer_class: type[Adam] | type[AMSGrad],
    foreach: bool | None,
    dtype: torch.dtype,
) -> None:
    """FSDP's parameters are DTensors, for which not every foreach function is there."""
    assert all(ranks_of(2).run(train_sharded, optimizer_class, dtype, foreach))

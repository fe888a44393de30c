"""The model that trains is the model that was registered, or all ranks get an error."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations

from comm_hooks import Exchange, PeerError, Sign, register
from comm_hooks.optim import LocalVarianceAdam, low_communication
from tests.ranks import RanksOf


class Adapter(nn.Module):
    """A linear layer and what is added to it, as LoRA does."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(layer.in_features, 2, bias=False)
        self.up = nn.Linear(2, layer.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x) + self.up(self.down(x))
        return out


def new_head(ddp: DistributedDataParallel) -> None:
    ddp.module[2] = nn.Linear(16, 4)


def assigned(ddp: DistributedDataParallel) -> None:
    state = {name: t.clone() for name, t in ddp.module.state_dict().items()}
    ddp.module.load_state_dict(state, assign=True)


def weight_norm(ddp: DistributedDataParallel) -> None:
    parametrizations.weight_norm(ddp.module[0])


def adapted(ddp: DistributedDataParallel) -> None:
    ddp.module[0] = Adapter(ddp.module[0])


def cast(ddp: DistributedDataParallel) -> None:
    ddp.module.to(torch.float64)


def unfrozen(ddp: DistributedDataParallel) -> None:
    ddp.module[1].weight.requires_grad_(True)


CHANGES = {
    each.__name__: each for each in (new_head, assigned, weight_norm, adapted, cast, unfrozen)
}
NAMED = {
    "new_head": "'2.weight' is another one",
    "assigned": "'0.weight' is another one",
    "weight_norm": "'0.parametrizations.weight.original0' is new",
    "adapted": "'0.layer.weight' is new",
    "cast": "'0.weight' was moved, cast or unfrozen",
    "unfrozen": "'1.weight' was moved, cast or unfrozen",
}


def make(kind: str) -> tuple[DistributedDataParallel, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4))
    model[1].weight.requires_grad_(False)
    ddp = DistributedDataParallel(model)
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    if kind == "hook":
        register(ddp, "sign", min_numel=16)
        return ddp, torch.optim.SGD([p for _, p in trained], lr=0.1)
    if kind == "optimizer":
        optimizer: Any = LocalVarianceAdam(trained, Exchange(Sign(), min_numel=16), lr=0.01)
    else:
        optimizer = low_communication(trained, lr=0.01, bits_per_parameter=8.0)
    register(ddp, optimizer)
    return ddp, optimizer


def step(model: nn.Module, optimizer: Any, dtype: torch.dtype = torch.float32) -> None:
    optimizer.zero_grad()
    model(torch.randn(8, 16, dtype=dtype)).square().mean().backward()
    optimizer.step()


def change_on(kind: str, change: str, ranks: list[int]) -> str:
    """Train, change the model on some ranks, and train on; return what is said."""
    ddp, optimizer = make(kind)
    for _ in range(3):
        step(ddp, optimizer)
    if dist.get_rank() in ranks:
        CHANGES[change](ddp)
    dtype = next(ddp.module.parameters()).dtype
    try:
        for _ in range(3):
            step(ddp, optimizer, dtype)
    except (ValueError, PeerError) as error:
        return str(error)
    return "trained on"


@pytest.mark.parametrize("kind", ["hook", "optimizer", "rounds"])
@pytest.mark.parametrize("change", CHANGES)
def test_other_parameters_are_refused_by_name(ranks_of: RanksOf, kind: str, change: str) -> None:
    for said in ranks_of(2).run(change_on, kind, change, [0, 1]):
        # Without DDP's buckets a step goes on in the new dtype.
        assert NAMED[change] in said or (change == "cast" and kind != "hook")


@pytest.mark.parametrize("kind", ["hook", "rounds"])
def test_a_change_on_one_rank_ends_the_step_on_all(ranks_of: RanksOf, kind: str) -> None:
    first, second = ranks_of(2).run(change_on, kind, "assigned", [1])
    assert "rank 1 failed: ValueError: the parameters of this model have changed" in first
    assert NAMED["assigned"] in second


def through_the_module(ddp: DistributedDataParallel) -> nn.Module:
    return ddp.module  # type: ignore[no-any-return]


def through_another(ddp: DistributedDataParallel) -> nn.Module:
    return DistributedDataParallel(ddp.module)


def without_exchange(way: Callable[[DistributedDataParallel], nn.Module]) -> str:
    ddp, optimizer = make("hook")
    step(ddp, optimizer)
    try:
        step(way(ddp), optimizer)
    except ValueError as error:
        return str(error)
    return "trained on"


@pytest.mark.parametrize("way", [through_the_module, through_another])
def test_gradients_that_were_not_exchanged_are_refused(
    ranks_of: RanksOf, way: Callable[..., Any]
) -> None:
    for said in ranks_of(2).run(without_exchange, way):
        assert said.startswith("the gradients of this step were not exchanged")


def accumulate_and_clip() -> bool:
    """Train as one may: two optimizers, accumulation, made states, gradients of zero."""
    ddp, _ = make("hook")
    trained = [p for p in ddp.parameters() if p.requires_grad]
    optimizers = [torch.optim.AdamW(part, lr=0.01) for part in (trained[:2], trained[2:])]
    for optimizer in optimizers:  # as torch.distributed.checkpoint makes a state to load into
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        with ddp.no_sync():
            ddp(torch.randn(8, 16)).square().mean().backward()
        ddp(torch.randn(8, 16)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
    own = torch.cat([p.detach().flatten() for p in trained])
    every = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(every, own)
    return torch.equal(*every)


def test_other_ways_to_step_are_left_alone(ranks_of: RanksOf) -> None:
    assert all(ranks_of(2).run(accumulate_and_clip))


def join(kind: str) -> str:
    ddp, _ = make(kind)
    try:
        with ddp.join():
            pass
    except ValueError as error:
        return str(error)
    return "joined"


def test_rounds_refuse_to_be_joined(ranks_of: RanksOf) -> None:
    for said in ranks_of(2).run(join, "rounds"):
        assert "join() cannot be used with" in said

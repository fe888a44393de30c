"""The optimizer of low_communication in the place of an AdamW, in one call."""

import io
import os
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam, AdamW
from torch.optim import lr_scheduler as schedules

import comm_hooks
from comm_hooks.checkpoints.rank_files import load_rank_files, save_rank_file
from comm_hooks.collectives import Transport, run_ranks
from comm_hooks.optim import LaProp, low_communication
from tests.optim.catalog import MAKE
from tests.ranks import RanksOf

BETAS = (0.85, 0.98)


def wrapped() -> DistributedDataParallel:
    torch.manual_seed(0)
    layers = nn.Linear(64, 64), nn.Tanh(), nn.LayerNorm(64), nn.Linear(64, 32)
    return DistributedDataParallel(nn.Sequential(*layers))


def adamw(ddp: nn.Module, **settings: Any) -> AdamW:
    named = list(ddp.named_parameters())
    groups = [
        {"params": [p for n, p in named if p.ndim > 1], "weight_decay": 0.1, "lr": 0.02},
        {"params": [p for n, p in named if p.ndim < 2], "weight_decay": 0.0},
    ]
    return AdamW(groups, lr=0.01, betas=BETAS, eps=1e-6, **settings)


def train(
    ddp: nn.Module, optimizer: Any, steps: int, scheduler: Any = None, *, start: int = 0
) -> list[float]:
    rates = []
    for step in range(start, start + steps):
        torch.manual_seed(1000 * dist.get_rank() + step)
        x = torch.randn(16, 64)
        (ddp(x) - x[:, :32].cumsum(1)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        rates.append(optimizer.param_groups[0]["lr"])
        if scheduler is not None:
            scheduler.step(1.0) if isinstance(
                scheduler, schedules.ReduceLROnPlateau
            ) else scheduler.step()
    return rates


def values(ddp: nn.Module) -> list[torch.Tensor]:
    return [p.detach().clone() for p in ddp.parameters()]


def fresh() -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    results = []
    for replaces in (True, False):
        ddp = wrapped()
        old = adamw(ddp)
        if replaces:
            new = comm_hooks.replace(ddp, old, bits_per_parameter=0.5)
        else:
            new = low_communication(old.param_groups, lr=0.02, bits_per_parameter=0.5)
            comm_hooks.register(ddp, new)
        train(ddp, new, 8)
        assert [g["betas"] for g in new.param_groups] == [BETAS, BETAS]
        assert [g["eps"] for g in new.param_groups] == [1e-6, 1e-6]
        assert [g["weight_decay"] for g in new.param_groups] == [0.1, 0.0]
        results.append(values(ddp))
    return results[0], results[1]


def test_a_fresh_adamw_is_replaced_by_what_its_groups_ask_for(ranks_of: RanksOf) -> None:
    for replaced, made in ranks_of(2).run(fresh):
        assert all(map(torch.equal, replaced, made))


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "step": lambda o: schedules.StepLR(o, 2, 0.5),
    "lambda": lambda o: schedules.LambdaLR(o, lambda t: 1 / (1 + t)),
    "cycle": lambda o: schedules.OneCycleLR(o, 0.02, total_steps=20),
    "plateau": lambda o: schedules.ReduceLROnPlateau(o, patience=1),
    "chained": lambda o: schedules.ChainedScheduler(
        [schedules.StepLR(o, 2, 0.5), schedules.ExponentialLR(o, 0.9)]
    ),
    "sequential": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, 0.1, total_iters=4), schedules.CosineAnnealingLR(o, 12)], [4]
    ),
}


def scheduled(name: str, gives: bool) -> None:
    rates = {}
    for replaces in (False, True):
        ddp = wrapped()
        optimizer: Any = adamw(ddp)
        scheduler = SCHEDULES[name](optimizer)
        if replaces:
            given = {"scheduler": scheduler} if gives else {}
            optimizer = comm_hooks.replace(ddp, optimizer, bits_per_parameter=0.5, **given)
            assert getattr(scheduler, "optimizer", optimizer) is optimizer or not gives
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = train(ddp, optimizer, 6, scheduler)
            optimizer.load_state_dict(optimizer.state_dict())
            rates[replaces] = found + train(ddp, optimizer, 6, scheduler)
    assert rates[True] == rates[False]
    assert len(set(rates[True])) > 2


@pytest.mark.parametrize("gives", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedulers_of_the_adamw_go_on(ranks_of: RanksOf, name: str, gives: bool) -> None:
    ranks_of(2).run(scheduled, name, gives)


def hooked() -> None:
    ddp = wrapped()
    old, calls = adamw(ddp), []
    old.register_step_post_hook(lambda optimizer, *_: calls.append(optimizer))
    new = comm_hooks.replace(ddp, old, bits_per_parameter=0.5)
    train(ddp, new, 2)
    assert calls == [new, new]
    with pytest.raises(ValueError, match=r"AdamW was replaced: call step\(\) of the optimizer"):
        old.step()


def test_hooks_go_on_and_the_old_optimizer_refuses_steps(ranks_of: RanksOf) -> None:
    ranks_of(2).run(hooked)


def after_adamw() -> None:
    ddp = wrapped()
    old = adamw(ddp)
    train(ddp, old, 5)
    before = {p: {k: v.clone() for k, v in old.state[p].items()} for p in ddp.parameters()}
    new = comm_hooks.replace(ddp, old, bits_per_parameter=0.5)
    assert not old.state
    for p, state in before.items():
        assert torch.equal(new.state[p]["exp_avg_sq"], state["exp_avg_sq"])
        assert new.state[p]["step"] == 5
        root = (state["exp_avg_sq"] / (1 - BETAS[1] ** 5)).sqrt() + 1e-6
        direction = state["exp_avg"] / (1 - BETAS[0] ** 5) / root
        # With half the horizon of beta1: 1 - 2 (1 - 0.85) = 0.7.
        assert torch.allclose(
            new.state[p]["exp_avg_normalized"] / (1 - 0.7**5), direction, rtol=1e-4
        )
    train(ddp, new, 4)


def test_moments_of_an_adamw_are_taken_over(ranks_of: RanksOf) -> None:
    ranks_of(2).run(after_adamw)


def test_laprop_loads_a_state_of_adamw_and_its_own() -> None:
    model = nn.Linear(8, 8)
    old = AdamW(model.parameters(), lr=0.1)
    for step in range(30):
        model(torch.full((1, 8), 1.0 + step / 30)).square().sum().backward()
        old.step()
        old.zero_grad()
    new = LaProp(model.parameters(), lr=0.1)
    new.load_state_dict(old.state_dict())
    again = LaProp(model.parameters(), lr=0.1)
    again.load_state_dict(new.state_dict())
    for p in model.parameters():
        m = new.state[p]["exp_avg_normalized"]
        assert m.abs().max() < 1.5
        assert torch.equal(m, again.state[p]["exp_avg_normalized"])


@pytest.mark.parametrize("name", ["laprop", *MAKE])
def test_adamw_goes_on_with_moments_of_gradients_or_not_at_all(name: str) -> None:
    """Of a state that has moments of anything else under AdamW's keys it would make a mess."""

    def check(transport: Transport) -> None:
        torch.manual_seed(0)
        weight = nn.Parameter(torch.randn(64, 64))
        make: Any = partial(MAKE[name], transport=transport) if name in MAKE else LaProp
        own = make([("weight", weight)], lr=1e-2)
        adamw = AdamW([("weight", weight)], lr=1e-2)
        for optimizer in [own] * 10 + [adamw]:
            weight.grad = 1e-3 * torch.randn(64, 64)
            before = weight.detach().clone()
            if optimizer is adamw:
                try:
                    adamw.load_state_dict(own.state_dict())
                    adamw.step()
                except KeyError:
                    return
                assert (weight - before).abs().max() < 10 * 1e-2
            else:
                own.step()

    run_ranks(check, 1)


def run_of(
    steps: int, path: Path | None = None, *, resume: bool = False, files: bool = False
) -> Any:
    """Train as scripts do: rank 0 saves, all load the AdamW before it is replaced."""
    ddp = wrapped()
    optimizer: Any = adamw(ddp)
    start = 0
    if resume:
        assert path
        saved = torch.load(path, weights_only=True)
        ddp.module.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        start = saved["step"]
    optimizer = comm_hooks.replace(ddp, optimizer, bits_per_parameter=0.5)
    if resume and files:
        load_rank_files(optimizer, f"{path}.ranks")
    train(ddp, optimizer, steps, start=start)
    if path:
        if files:
            save_rank_file(optimizer, f"{path}.ranks")
        if dist.get_rank() == 0:
            states = {"model": ddp.module.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**states, "step": start + steps}, path)
        dist.barrier()
    return ddp, optimizer


def loss(ddp: nn.Module, optimizer: Any) -> float:
    """Return the loss of the shared model on data that no rank has seen."""
    torch.manual_seed(9)
    x = torch.randn(256, 64)
    with torch.no_grad(), optimizer.server_parameters() if optimizer else torch.no_grad():
        return float((ddp(x) - x[:, :32].cumsum(1)).square().mean())


def resumed(path: Path, files: bool) -> None:
    whole = run_of(60)
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        run_of(20, path, files=files)
        run_of(20, path, resume=True, files=files)
        ddp, optimizer = run_of(20, path, resume=True, files=files)
    lost = [w for w in found if "without its residual" in str(w.message)]
    assert bool(lost) == (dist.get_rank() != 0 and not files)
    assert [g["betas"] for g in optimizer.param_groups] == [BETAS, BETAS]
    assert optimizer.steps == 60
    if files:
        assert all(map(torch.equal, values(ddp), values(whole[0])))
    start, end, here = (loss(each, o) for each, o in ((wrapped(), None), whole, (ddp, optimizer)))
    assert abs(here - end) < 0.1 * (start - end)


@pytest.mark.parametrize("files", [False, True])
def test_a_script_that_loads_its_adamw_first_resumes(
    ranks_of: RanksOf, tmp_path: Path, files: bool
) -> None:
    ranks_of(2).run(resumed, tmp_path / "checkpoint.pt", files)


def bfloat16() -> None:
    """AdamW casts what it loads to bfloat16; the carried state keeps its dtypes."""
    ddp = DistributedDataParallel(nn.Linear(64, 64).bfloat16())
    new = comm_hooks.replace(ddp, AdamW(ddp.parameters()), bits_per_parameter=0.5)
    for _ in range(3):
        ddp(torch.ones(2, 64).bfloat16()).square().sum().backward()
        new.step()
        new.zero_grad()
    buffer = io.BytesIO()
    torch.save(new.state_dict(), buffer)
    moments = [new.state[p]["exp_avg_normalized"].clone() for p in ddp.parameters()]
    buffer.seek(0)
    other = DistributedDataParallel(nn.Linear(64, 64).bfloat16())
    old = AdamW(other.parameters())
    old.load_state_dict(torch.load(buffer, weights_only=True))
    again = comm_hooks.replace(other, old, bits_per_parameter=0.5)
    found = [again.state[p]["exp_avg_normalized"] for p in other.parameters()]
    assert all(f.dtype == torch.float32 for f in found)
    assert all(map(torch.equal, found, moments))


def muon() -> None:
    ddp = wrapped()
    new = comm_hooks.replace(ddp, AdamW(ddp.parameters()), inner="muon", bits_per_parameter=0.5)
    train(ddp, new, 3)
    other = wrapped()
    old = AdamW(other.parameters())
    schedules.StepLR(old, 1)
    with pytest.raises(ValueError, match="has a state or a scheduler, which is of no use for"):
        comm_hooks.replace(other, old, inner="muon")
    old = AdamW(other.parameters())
    again = comm_hooks.replace(other, old, inner="muon", bits_per_parameter=0.5)
    again.load_state_dict(new.state_dict())
    train(ddp, new, 3, start=3)
    train(other, again, 3, start=3)
    assert all(map(torch.equal, values(ddp), values(other)))


def test_muon_takes_the_place_of_a_fresh_adamw(ranks_of: RanksOf) -> None:
    ranks_of(2).run(muon)


def test_a_carried_state_keeps_its_dtypes(ranks_of: RanksOf) -> None:
    ranks_of(2).run(bfloat16)


REFUSED: dict[str, tuple[Callable[[Any], Any], dict[str, Any], str]] = {
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.1), {}, "replace.. takes torch.optim.AdamW"),
    "decay": (lambda p: Adam(p, weight_decay=0.1), {}, "decoupled_weight_decay=False"),
    "amsgrad": (lambda p: AdamW(p, amsgrad=True), {}, "amsgrad"),
    "maximize": (lambda p: AdamW(p, maximize=True), {}, "maximize"),
    "given": (AdamW, {"betas": (0.9, 0.9)}, "betas is taken over from AdamW"),
    "unknown": (AdamW, {"bits": 1}, "bits"),
    "twice": (
        lambda p: low_communication(p, lr=0.1, bits_per_parameter=0.5),
        {},
        "exchanges by itself",
    ),
}


def refused(case: str) -> None:
    make, settings, message = REFUSED[case]
    ddp = wrapped()
    optimizer = make(ddp.parameters())
    with pytest.raises((ValueError, TypeError), match=message):
        comm_hooks.replace(ddp, optimizer, **settings)
    if case == "twice":
        comm_hooks.register(ddp, optimizer)
    train(ddp, optimizer, 1)  # as before


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_replaced_is_refused_and_stays(ranks_of: RanksOf, case: str) -> None:
    ranks_of(2).run(refused, case)


def refused_states() -> None:
    ddp = wrapped()
    old, other = adamw(ddp), adamw(ddp)
    with pytest.raises(ValueError, match="StepLR is of another optimizer"):
        comm_hooks.replace(ddp, old, scheduler=[schedules.StepLR(other, 1)])
    train(ddp, old, 1)
    with pytest.raises(ValueError, match="of no use for inner='muon'"):
        comm_hooks.replace(ddp, old, inner="muon")
    new = comm_hooks.replace(ddp, old, bits_per_parameter=0.5)
    state = new.inner.state_dict()  # without residuals
    again = wrapped()
    fresh = adamw(again)
    fresh.load_state_dict(state)
    with pytest.raises(ValueError, match="was replaced before, or has loaded a part of the state"):
        comm_hooks.replace(again, fresh, bits_per_parameter=0.5)


def test_states_that_would_mislead_are_refused(ranks_of: RanksOf) -> None:
    ranks_of(2).run(refused_states)


def wrapped_by_fabric() -> None:
    wrappers = pytest.importorskip("lightning.fabric.wrappers")

    class Strategy:
        def optimizer_step(self, optimizer: Any) -> None:
            optimizer.step()

        def get_optimizer_state(self, optimizer: Any) -> Any:
            return optimizer.state_dict()

    ddp = wrapped()
    wrapper = wrappers._FabricOptimizer(adamw(ddp), Strategy())
    scheduler = schedules.StepLR(wrapper, 1, 0.5)
    optimizer = comm_hooks.replace(ddp, wrapper, scheduler=scheduler, bits_per_parameter=0.5)
    assert optimizer is wrapper
    rates = train(ddp, optimizer, 3, scheduler)
    assert rates == [0.02, 0.01, 0.005]
    assert optimizer.optimizer.stats()["steps"] == 3
    optimizer.load_state_dict(optimizer.state_dict())
    train(ddp, optimizer, 1, scheduler)


@pytest.mark.slow  # imports Lightning
def test_the_wrapper_of_fabric_gets_the_new_optimizer(ranks_of: RanksOf) -> None:
    ranks_of(2).run(wrapped_by_fabric)


def wrapped_by_accelerate() -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    ddp = wrapped()
    old = adamw(ddp)
    scheduler = schedules.StepLR(old, 1, 0.5)
    wrapper, scheduler = accelerator.prepare(old, scheduler)
    optimizer = comm_hooks.replace(ddp, wrapper, scheduler=scheduler, bits_per_parameter=0.5)
    assert optimizer is wrapper
    rates = train(ddp, optimizer, 3, scheduler)
    assert rates[0] > rates[1] > rates[2]
    assert optimizer.optimizer.stats()["steps"] == 3
    optimizer.load_state_dict(optimizer.state_dict())
    train(ddp, optimizer, 1, scheduler)


def test_the_wrapper_of_accelerate_gets_the_new_optimizer(ranks_of: RanksOf) -> None:
    ranks_of(2).run(wrapped_by_accelerate)


KILLED = """
import sys
from pathlib import Path
import torch.distributed as dist
from tests.optim import test_replacing as t

path, resume = Path(sys.argv[1]), len(sys.argv) > 2
dist.init_process_group("gloo")
ddp, optimizer = t.run_of(20, path, resume=resume)
print("saved", flush=True)
if not resume:
    t.train(ddp, optimizer, 100_000)  # until it is killed
print("loss", t.loss(ddp, optimizer), flush=True)
optimizer.synchronize()
"""


@pytest.mark.slow
def test_a_killed_script_resumes_in_new_processes(tmp_path: Path) -> None:
    def start(*arguments: str) -> list[subprocess.Popen[str]]:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = str(free.getsockname()[1])
        shared = {"MASTER_ADDR": "localhost", "MASTER_PORT": port, "WORLD_SIZE": "2"}
        return [
            subprocess.Popen(
                [sys.executable, "-c", KILLED, str(tmp_path / "checkpoint.pt"), *arguments],
                # Sets have another order in each process.
                env={**os.environ, **shared, "RANK": str(rank), "PYTHONHASHSEED": str(rank)},
                cwd=Path(__file__).parents[2],
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]

    first = start()
    for process in first:
        assert process.stdout
        assert process.stdout.readline() == "saved\n"
    for process in first:
        process.kill()
        process.wait()
    outputs = [process.communicate(timeout=200)[0] for process in start("resume")]
    losses = [float(output.split("loss")[1]) for output in outputs]
    assert losses[0] == losses[1] < 5

"""Which method is recommended, by which figures, and how it is switched on."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import comm_hooks
from benchmarks.lab import crossings
from benchmarks.lab.methods import parse_method, parse_methods
from benchmarks.lab.optimizers import OPTIMIZERS
from comm_hooks import optim
from comm_hooks.exchange import Exchange, ExchangeSettings
from comm_hooks.launchers.advise.advice import Advice, Case, advise_on, choose, step_at
from comm_hooks.launchers.advise.cost_model import Exchanged, Link, Network, Plan, Prediction
from comm_hooks.launchers.advise.rehearsal import Rehearsals
from comm_hooks.launchers.advise.shares import ALL, Cell, Kept
from comm_hooks.launchers.advise.snippets import json_line, python_line
from comm_hooks.launchers.advise.step import Step
from comm_hooks.launchers.commands.advise import METHODS

STEP = Step.of_numel(1 << 18, 10.0)
NETWORK = Network(2, Link(12.5e6, 1e-4))
NCCL = replace(NETWORK, backend="nccl")
CASE = Case(STEP, NETWORK, optimizer=0.001)


def row(spec: str, step: float, *kept: float) -> Advice:
    shares = {f"task {i}": share for i, share in enumerate(kept)}
    cells = [Cell(spec, 2, 2.0, 6, 1, 0.0, shares)]
    share = ALL if spec == "all_reduce" else Kept(cells) if kept else None
    return Advice(parse_method(spec), Plan(), Prediction(step, step), 0.0, share)


def choice(*rows: Advice, min_share: float = 0.9) -> str | None:
    chosen = choose(rows, min_share)
    return chosen.method.spec if chosen else None


def test_the_fastest_of_those_that_keep_enough_on_every_task() -> None:
    plain, bf16 = row("all_reduce", 2.0), row("bf16", 1.0, 1.0, 0.99)
    fast = row("powersgd", 0.5, 1.0, 0.8, 1.0)
    assert choice(plain, bf16, fast) == "bf16"
    assert choice(plain, bf16, fast, min_share=0.75) == "powersgd"
    assert choice(plain, row("low_communication", 0.5, 1.0)) == "low_communication"
    assert choice(plain) == "all_reduce"
    assert choice(fast) is None


def test_nothing_is_changed_for_a_few_percent() -> None:
    assert choice(row("bf16", 1.0, 1.0), row("all_reduce", 1.04)) == "all_reduce"
    assert choice(row("bf16", 1.0, 1.0), row("all_reduce", 1.06)) == "bf16"


def test_what_was_not_measured_or_does_not_communicate_is_not_recommended() -> None:
    assert choice(row("sign", 0.1), row("none", 0.1, 1.0), min_share=0.01) is None


def test_noise_that_could_change_the_choice() -> None:
    def noisy(codec: float, noise: float) -> tuple[bool, bool]:
        plan = Plan((Exchanged((), before=codec),), noise=noise)
        of_row = replace(row("sign", 1.0), plan=plan)
        return of_row.is_noisy, of_row.codec_is_noisy

    assert noisy(codec=0.0, noise=0.0) == (False, False)
    assert noisy(codec=0.5, noise=0.04) == (False, False)
    assert noisy(codec=0.5, noise=0.06) == (True, False)
    assert noisy(codec=0.1, noise=0.04) == (False, True)
    assert noisy(codec=0.1, noise=0.06) == (True, True)


def test_zero_keeps_its_all_gather() -> None:
    """Half-size gradients or none at all: a third of the bytes stays."""
    plans = [(m, Rehearsals(STEP, 2).plan(m)) for m in parse_methods("all_reduce,topk,none")]
    for stage in (1, 2):
        plain, topk, none = advise_on(replace(CASE, zero_stage=stage), plans)
        assert none.sent == STEP.numel / 2 * 4
        assert plain.sent == 3 * none.sent
        assert none.sent < topk.sent < 1.1 * none.sent
        faster = plain.prediction.step / none.prediction.step
        assert 1 < faster < 3
    plain, _, none = advise_on(CASE, plans)
    assert (plain.sent, none.sent) == (STEP.numel * 4, 0)


def test_zero_refuses_what_has_an_optimizer_of_its_own() -> None:
    at_0, at_1 = (replace(CASE, network=NCCL, zero_stage=stage) for stage in (0, 1))
    for spec in METHODS.split(","):
        method = parse_method(spec)
        at_0.check(method)
        if OPTIMIZERS[method.optimizer].exchanges:
            with pytest.raises(ValueError, match="ZeRO stage 1 cuts the optimizer's state"):
                at_1.check(method)
        else:
            at_1.check(method)


def test_other_bandwidths() -> None:
    plan = Rehearsals(STEP, 2).plan(parse_method("all_reduce"))
    here = advise_on(CASE, [(parse_method("all_reduce"), plan)])[0].prediction.step
    assert step_at(CASE, plan, NETWORK.between.bandwidth) == here
    assert step_at(CASE, plan, 1e3) > 100 * here
    assert step_at(CASE, plan, 1e12) == pytest.approx(0.01, rel=0.1)


SPECS = [
    *(spec for spec in METHODS.split(",") if "low_communication" not in spec),
    *(name for name, entry in OPTIMIZERS.items() if entry.crossing),
    "topk:density=0.5:memory_bits=4:exempt_bits=16",
    "sign:memory=none:collective=sharded:min_numel=64",
    "count_sketch:ratio=0.017+safl",
    "topk:density=0.0222+local_adamw:local_steps=30:outer_lr=2:outer_momentum=0.5",
]


# Some are imported when they are asked for, so that they are not in vars().
PUBLIC = {name: getattr(module, name) for module in (optim, comm_hooks) for name in module.__all__}


@pytest.fixture
def _alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_alone")
@pytest.mark.filterwarnings("ignore:world size is 1")
@pytest.mark.parametrize("spec", METHODS.split(","))
def test_ddp_takes_on_gloo_what_is_recommended_there(spec: str) -> None:
    method = parse_method(spec)
    model = nn.Sequential(*(nn.Linear(40, 40) for _ in range(4)))
    names = {
        **PUBLIC,
        "torch": torch,
        "model": model,
        "ddp_model": DistributedDataParallel(model),
        "lr": 0.1,
        "DistributedDataParallel": DistributedDataParallel,
        "default_hooks": default_hooks,
        "powerSGD_hook": powerSGD_hook,
    }
    try:
        CASE.check(method)
    except ValueError:
        assert spec == "bf16"
        if not dist.is_nccl_available():
            with pytest.raises(TypeError, match="BF16"):
                eval(python_line(method), names)
    else:
        eval(python_line(method), names)


def test_bf16_of_pytorch_is_for_nccl() -> None:
    method = parse_method("bf16")
    with pytest.raises(ValueError, match="on gloo identity:bits=16 sends as many bytes"):
        CASE.check(method)
    replace(CASE, network=NCCL).check(method)
    replace(CASE, zero_stage=1).check(method)  # DeepSpeed's, which needs no hook


def own_exchange(spec: str) -> comm_hooks.Exchange:
    method = parse_method(spec)
    return crossings.build_exchange(method.crossing, method.crossing_options, seed=0)


@pytest.mark.parametrize("spec", SPECS)
def test_the_line_of_python_makes_the_method(spec: str) -> None:
    method = parse_method(spec)
    line = python_line(method)
    made: list[Any] = []

    class Model:
        def register_comm_hook(self, state: object, hook: object) -> None:
            made.append(hook)

    def register(model: object, name: str, **options: Any) -> None:
        made.append(Exchange(ExchangeSettings.of(name, **options)))

    names = {
        **PUBLIC,
        "torch": torch,
        "model": nn.Sequential(*(nn.Linear(2, 2) for _ in range(4))),
        "ddp_model": Model(),
        "register": register,
        "lr": 0.01,
        "DistributedDataParallel": lambda model: model,
        "default_hooks": default_hooks,
        "powerSGD_hook": powerSGD_hook,
    }
    value = eval(line, names)
    if not OPTIMIZERS[method.optimizer].crossing:
        if method.crossing not in ("all_reduce", "bf16", "powersgd", "none"):
            assert made[0].config() == own_exchange(spec).config()
        elif method.crossing != "all_reduce":
            assert callable(made[0])
        return
    settings = own_exchange(spec).config()
    assert {**value.exchange.config(), **settings} == value.exchange.config()
    for option, given in method.optimizer_options.items():
        if option == "fragments":
            assert len(value._fragments) == given
        elif option == "outer_lr":
            assert value.server.param_groups[0]["lr"] == given
        elif option == "outer_momentum":
            assert value.server.param_groups[0]["momentum"] == given
        elif option == "beta1":
            assert value.param_groups[0]["betas"][0] == given
        else:
            assert getattr(value, option) == given


def test_the_lines_of_rounds_for_a_budget() -> None:
    method = parse_method("low_communication:bits=0.3")
    line = "low_communication(model.named_parameters(), lr=lr, bits_per_parameter=0.3)"
    assert python_line(method) == line
    block = json.loads(json_line(method) or "")["comm_hooks"]
    assert block == {"method": "low_communication", "bits_per_parameter": 0.3}
    method = parse_method("low_communication:muon=true")
    assert json.loads(json_line(method) or "")["comm_hooks"]["inner"] == "muon"


@pytest.mark.parametrize("spec", SPECS)
def test_the_line_of_json_makes_the_method(spec: str) -> None:
    method = parse_method(spec)
    line = json_line(method)
    if "fed_" in spec or any(
        word in spec for word in ("local_adamw", "local_laprop", "loco", "lo_co", "safl", "marina")
    ):
        assert line is None
        return
    if method.crossing in ("all_reduce", "bf16", "powersgd", "none"):
        assert (line is None) == (method.crossing in ("powersgd", "none"))
        return
    assert line
    block = json.loads(line)
    assert (
        Exchange(ExchangeSettings.from_dict(block["comm_hooks"])).config()
        == own_exchange(spec).config()
    )
    assert ("optimizer" in block) == bool(OPTIMIZERS[method.optimizer].crossing)
    if "optimizer" in block:
        assert hasattr(optim, block["optimizer"]["type"])

"""One call for the recommended rounds: within its budget, on any ranks, like any optimizer."""

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from comm_hooks.collectives import Simulated, Transport, run_ranks
from comm_hooks.optim import LaProp, LocalRounds, MuonAdamW, low_communication
from comm_hooks.optim.low_communication import INNER, RoundsPlan, plan_rounds


def make_model(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(64, 96), nn.LayerNorm(96), nn.ReLU(), nn.Linear(96, 10))


def shapes_of(model: nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


def take_steps(model: nn.Module, optimizer: LocalRounds, steps: range, rank: int) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(1000 * step + rank)
        inputs = torch.randn(8, 64, generator=generator)
        labels = inputs[:, :10].argmax(1)
        nn.functional.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
        optimizer.zero_grad()


@settings(deadline=None)
@given(
    ranks=st.sampled_from([1, 2, 3, 4, 8, 16]),
    budget=st.floats(0.02, 3.0),
    total_steps=st.one_of(st.none(), st.integers(400, 100_000)),
)
def test_the_plan_meets_its_budget_and_uses_most_of_it(
    ranks: int, budget: float, total_steps: int | None
) -> None:
    shapes, transport = {"w": (512, 512), "v": (256, 512), "b": (512,)}, Simulated(ranks)[0]
    plan = plan_rounds(shapes, transport, budget, total_steps)
    assert plan.bits <= budget
    assert plan.outer_lr == (1.5 * math.sqrt(ranks) if ranks > 1 else 1)
    assert 0.5 <= plan.decay < 1
    if total_steps is not None:
        assert plan.local_steps <= total_steps // 20
    assert 1 / 256 <= plan.density <= 1 / 48
    if ranks > 1 and plan.density < 1 / 49:
        assert plan.bits > 0.8 * budget
        # With fewer steps, less than one in 180 could have been sent.
        assert plan.local_steps == 2 or plan.density > 1 / 181


@pytest.mark.parametrize(("ranks", "budget"), [(2, 0.2), (3, 0.4), (4, 0.4)])
def test_what_is_sent_is_what_was_planned(ranks: int, budget: float) -> None:
    def rank(transport: Transport) -> tuple[float, RoundsPlan, list[torch.Tensor]]:
        model = make_model()
        optimizer = low_communication(
            model.named_parameters(), lr=1e-2, bits_per_parameter=budget, transport=transport
        )
        plan = plan_rounds(shapes_of(model), transport, budget)
        steps = 2 * plan.local_steps
        take_steps(model, optimizer, range(steps), transport.rank)
        sent = 8 * optimizer.stats()["bytes_sent"] / steps
        with optimizer.server_parameters():
            values = [p.detach().clone() for p in model.parameters()]
        return sent / sum(p.numel() for p in model.parameters()), plan, values

    results = run_ranks(rank, ranks)
    for bits, plan, values in results:
        assert bits == pytest.approx(plan.bits)
        assert bits <= budget
        assert all(map(torch.equal, values, results[0][2]))


@pytest.mark.parametrize(("ranks", "budget"), [(2, 0.06), (4, 0.09), (8, 0.12), (4, 0.0073)])
def test_small_models_send_displacements_instead_of_headers(ranks: int, budget: float) -> None:
    """A perceptron of 2,817 parameters drifts apart for few steps only."""
    shapes = {"0.weight": (128, 20), "0.bias": (128,), "2.weight": (1, 128), "2.bias": (1,)}
    plan = plan_rounds(shapes, Simulated(ranks)[0], budget)
    of_large = plan_rounds({"w": (2048, 1024)}, Simulated(ranks)[0], budget)
    assert plan.fragments == 1
    assert plan.local_steps <= 8 * of_large.local_steps
    assert plan.density > 1 / 181


def test_shards_only_where_they_send_less() -> None:
    small, large = {"w": (16, 16), "v": (8,)}, {"w": (512, 512)}
    for ranks, shapes, expected in [(4, large, False), (5, large, True), (5, small, False)]:
        assert plan_rounds(shapes, Simulated(ranks)[0], 1.0).sharded == expected


def test_a_budget_that_nothing_meets_names_the_smallest() -> None:
    shapes, transport = shapes_of(make_model()), Simulated(4)[0]
    with pytest.raises(ValueError, match=r"0\.0001 bits .* are too few: .* need ([\d.]+)") as found:
        plan_rounds(shapes, transport, 1e-4)
    smallest = float(str(found.value).split("need ")[1].split()[0])
    assert plan_rounds(shapes, transport, smallest).bits <= smallest
    with pytest.raises(ValueError, match=r"total_steps=40 allows no more"):
        plan_rounds(shapes, transport, 0.01, 40)


def test_every_element_has_its_turn_within_the_training() -> None:
    """With 25 local steps of 2,150 it had not, and the end was worse than without exchange."""
    shapes, transport = {"w": (512, 512)}, Simulated(4)[0]
    with pytest.raises(
        ValueError, match=r"16 local steps per exchange need 0\.00\d+ \(total_steps=2150"
    ):
        plan_rounds(shapes, transport, 0.0073, 2150)
    plan = plan_rounds(shapes, transport, 0.0073, 6450)
    assert 16 < plan.local_steps <= 6450 * plan.density


def test_a_wait_that_nobody_checked_is_warned_of() -> None:
    members, few = [("w", nn.Parameter(torch.ones(512, 512)))], 0.0073
    settings: dict[str, Any] = {"lr": 1e-3, "transport": Simulated(4)[0]}
    with pytest.warns(UserWarning, match=r"0\.0073 bits .* is sent once in 4\d{3} steps"):
        low_communication(members, bits_per_parameter=few, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        low_communication(members, bits_per_parameter=few, total_steps=6450, **settings)
        low_communication(members, **settings)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lr": -1.0}, r"low_communication: lr must lie in \[0, inf\)"),
        ({"betas": (1.0, 0.9)}, r"low_communication: betas"),
        ({"weight_decay": float("nan")}, r"low_communication: weight_decay"),
        ({"bits_per_parameter": 0.0}, r"low_communication: bits_per_parameter must lie in"),
        ({"inner": "adam"}, r"low_communication: inner must be"),
        ({"total_steps": 0}, r"low_communication: total_steps must be"),
    ],
)
def test_settings_that_cannot_be_are_named(options: dict[str, Any], message: str) -> None:
    given = {"lr": 1e-3, **options}
    with pytest.raises(ValueError, match=message):
        low_communication(make_model().named_parameters(), transport=Simulated(2)[0], **given)
    with pytest.raises(ValueError, match="there are no parameters"):
        low_communication([], lr=1e-3, transport=Simulated(2)[0])


@pytest.mark.parametrize("inner", INNER)
def test_it_resumes_bit_for_bit(inner: str) -> None:
    def rank(transport: Transport) -> None:
        def make(model: nn.Module) -> LocalRounds:
            return low_communication(
                model.named_parameters(),
                lr=1e-2,
                bits_per_parameter=0.3,
                inner=inner,
                transport=transport,
            )

        model = make_model()
        optimizer = make(model)
        take_steps(model, optimizer, range(5), transport.rank)
        saved = copy.deepcopy(optimizer.state_dict())
        take_steps(model, optimizer, range(5, 9), transport.rank)
        again = make_model(seed=1)
        resumed = make(again)
        resumed.load_state_dict(saved)
        take_steps(again, resumed, range(5, 9), transport.rank)
        assert all(map(torch.equal, model.parameters(), again.parameters()))

    run_ranks(rank, 2)


def test_another_number_of_ranks_goes_on_by_its_own_plan() -> None:
    def make(transport: Transport) -> tuple[nn.Module, LocalRounds]:
        model = make_model()
        options: Any = {"bits_per_parameter": 8.0, "transport": transport}
        return model, low_communication(model.named_parameters(), lr=1e-2, **options)

    def save(transport: Transport) -> dict[str, Any]:
        model, optimizer = make(transport)
        take_steps(model, optimizer, range(5), transport.rank)
        return optimizer.state_dict()

    states = run_ranks(save, 2)

    def go_on(transport: Transport) -> None:
        model, optimizer = make(transport)
        (planned,) = (group["lr"] for group in optimizer.server.param_groups)
        optimizer.load_state_dicts(states)
        assert optimizer.server.param_groups[0]["lr"] == planned == 1.5 * math.sqrt(3)
        take_steps(model, optimizer, range(5, 9), transport.rank)

    run_ranks(go_on, 3)


def test_local_steps_are_those_of_laprop_with_half_the_horizon() -> None:
    options: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.2}
    optimizer = low_communication(
        make_model().named_parameters(), transport=Simulated(2)[0], **options
    )
    assert isinstance(optimizer.inner, LaProp)
    (group,) = optimizer.param_groups
    assert (group["betas"], group["horizon"]) == ((0.9, 0.95), 0.5)
    assert (group["lr"], group["weight_decay"]) == (1e-2, 0.2)


def groups_by_dimension(model: nn.Module, *, named: bool) -> list[dict[str, Any]]:
    """Return groups as training scripts make them: no weight decay for norms and biases."""
    many = [(n, p) if named else p for n, p in model.named_parameters() if p.dim() > 1]
    few = [(n, p) if named else p for n, p in model.named_parameters() if p.dim() == 1]
    return [{"params": many}, {"params": few, "weight_decay": 0.0, "betas": (0.7, 0.9)}]


@pytest.mark.parametrize("named", [True, False])
def test_parameter_groups_keep_what_they_say(named: bool) -> None:
    optimizer = low_communication(
        groups_by_dimension(make_model(), named=named), lr=1e-2, transport=Simulated(2)[0]
    )
    many, few = optimizer.param_groups
    assert (many["weight_decay"], few["weight_decay"]) == (0.1, 0.0)
    assert (many["betas"], few["betas"]) == ((0.9, 0.95), (0.7, 0.9))
    assert many["horizon"] == few["horizon"] == 0.5
    names = ["0.weight", "3.weight"] if named else ["0", "1"]
    assert many["param_names"] == names
    assert len({*many["param_names"], *few["param_names"]}) == 6


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (
            torch.optim.AdamW,
            {"maximize": True},
            "a group has maximize=True, which .* does not have",
        ),
        (torch.optim.AdamW, {"amsgrad": True}, "a group has amsgrad=True"),
        (torch.optim.SGD, {"momentum": 0.9}, "a group has momentum=0.9"),
        (torch.optim.Adam, {"weight_decay": 0.1}, "decay that is part of the gradient"),
    ],
)
def test_what_another_optimizer_does_is_not_left_out_in_silence(
    kind: Any, options: dict[str, Any], message: str
) -> None:
    groups = kind(make_model().parameters(), lr=1e-3, **options).param_groups
    with pytest.raises(ValueError, match=message):
        low_communication(groups, lr=1e-3, transport=Simulated(2)[0])


def test_the_groups_of_an_optimizer_that_is_replaced() -> None:
    options: Any = {"bits_per_parameter": 0.5, "transport": Simulated(2)[0]}
    adamw = torch.optim.AdamW(make_model().parameters(), lr=1e-3, weight_decay=0.2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (group,) = low_communication(adamw.param_groups, lr=1e-3, **options).param_groups
        low_communication(
            torch.optim.Adam([torch.ones(99, 99, requires_grad=True)]).param_groups,
            lr=1e-3,
            **options,
        )
    assert (group["lr"], group["weight_decay"]) == (1e-3, 0.2)
    with pytest.warns(UserWarning, match=r"lr=0.005 has no effect: every group has an lr of its"):
        low_communication(adamw.param_groups, lr=5e-3, **options)


def test_groups_that_say_nothing_change_nothing() -> None:
    def rank(transport: Transport) -> list[torch.Tensor]:
        weights = []
        for grouped in (False, True):
            model = make_model()
            given: Any = model.named_parameters()
            if grouped:
                given = [{"params": [p]} for p in model.parameters()]
            optimizer = low_communication(
                given, lr=1e-2, bits_per_parameter=0.3, transport=transport
            )
            take_steps(model, optimizer, range(6), transport.rank)
            weights.append(nn.utils.parameters_to_vector(model.parameters()))
        return weights

    for flat, grouped in run_ranks(rank, 2):
        assert torch.equal(flat, grouped)


def test_muon_makes_its_own_groups() -> None:
    groups = groups_by_dimension(make_model(), named=True)
    with pytest.raises(ValueError, match="makes its own groups"):
        low_communication(groups, lr=1e-2, inner="muon", transport=Simulated(2)[0])


def test_muon_needs_names() -> None:
    options: Any = {"lr": 1e-2, "inner": "muon", "transport": Simulated(2)[0]}
    with pytest.raises(ValueError, match="tells hidden matrices from embeddings by their names"):
        low_communication(make_model().parameters(), **options)
    adamw = torch.optim.AdamW(make_model().named_parameters())
    for group in adamw.param_groups:  # which its own settings would refuse
        group["lr"] = 1e-2
    with_names = [{key: adamw.param_groups[0][key] for key in ("params", "param_names")}]
    matrices, _ = low_communication(with_names, **options).param_groups
    assert matrices["param_names"] == ["0.weight", "3.weight"]


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("place", [0, 1])
def test_a_group_may_have_no_parameters(named: bool, place: int) -> None:
    model = make_model()
    members = list(model.named_parameters() if named else model.parameters())
    groups: list[dict[str, Any]] = [{"params": members}]
    groups.insert(place, {"params": []})
    optimizer = low_communication(groups, lr=1e-2, transport=Simulated(1)[0])
    assert [len(group["params"]) for group in optimizer.param_groups] == (
        [0, len(members)] if place == 0 else [len(members), 0]
    )
    take_steps(model, optimizer, range(2), 0)


def test_muon_takes_the_hidden_matrices() -> None:
    optimizer = low_communication(
        make_model().named_parameters(), lr=1e-2, inner="muon", transport=Simulated(2)[0]
    )
    assert isinstance(optimizer.inner, MuonAdamW)
    matrices, others = optimizer.param_groups
    assert matrices["param_names"] == ["0.weight", "3.weight"]
    assert (others["betas"], others["horizon"]) == ((0.9, 0.95), 0.5)


def test_groups_taken_over_twice_are_as_if_taken_over_once() -> None:
    """As a script does that is stopped, started and loads its optimizer again."""
    model, steps = make_model(), []
    adamw = torch.optim.AdamW(model.named_parameters(), lr=1e-2, betas=(0.9, 0.99))
    for groups in (adamw.param_groups, None):
        groups = steps[-1].param_groups if groups is None else groups
        steps.append(low_communication(groups, lr=1e-2, transport=Simulated(2)[0]))
    first, second = (optimizer.param_groups[0] for optimizer in steps)
    assert (first["betas"], first["horizon"]) == (second["betas"], second["horizon"])
    assert first["betas"] == (0.9, 0.99)

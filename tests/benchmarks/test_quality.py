"""The quality kept: what is run, what is divided by what, and what the page says."""

import itertools
import json
import math
import operator
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn
from typer.testing import CliRunner

from benchmarks.lab.methods import parse_method
from benchmarks.lab.model import count
from benchmarks.lab.plain import rebuild
from benchmarks.lab.runs import Point, Run, RunStore, Tuned
from benchmarks.quality import runs, settings
from benchmarks.quality.__main__ import RESULTS, app, find
from benchmarks.quality.page import make_cells, make_page, to_json
from benchmarks.quality.rows import ROWS, rows
from benchmarks.quality.runs import (
    ADAMW,
    Controls,
    bits_of,
    is_control,
    make_method,
    momenta,
    quality_kept,
    same_optimizer,
    with_controls,
)
from benchmarks.quality.settings import PRESETS, Preset, Setting
from comm_hooks.collectives import Simulated
from comm_hooks.launchers.advise.quality import Cell, measured
from comm_hooks.optim import LaProp
from comm_hooks.optim.moments import shortened
from tests.benchmarks.studying import nothing

SETTING = Setting("python", 2, 6, 0.1)
TINY = {"layers": 1, "width": 16, "heads": 2, "context": 16, "eval_windows": 8}


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Setting:
    """A setting that trains in a second."""
    text = tmp_path / "text"
    text.mkdir()
    (text / "rhyme.txt").write_text("".join(f"{i} bottles on the wall, " for i in range(2000)))
    preset = Preset("Rhymes, GPT", "gpt_text", {"data_dir": text, **TINY}, 16, 7_856)
    monkeypatch.setitem(settings.PRESETS, "tiny", preset)
    settings.build.cache_clear()
    return Setting("tiny", 2, 2, 0.1)


def runs_of(path: Path, setting: Setting, losses: dict[str, Sequence[float | None]]) -> RunStore:
    """Keep runs with these losses, by method and seed; None for one that diverged."""
    path.parent.mkdir(exist_ok=True)
    store = RunStore(path)
    for name, own in losses.items():
        method = make_method(setting, name)
        for momentum, (seed, loss) in itertools.product(method.variants, enumerate(own)):
            sent = round(0.1 / 8 * setting.steps * PRESETS[setting.task].parameters)
            curve = [] if loss is None else [Point(setting.steps, loss, 0.5, sent)]
            failure = "diverged" if loss is None else None
            settings = {"lr": method.start, **momentum}
            store.add(Run(method.spec(settings, seed), curve, failure))
    return store


def by_seed(*losses: float | None) -> list[Run]:
    method = make_method(SETTING, "topk")
    return [
        Run(
            method.spec({"lr": 1e-3}, seed),
            [Point(1, loss, 0.5, 8)] if loss is not None else [],
            None if loss is not None else "diverged",
        )
        for seed, loss in enumerate(losses)
    ]


def test_the_quality_is_a_share_of_what_exchanging_is_worth() -> None:
    kept = quality_kept(by_seed(2.1, 2.0), by_seed(2.5, 2.5), by_seed(2.0, 2.1))
    assert kept is not None
    assert kept.mean == pytest.approx((0.4 + 0.5) / (0.5 + 0.4))
    assert kept.spread == pytest.approx((0.5 / 0.4 - 0.4 / 0.5) / 2)
    assert str(kept) == "100 ± 23 %"
    diverged = quality_kept(by_seed(2.0, None), by_seed(2.5, 2.5), by_seed(2.0, 2.0))
    assert diverged is not None
    assert diverged.mean == -math.inf


@pytest.mark.parametrize(
    ("none", "all_reduce"),
    [
        ((2.0,), (2.1,)),  # exchanging is worth nothing
        ((2.10, 2.02, 2.06), (2.06, 2.06, 2.05)),  # little, and not sure
        ((), (2.0,)),
        ((None,), (2.0,)),
    ],
)
def test_no_number_is_divided_by_noise(
    none: tuple[float | None, ...], all_reduce: tuple[float | None, ...]
) -> None:
    assert quality_kept(by_seed(2.0, 2.0, 2.0), by_seed(*none), by_seed(*all_reduce)) is None


def test_the_page_has_the_quality_of_all_seeds(tmp_path: Path) -> None:
    losses: dict[str, Sequence[float | None]] = {
        "all_reduce": (1.0, 1.0),
        "none": (2.0, 2.0),
        "all_reduce+laprop": (0.8, 0.8),
        "none+laprop": (1.8, 1.8),
        "low_communication": (1.1, 1.3),
        "topk": (None, None),
    }
    setting = Setting("python", 2, 6, 2.0)
    store = runs_of(tmp_path / "quality" / "records.jsonl", setting, losses)
    few = ["--jobs", "0", "--seeds", "1", "--tries", "1", "--results", str(store.file.parent)]
    result = CliRunner().invoke(app, few)
    assert result.exit_code == 0, result.output
    page = (tmp_path / "quality.md").read_text()
    assert "## 2 ranks, 2 tokens per parameter" in page
    shown = "1.200 (**60 ± 10 %**; 80 ± 10 %) lr 0.004, beta1 0.9"
    assert f"| `low_communication` | 0.1 | {shown} |" in page
    assert "| `all_reduce` | 0.1 | 1.000 lr 0.004, beta1 0.8 |" in page
    assert "| `topk` | 0 | diverged |" in page
    cells = {cell.method: cell for cell in make_cells(find(store, tries=1))}
    assert (cells["topk"].kept, cells["topk"].spread) == ({"python": -10.0}, 10.0)
    assert cells["low_communication"].kept == {"python": 0.6}
    restored = json.loads(to_json(list(cells.values())))["cells"]
    assert [rebuild(Cell, each) for each in restored] == list(cells.values())


def test_muon_is_compared_with_muon_and_each_schedule_has_its_own_table(tmp_path: Path) -> None:
    losses = {"all_reduce": 1.0, "none": 4.0, "all_reduce+muon_adamw": 2.0, "none+muon_adamw": 3.0}
    losses["low_communication:muon=true"] = 2.2
    for setting in (SETTING, replace(SETTING, schedule="constant")):
        own = {name: (loss,) for name, loss in losses.items()}
        store = runs_of(tmp_path / "records.jsonl", setting, own)
    found = find(store, tries=1)
    page = make_page(found)
    assert page.count("(**80 %**; 60 %)") == 2
    assert page.index("parameter\n") < page.index("parameter, constant learning rate\n")
    assert [cell.kept for cell in make_cells(found)] == [{"python": 0.8}]


@pytest.mark.parametrize("method", dict.fromkeys(name for _, names in ROWS for name in names))
def test_each_method_has_the_controls_of_its_inner_optimizer(method: str) -> None:
    same = same_optimizer(method)
    for name in (method, same.none, same.all_reduce):
        parse_method(name)
        assert same_optimizer(name) == same or parse_method(name).optimizer == "laprop"
    assert is_control(same.none)
    assert is_control(same.all_reduce)
    assert not is_control(method)
    kinds = {"muon": "muon_adamw", "mu_lo": "muon_adamw", "low_comm": "laprop", "sign+": "laprop"}
    inner = next((kind for part, kind in kinds.items() if part in method), None)
    assert same.none == (f"none+{inner}" if inner else "none")


def optimizer_of(method: str, momentum: Tuned) -> Any:
    """Return the optimizer whose local steps a method takes, as it trains."""
    pair, shared = runs._with_settings(SETTING, method, {"lr": 1e-3, **momentum}, 0)
    layer = nn.Linear(64, 64)
    named = [(f"layer.{name}", parameter) for name, parameter in layer.named_parameters()]
    if pair.needs_ddp:
        return pair.build(named, shared)
    return pair.attach(named, shared, Simulated(1)[0]).scheduled


def betas_of(group: dict[str, Any]) -> tuple[float, float]:
    """Return the decay rates of a group's steps, of which LaProp may halve the first horizon."""
    beta1, beta2 = group["betas"]
    return round(shortened(beta1, group.get("horizon", 1.0)), 6), beta2


def beta1s(method: str) -> set[float]:
    """Return the first decay rates with which the steps of a method are tuned."""
    optimizers = (optimizer_of(method, momentum) for momentum in momenta(method))
    return {betas_of(optimizer.param_groups[-1])[0] for optimizer in optimizers}


@pytest.mark.parametrize("method", dict.fromkeys(name for _, names in rows() for name in names))
def test_all_methods_are_tuned_over_the_same_two_momenta(method: str) -> None:
    assert beta1s(method) == {0.8, 0.9}


def test_the_control_takes_the_local_steps_of_the_method() -> None:
    """With one rank and no local steps left to differ by, both are the same optimizer."""
    rounds, control = (optimizer_of(name, {"beta1": beta1}) for name, beta1 in STEPS)
    assert isinstance(control, LaProp)
    assert isinstance(rounds.inner, LaProp)
    for own, other in zip(rounds.inner.param_groups, control.param_groups, strict=True):
        assert betas_of(own) == pytest.approx(betas_of(other))
        for key in ("eps", "weight_decay", "lr"):
            assert own[key] == pytest.approx(other[key]), key


STEPS = (("low_communication", 0.9), ("all_reduce+laprop", 0.8))


def test_controls_come_first_and_once() -> None:
    assert with_controls(
        ["quantize:bits=2", "low_communication", "low_communication:muon=true"]
    ) == [
        *("all_reduce", "none", "all_reduce+laprop", "none+laprop"),
        *("all_reduce+muon_adamw", "none+muon_adamw"),
        *("quantize:bits=2", "low_communication", "low_communication:muon=true"),
    ]
    assert same_optimizer("quantize:bits=2") == ADAMW == Controls("none", "all_reduce")


def perform(setting: Setting, name: str) -> Run:
    method = make_method(setting, name)
    return method.run(method.spec(LIKE, 1))


LIKE = {"lr": 3e-3, "beta1": 0.9}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["none", "low_communication"])
def test_processes_train_what_simulated_ranks_train(method: str) -> None:
    setting = Setting("python_small", 2, 2, 4e-3)
    simulated = perform(setting, method)
    assert runs._train(setting, method, True, LIKE, 1, nothing) == simulated.curve
    assert (method == "none") == (bits_of(simulated) == 0)


@pytest.mark.slow
def test_hooks_that_need_ddp_get_it() -> None:
    setting = Setting("python_small", 2, 2, 4e-3)
    names = ("all_reduce", "none", "bf16", "powersgd:rank=2")
    full, none, half, low_rank = (perform(setting, name) for name in names)
    assert bits_of(half) == pytest.approx(bits_of(full) / 2, rel=1e-3)
    losses = ([point.loss for point in run.curve] for run in (half, full))
    assert next(losses) == pytest.approx(next(losses), abs=3e-3)
    assert 0 < bits_of(low_rank) < bits_of(full) / 4
    assert low_rank.loss < none.loss


def test_methods_follow_the_schedule(tiny: Setting) -> None:
    steady = replace(tiny, schedule="constant")
    assert perform(tiny, "all_reduce").loss != perform(steady, "all_reduce").loss


@pytest.mark.slow
def test_a_budget_that_a_setting_cannot_meet_costs_its_own_row_only(tmp_path: Path) -> None:
    setting = Setting("python", 2, 2, 1e-3)
    sizes = ["--tasks", "python", "--ranks", "2", "--batches", "2", "--tokens", "1e-3"]
    controls = dict.fromkeys(with_controls(["low_communication"])[:-1], (2.0,))
    store = runs_of(tmp_path / "quality" / "records.jsonl", setting, controls)
    few = ["--tries", "1", "--seeds", "1", "--jobs", "1", "--results", str(store.file.parent)]
    result = CliRunner().invoke(app, [*sizes, *few, "--methods", "low_communication:bits=0.0073"])
    assert result.exit_code == 0, result.output
    assert "0.0073 bits per parameter and step are too few" in result.output
    assert len(RunStore(store.file)) == 8
    assert (tmp_path / "quality.md").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "pyhton"], "did you mean 'python'"),
        (["--tasks", "python", "--ranks", "4,x"], "--ranks"),
        (["--tasks", "python", "--batches", "0"], "--batches"),
        (["--tasks", "python", "--tokens", "nan"], "--tokens"),
        (["--rows", "low_comunication"], "--rows"),
        (["--tasks", "python", "--schedule", "cosin"], "did you mean 'cosine'"),
        (["--tasks", "python", "--methods", "topkk"], "did you mean 'topk'"),
    ],
)
def test_wrong_options_are_refused(arguments: list[str], message: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [*arguments, "--jobs", "0", "--results", str(tmp_path)])
    assert result.exit_code == 2
    assert message in result.output
    assert result.output.count("\n") == 1


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_of_the_size_that_is_said(name: str) -> None:
    try:
        task = settings.build(name, 2)
    except ValueError as error:
        pytest.skip(str(error))
    assert len(task.clients) == 2
    assert count(task.make_model) == PRESETS[name].parameters


def test_missing_data_says_what_it_wants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preset = PRESETS["images"]
    missing = replace(preset, options={**preset.options, "data_dir": tmp_path})
    monkeypatch.setitem(settings.PRESETS, "images", missing)
    settings.build.cache_clear()
    result = CliRunner().invoke(app, ["--tasks", "images", "--results", str(tmp_path)])
    assert result.exit_code == 2
    assert "apt install dataset-fashion-mnist" in result.output


def test_advise_knows_what_the_records_say() -> None:
    key = operator.attrgetter("method", "ranks", "tokens", "batch")
    found = make_cells(find(RunStore(RESULTS / "records.jsonl")))
    assert sorted(found, key=key) == sorted(measured(), key=key)


def test_a_search_that_has_not_ended_is_on_no_page(tmp_path: Path) -> None:
    records = RunStore(RESULTS / "records.jsonl")
    row = Setting("perl", 4, 6, 2.0), "low_communication"
    (chosen,) = {str(run.spec) for run in find(records)[row].runs if run.seed == 1}
    fewer = RunStore(tmp_path / "records.jsonl")
    for run in records:
        if str(run.spec) != chosen:
            fewer.add(run)
    assert row not in find(fewer)


def test_the_page_is_made_of_the_records() -> None:
    found = find(RunStore(RESULTS / "records.jsonl"))
    assert (RESULTS.parent / "quality.md").read_text() == make_page(found)

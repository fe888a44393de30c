"""The share kept: what is run, what is tuned, what is divided by what, and what the page says."""

import json
import math
import operator
import statistics
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from benchmarks.lab.methods import parse_method
from benchmarks.lab.plain import rebuild
from benchmarks.lab.model import count
from benchmarks.quality import noise_scale, settings
from benchmarks.quality.__main__ import app
from benchmarks.quality.cells import make_cells, to_json
from benchmarks.quality.methods import METHODS, controls
from benchmarks.quality.noise_scale import estimate, scales
from benchmarks.quality.options import RESULTS
from benchmarks.quality.page import make_page, write_picture
from benchmarks.quality.runs import Record, Wanted, perform, read_records
from benchmarks.quality.settings import PRESETS, Preset, Setting
from benchmarks.quality.shares import share_kept
from benchmarks.quality.tuning import Entry, by_wanted
from comm_hooks.launchers.advise.quality import Cell, measured

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


def record(wanted: Wanted, loss: float | None) -> Record:
    return Record(wanted, loss, 0.5, 0.1, [], 1.0, "2026-01-01")


def play(entry: Entry, loss: Callable[[float, int], float | None]) -> dict[Wanted, Record]:
    """Make all runs of an entry."""
    records: dict[Wanted, Record] = {}
    while wanted := entry.next(records):
        records |= {each: record(each, loss(each.lr, each.seed)) for each in wanted}
    return records


@given(best=st.floats(1e-5, 10.0), tries=st.integers(1, 6), seeds=st.integers(1, 4))
def test_every_method_is_tuned_by_the_same_rule_and_its_best_gets_all_seeds(
    best: float, tries: int, seeds: int
) -> None:
    entry = Entry(SETTING, "topk", 1e-3, tries, range(seeds))
    records = play(entry, lambda lr, seed: abs(math.log(lr / best)) - seed)
    first = [r for r in records.values() if r.wanted.seed == 0]
    assert tries <= len(first) <= tries + 4
    assert tries < 3 or len(first) == tries + 4 or not entry.is_at_edge(records)
    finished = entry.finished(records)
    chosen = min(first, key=lambda r: r.loss or 0.0)
    assert sorted(finished) == list(range(seeds))
    assert {r.wanted.lr for r in finished.values()} == {chosen.wanted.lr}
    assert len(records) == len(first) + seeds - 1


@given(
    steps=st.lists(st.floats(0.0, 0.5), min_size=9, max_size=9),
    luck=st.lists(st.floats(0.0, 1.0), min_size=27, max_size=27),
)
def test_no_rate_that_may_be_better_is_left_out_for_the_luck_of_the_first_seed(
    steps: list[float], luck: list[float]
) -> None:
    entry = Entry(SETTING, "topk", 1e-3, 3, range(3))

    def loss(lr: float, seed: int) -> float:
        place = round(math.log2(lr / 1e-3)) % 9
        return steps[place] + luck[3 * place + seed]

    records = play(entry, loss)
    finished = entry.finished(records)
    assert len(finished) == 3
    mean = statistics.mean(r.judged for r in finished.values())
    for rate in {wanted.lr for wanted in records}:
        means = [r.judged for w, r in records.items() if w.lr == rate]
        assert (len(means) == 1 and means[0] >= mean) or statistics.mean(means) >= mean


def test_a_rate_on_the_verge_of_divergence_is_not_chosen() -> None:
    """On the first seed it is the best; on the others it is far worse than its neighbour."""
    losses = {4e-3: (0.9, 1.0, 0.95), 8e-3: (0.8, 1.3, 1.2), 2e-3: (0.99, 1.1, 1.1)}
    entry = Entry(SETTING, "topk", 4e-3, 3, range(3))
    records = play(entry, lambda lr, seed: losses[lr][seed] if lr in losses else 2.0)
    assert {r.wanted.lr for r in entry.finished(records).values()} == {4e-3}
    assert not entry.is_at_edge(records)


def test_where_the_means_lead_to_the_edge_the_search_goes_on() -> None:
    losses = {4e-3: (0.9, 2.0), 2e-3: (1.0, 1.0), 1e-3: (0.95, 0.5), 5e-4: (1.2, 1.9)}
    entry = Entry(SETTING, "topk", 4e-3, 3, range(2))
    records = play(entry, lambda lr, seed: losses[lr][seed] if lr in losses else 3.0)
    assert {r.wanted.lr for r in entry.finished(records).values()} == {1e-3}
    assert Wanted(SETTING, "topk", 5e-4, 0) in records


@pytest.mark.parametrize(
    ("best", "is_at_edge"), [(1.0, True), (4e-3, False), (1e-3, False), (1e-6, True)]
)
def test_the_edge_of_what_was_tried_is_known(best: float, is_at_edge: bool) -> None:
    entry = Entry(SETTING, "topk", 1e-3, 3, range(1))
    records = play(entry, lambda lr, seed: abs(math.log(lr / best)))
    assert entry.is_at_edge(records) == is_at_edge
    assert "†" in make_page([entry], records) if is_at_edge else True


def test_a_run_that_diverged_is_not_the_best() -> None:
    entry = Entry(SETTING, "topk", 1e-3, 3, range(2))
    records = play(entry, lambda lr, seed: None if lr > 1e-3 else 2.0)
    assert entry.finished(records)[0].wanted.lr <= 1e-3


def test_what_has_a_record_is_not_run_again() -> None:
    entry = Entry(SETTING, "topk", 1e-3, 3, range(3))
    records = play(entry, lambda lr, seed: abs(math.log(lr / 2e-3)))
    assert entry.next(records) == []
    wider = replace(entry, seeds=range(4))
    assert [wanted.seed for wanted in wider.next(records)] == [3]


def by_seed(*losses: float | None) -> dict[int, Record]:
    wanted = Wanted(SETTING, "topk", 1e-3, 0)
    return {seed: record(wanted, loss) for seed, loss in enumerate(losses)}


def test_the_share_is_that_of_what_exchanging_is_worth() -> None:
    share = share_kept(by_seed(2.1, 2.0), by_seed(2.5, 2.5), by_seed(2.0, 2.1))
    assert share is not None
    assert share.mean == pytest.approx((0.4 + 0.5) / (0.5 + 0.4))
    assert share.spread == pytest.approx((0.5 / 0.4 - 0.4 / 0.5) / 2)
    assert str(share) == "100 ± 23 %"


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
    assert share_kept(by_seed(2.0, 2.0, 2.0), by_seed(*none), by_seed(*all_reduce)) is None


def test_what_diverges_keeps_nothing() -> None:
    share = share_kept(by_seed(2.0, None), by_seed(2.5, 2.5), by_seed(2.0, 2.0))
    assert share is not None
    assert share.mean == -math.inf


def test_the_page_has_the_shares(tmp_path: Path) -> None:
    names = {"all_reduce": 2.0, "none": 2.5, "local_adamw:fragments=8": 2.1, "topk": None}
    entries = [Entry(SETTING, name, 1e-3, 1, range(2)) for name in names]
    records = {}
    for entry, loss in zip(entries, names.values(), strict=True):
        records |= play(entry, lambda lr, seed, loss=loss: loss)  # type: ignore[misc]
    page = make_page(entries, records)
    assert "## 2 ranks, 0.1 tokens per parameter" in page
    assert "| `local_adamw:fragments=8` | 0.1 | 2.100 (**80 ± 0 %**) lr 0.001 |" in page
    assert "| `topk` | 0.1 | diverged |" in page
    assert write_picture(entries, records, tmp_path / "share.png").stat().st_size > 1000


@pytest.mark.parametrize("method", METHODS)
def test_what_the_list_names_is_a_method_and_so_are_its_controls(method: str) -> None:
    for name in (method, *controls(method)):
        parse_method(name)
    has_muon = parse_method(method).optimizer in ("muon_adamw", "mu_lo_co") or "muon" in method
    assert controls(method)[1] == ("all_reduce+muon_adamw" if has_muon else "all_reduce")


def test_muon_is_compared_with_muon_and_each_schedule_has_its_own_table() -> None:
    losses = {"all_reduce": 1.0, "none": 4.0, "all_reduce+muon_adamw": 2.0, "none+muon_adamw": 3.0}
    losses["low_communication:muon=true"] = 2.2
    steady = replace(SETTING, schedule="constant")
    entries = [Entry(s, name, 1e-3, 1, range(1)) for s in (SETTING, steady) for name in losses]
    records = {}
    for entry in entries:
        loss = losses[entry.method]
        records |= play(entry, lambda lr, seed, loss=loss: loss)  # type: ignore[misc]
    page = make_page(entries, records)
    assert page.count("(**80 %**)") == page.count("**") // 2 == 2
    assert page.index("parameter\n") < page.index("parameter, constant learning rate\n")
    assert [cell.kept for cell in make_cells(entries, records)] == [{"python": 0.8}]


def test_records_survive_the_file(tiny: Setting, tmp_path: Path) -> None:
    done = perform(Wanted(tiny, "all_reduce", 3e-3, 0))
    path = tmp_path / "records.jsonl"
    path.write_text(done.to_json() + "\n")
    assert read_records(path) == [done]
    assert done.loss == pytest.approx(done.curve[-1], abs=1e-5)
    assert by_wanted([done]) == {done.wanted: done}


@pytest.mark.slow
@pytest.mark.parametrize("method", ["none", "low_communication"])
def test_processes_train_what_simulated_ranks_train(method: str) -> None:
    wanted = Wanted(Setting("python_small", 2, 2, 4e-3), method, 3e-3, 1)
    simulated, real = perform(wanted), perform(wanted, processes=True)
    assert real.curve == simulated.curve
    assert real.bits == simulated.bits
    assert (method == "none") == (real.bits == 0)


@pytest.mark.slow
def test_hooks_that_need_ddp_get_it() -> None:
    wanted = Wanted(Setting("python_small", 2, 2, 4e-3), "all_reduce", 3e-3, 1)
    full, none = perform(wanted), perform(replace(wanted, method="none"))
    half, low_rank = (perform(replace(wanted, method=name)) for name in ("bf16", "powersgd:rank=2"))
    assert half.bits == pytest.approx(full.bits / 2, rel=1e-3)
    assert half.curve == pytest.approx(full.curve, abs=3e-3)
    assert 0 < low_rank.bits < full.bits / 4
    assert low_rank.judged < none.judged


def test_methods_follow_the_schedule(tiny: Setting) -> None:
    wanted = Wanted(tiny, "all_reduce", 3e-3, 0)
    steady = replace(wanted, setting=replace(tiny, schedule="constant"))
    assert perform(wanted).loss != perform(steady).loss


def test_the_command_runs_what_is_missing(tiny: Setting, tmp_path: Path) -> None:
    out = tmp_path / "quality"
    sizes = ["--tasks", "tiny", "--ranks", "2", "--batches", "2", "--tokens", "0.1"]
    few = ["--tries", "1", "--seeds", "1", "--only", "local_adamw:f*", "--results", str(out)]
    setting = Setting("tiny", 2, 2, 0.1)
    wanted = [
        Wanted(setting, name, 4e-3, 0) for name in ("all_reduce", "none", "local_adamw:fragments=8")
    ]
    out.mkdir()
    (out / "records.jsonl").write_text("".join(record(w, 2.0).to_json() + "\n" for w in wanted))
    result = CliRunner().invoke(app, [*sizes, *few])
    assert result.exit_code == 0, result.output
    assert len(read_records(out / "records.jsonl")) == 3
    assert "local_adamw:fragments=8" in (tmp_path / "quality.md").read_text()


def test_the_page_is_of_all_seeds_however_few_are_asked_for(tmp_path: Path) -> None:
    setting, out = Setting("python", 2, 6, 2.0), tmp_path / "quality"
    method = "local_adamw:fragments=8"
    losses = {"all_reduce": (1.0, 1.0), "none": (2.0, 2.0), method: (1.1, 1.3)}
    records = [
        record(Wanted(setting, name, 4e-3, seed), loss)
        for name, own in losses.items()
        for seed, loss in enumerate(own)
    ]
    out.mkdir()
    (out / "records.jsonl").write_text("".join(each.to_json() + "\n" for each in records))
    few = ["--jobs", "0", "--seeds", "1", "--tries", "1", "--results", str(out)]
    result = CliRunner().invoke(app, few)
    assert result.exit_code == 0, result.output
    assert "**80 ± 10 %**" in (tmp_path / "quality.md").read_text()


def test_a_budget_that_a_setting_cannot_meet_costs_its_own_row_only(tmp_path: Path) -> None:
    setting = Setting("python", 2, 2, 1e-3)
    sizes = ["--tasks", "python", "--ranks", "2", "--batches", "2", "--tokens", "1e-3"]
    few = ["--tries", "1", "--seeds", "1", "--jobs", "1", "--results", str(tmp_path / "quality")]
    wanted = [Wanted(setting, name, 4e-3, 0) for name in ("all_reduce", "none")]
    (tmp_path / "quality").mkdir()
    path = tmp_path / "quality" / "records.jsonl"
    path.write_text("".join(record(w, 2.0).to_json() + "\n" for w in wanted))
    result = CliRunner().invoke(app, [*sizes, *few, "--only", "low_communication:bits=0.0073"])
    assert result.exit_code == 0, result.output
    assert "0.0073 bits per parameter and step are too few" in result.output
    assert len(read_records(path)) == 2
    assert (tmp_path / "quality.md").exists()


def test_a_damaged_record_is_named(tmp_path: Path) -> None:
    good = record(Wanted(SETTING, "topk", 1e-3, 0), 2.0).to_json()
    path = tmp_path / "records.jsonl"
    for bad in (good[:50], "[]", good.replace('"lr"', '"rate"')):
        path.write_text(f"{good}\n{bad}\n")
        with pytest.raises(ValueError, match=r"records\.jsonl, line 2: no record"):
            read_records(path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tasks", "pyhton"], "did you mean 'python'"),
        (["--ranks", "4,x"], "--ranks"),
        (["--batches", "0"], "--batches"),
        (["--tokens", "nan"], "--tokens"),
        (["--only", "low_comunication"], "--only"),
        (["--schedule", "cosin"], "did you mean 'cosine'"),
        (["--method", "topk"], "LR@METHOD"),
        (["--method", "1e-3@topkk"], "did you mean 'topk'"),
        (["--method", "nan@topk"], "--method"),
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
    assert numel(task) == PRESETS[name].parameters


def test_missing_data_says_what_it_wants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    preset = PRESETS["images"]
    missing = replace(preset, options={**preset.options, "data_dir": tmp_path})
    monkeypatch.setitem(settings.PRESETS, "images", missing)
    settings.build.cache_clear()
    result = CliRunner().invoke(app, ["--tasks", "images", "--results", str(tmp_path)])
    assert result.exit_code == 2
    assert "apt install dataset-fashion-mnist" in result.output


def test_advise_knows_what_the_records_say() -> None:
    records = by_wanted(read_records(RESULTS / "records.jsonl"))
    pairs = dict.fromkeys((w.setting, w.method) for w in records)
    entries = [Entry(s, m, METHODS.get(m, 4e-3), 3, range(3)) for s, m in pairs]
    key = operator.attrgetter("method", "ranks", "tokens", "batch")
    assert sorted(make_cells(entries, records), key=key) == sorted(measured(), key=key)


def test_what_diverged_is_a_number_in_the_file() -> None:
    entries: list[Entry] = []
    records: dict[Wanted, Record] = {}
    for method, loss in (("all_reduce", 2.0), ("none", 3.0), ("topk", None)):
        entries.append(Entry(SETTING, method, 1e-3, 1, range(1)))
        wanted = Wanted(SETTING, method, 1e-3, 0)
        records[wanted] = record(wanted, loss)
    (cell,) = make_cells(entries, records)
    assert (cell.kept, cell.spread) == ({"python": -10.0}, 10.0)
    assert rebuild(Cell, json.loads(to_json([cell]))["cells"][0]) == cell


@given(
    seed=st.integers(0, 2**16),
    batch=st.sampled_from([1, 8]),
    deviation=st.floats(0.5, 4.0),
    skew=st.floats(0.0, 2.0),
)
@hypothesis.settings(max_examples=10)
def test_noise_and_skew_are_estimated_without_bias(
    seed: int, batch: int, deviation: float, skew: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    ranks, count, numel = 4, 64, 2_000
    centers = 1 + skew * torch.randn(ranks, numel, generator=generator)
    noise = torch.randn(ranks, count, numel, generator=generator) * deviation / batch**0.5
    found = estimate([center + own for center, own in zip(centers, noise, strict=True)], batch)
    true = numel * deviation**2, float(centers.mean(0).square().sum()), float(centers.var(0).sum())
    uncertain = numel * deviation**2 / batch / count  # what must have been subtracted
    assert found[0] == pytest.approx(true[0], rel=0.05)
    assert found[1] == pytest.approx(true[1], rel=0.1, abs=0.3 * uncertain)
    assert found[2] == pytest.approx(true[2], rel=0.1, abs=0.3 * uncertain)


def test_noise_scales_are_measured_on_the_way(tiny: Setting) -> None:
    found = list(scales(tiny, lr=4e-3, points=2, samples=256))
    assert [each.step for each in found] == [tiny.steps // 2, tiny.steps]
    assert found[1].loss < found[0].loss
    assert all(each.noise_scale is None or each.noise_scale > 0 for each in found)
    assert found == list(scales(tiny, lr=4e-3, points=2, samples=256))


def test_a_noise_scale_needs_all_reduce_s_learning_rate() -> None:
    result = CliRunner().invoke(noise_scale.app, ["--tasks", "python", "--tokens", "0.3"])
    assert result.exit_code == 2
    assert "all-reduce has no learning rate yet" in result.stderr

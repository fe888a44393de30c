"""The table of everything that was tried: what is run, what is kept, and what is said of it."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import tried
from benchmarks.lab.methods import parse_method
from benchmarks.lab.model import GPTConfig
from benchmarks.lab.runs import Figures, Run, Settings
from benchmarks.tried import RESULTS, Job, Row, Tried

_SMALL = Settings(
    steps=4,
    eval_every=2,
    batch=2,
    warmup=2,
    eval_windows=4,
    model=GPTConfig(layers=1, width=32, heads=2, context=16),
)


def _run(method: str, loss: float | None, seed: int = 0, sent: int = 600) -> Run:
    settings = Settings(steps=6, seed=seed)
    figures = None if loss is None else Figures(loss, 0.0, 1.0, sent / 6, sent / 6, sent, sent)
    failure = None if figures else "FloatingPointError: diverged: the loss is nan at step 3"
    facts = {"Date": "2026-01-02", "Model": "GPT", "Machine": "2 cores"}
    return Run(method, "", settings, figures=figures, failure=failure, facts=facts)


def _rows(*runs: Run) -> dict[str, Row]:
    return {row.method: row for row in tried.make_rows(runs, 6)}


def test_every_method_of_the_list_can_be_trained() -> None:
    for entry in tried.read_methods(RESULTS / "tried" / "methods.json"):
        parse_method(entry.method).check(Settings())
        assert entry.why.endswith((".", "?"))
        assert entry.seeds


def test_the_page_is_what_the_records_make() -> None:
    records = RESULTS / "tried"
    methods = tried.read_methods(records / "methods.json")
    runs = tried.read_records(records)
    assert {run.method for run in runs} <= {entry.method for entry in methods}
    keys = [(run.method, run.settings) for run in runs]
    assert len(keys) == len(set(keys)), "a run is there twice"
    page = tried.make_page(runs, methods, (records / "prototypes.md").read_text())
    assert (RESULTS / "tried.md").read_text() == page, "run python benchmarks/tried.py --jobs 0"


@pytest.mark.slow
def test_runs_are_kept_and_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = tmp_path / "corpus"
    corpus.write_text("".join(f"{i} bottles on the wall, " for i in range(200)))
    jobs = [Job("all_reduce", _SMALL), Job("adam:lr=1e30", _SMALL)]
    assert tried.run_missing(jobs, tmp_path / "records", corpus, workers=2) == []
    runs = {run.method: run for run in tried.read_records(tmp_path / "records")}
    assert runs["all_reduce"].figures is not None
    assert runs["all_reduce"].figures.bytes_sent == 4 * runs["all_reduce"].figures.sent_per_step
    assert tried.is_diverged(runs["adam:lr=1e30"])
    assert {run.facts["Machine"] for run in runs.values()} == {tried.make_facts(_SMALL)["Machine"]}

    asked: list[Job] = []

    def crash(method: object, settings: Settings, *others: object, timeout: float) -> Run:
        asked.append(Job(method.spec, settings))  # type: ignore[attr-defined]
        return replace(_run(method.spec, None), failure="rank 1 was ended by SIGKILL")  # type: ignore[attr-defined]

    monkeypatch.setattr(tried, "run_method", crash)
    new = [Job("none", _SMALL), Job("all_reduce", replace(_SMALL, seed=1))]
    failed = tried.run_missing([*jobs, *new], tmp_path / "records", corpus, workers=1)
    assert asked == new
    assert [run.method for run in failed] == ["none", "all_reduce"]
    assert len(tried.read_records(tmp_path / "records")) == 2  # a crash is no result


def test_jobs_follow_the_list_first_seeds_first() -> None:
    methods = [Tried("none", ".", {150: [0, 1], 450: [0]}), Tried("sign", ".", {150: [2]})]

    def asked(seeds: list[int] | None, steps: int | None) -> list[tuple[str, int, int]]:
        jobs = tried.make_jobs(methods, seeds, steps)
        return [(job.method, job.settings.steps, job.settings.seed) for job in jobs]

    everything = [("none", 150, 0), ("none", 450, 0), ("sign", 150, 2), ("none", 150, 1)]
    assert asked(None, None) == everything
    assert asked(None, 150) == [everything[0], *everything[2:]]
    assert asked([7], 450) == [("none", 450, 7)]


losses = st.dictionaries(st.integers(0, 3), st.floats(1, 4), min_size=1)


@given(own=losses, other=losses)
def test_differences_are_those_of_the_seeds_that_both_have(
    own: dict[int, float], other: dict[int, float]
) -> None:
    runs = [_run("sign", loss, seed) for seed, loss in own.items()]
    runs += [_run("none", loss, seed) for seed, loss in other.items()]
    rows = _rows(*runs)
    gap = rows["sign"].minus(rows["none"])
    shared = own.keys() & other.keys()
    if shared:
        assert gap == pytest.approx(sum(own[s] - other[s] for s in shared) / len(shared))
    else:
        assert gap is None
    assert rows["sign"].minus(None) is None


@pytest.mark.parametrize(
    ("loss", "seeds", "words"),
    [
        (1.975, 1, "as good as all-reduce"),
        (1.975, 3, "better than all-reduce"),
        (2.025, 1, "as good as all-reduce"),
        (2.025, 3, "90 % of what exchanging is worth"),  # three seeds tell smaller differences
        (2.0625, 1, "75 % of what exchanging is worth"),
        (2.24, 1, "no better than not exchanging"),
        (2.24, 3, "no better than not exchanging"),
        (2.26, 1, "no better than not exchanging"),
        (2.3, 1, "worse than not exchanging"),
    ],
)
def test_verdicts(loss: float, seeds: int, words: str) -> None:
    controls = [_run("all_reduce", 2.0, s, 9000) for s in range(seeds)]
    controls += [_run("none", 2.25, s, 0) for s in range(seeds)]
    rows = _rows(*controls, *[_run("sign", loss, s) for s in range(seeds)])
    assert tried.verdict(rows["sign"], list(rows.values())).strip("*").split(";")[0] == words
    assert {tried.verdict(rows[name], list(rows.values())) for name in ("all_reduce", "none")} == {
        "control"
    }


def test_seeds_without_a_control_do_not_sharpen_the_verdict() -> None:
    runs = [_run("all_reduce", 2.0, sent=9000), _run("none", 2.25, sent=0)]
    rows = _rows(*runs, *[_run("sign", 2.025, seed) for seed in range(3)])
    assert "as good as all-reduce" in tried.verdict(rows["sign"], list(rows.values()))


def test_the_best_of_their_size_stand_out() -> None:
    runs = [_run("all_reduce", 2.0, sent=9000), _run("none", 2.5, sent=0)]
    runs += [_run("sign", 2.2), _run("topk", 2.3, sent=300), _run("quantize", 2.25, sent=900)]
    rows = _rows(*runs)
    bold = {m for m, row in rows.items() if "**" in tried.verdict(row, list(rows.values()))}
    assert bold == {"sign", "topk"}


def test_a_row_that_diverged_says_so() -> None:
    runs = [_run("all_reduce", 2.0), _run("none", 2.5), _run("sign", 2.2), _run("sign", None, 1)]
    rows = _rows(*runs)
    assert math.isinf(rows["sign"].loss)
    assert tried.verdict(rows["sign"], list(rows.values())) == "diverges"
    assert "| 2.200, inf |" in tried.make_table(list(rows.values()))
    without = _rows(_run("sign", 2.2))
    assert tried.verdict(without["sign"], list(without.values())) == "no control with this seed"


@pytest.mark.slow
def test_the_command_makes_a_page_of_records(tmp_path: Path) -> None:
    def command(*arguments: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, str(Path(tried.__file__)), "--results", str(tmp_path), *arguments],
            capture_output=True,
            text=True,
            check=False,
        )

    records = tmp_path / "tried"
    records.mkdir()
    entry = {"method": "sign", "why": "One bit.", "seeds": {"6": [0]}}
    other = {"method": "topk", "why": "Few.", "seeds": {"6": [0]}}
    (records / "methods.json").write_text(json.dumps([entry, other]))
    (records / "prototypes.md").write_text("## Prototypes\n")
    refused = command("--jobs", "0")
    assert refused.returncode == 2
    assert "has no records" in refused.stderr
    runs = [_run("all_reduce", 2.0, sent=900), _run("none", 2.5, sent=0), _run("sign", 2.2)]
    (records / "6-steps.jsonl").write_text("".join(run.to_json() + "\n" for run in runs))
    assert command("--jobs", "0").returncode == 0
    page = (tmp_path / "tried.md").read_text()
    row = "| `sign` | 0.1 | 0.1 | 2.200 | 2.200 | +0.200 | -0.300 "
    assert row + "| **60 % of what exchanging is worth; nothing thinner is as good** |" in page
    assert "why it was tried\n\n* `sign`: One bit.\n\n## Not run yet\n\n* `topk`: Few.\n" in page
    assert page.endswith("## Prototypes\n")
    assert command("--only", "nothing").returncode == 2
    (records / "methods.json").write_text(json.dumps([{**entry, "method": "sgin"}]))
    assert "sgin" in command("--jobs", "0").stderr

"""Verdicts on the papers' statements follow from the records, by one rule."""

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import ttest_1samp

from benchmarks.lab.outcomes import Outcome
from benchmarks.lab.runs import Point, Run, RunSpec
from benchmarks.studies.claims import CLAIMS, Claim, Entry, Measure
from benchmarks.studies.verdicts import (
    FEWEST_SEEDS,
    NOT_SEEN,
    OPEN,
    PAGE,
    REVERSED,
    SEEN,
    TABLE,
    Records,
    find_verdicts,
    judge,
    make_table,
    summary,
    with_verdicts,
)

CLAIM = Claim("Paper", "Table 1", "study", Entry("new", {"sigma": 1}), Entry("old", {"sigma": 1}))
FINITE = st.floats(-10, 10).map(lambda value: round(value, 3))


@given(gaps=st.lists(FINITE, min_size=FEWEST_SEEDS, max_size=12, unique=True))
def test_the_rule_is_a_paired_test(gaps: list[float]) -> None:
    verdict = judge(CLAIM, [0.0] * len(gaps), gaps, tuned_on=len(gaps), tries=(6, 6))
    chance = ttest_1samp(gaps, 0.0).pvalue
    if abs(chance - 0.05) > 1e-6:
        assert (verdict.word == NOT_SEEN) == (chance > 0.05)
    assert verdict.word != SEEN or verdict.mean > 0
    assert verdict.word != REVERSED or verdict.mean < 0
    other = judge(CLAIM, gaps, [0.0] * len(gaps), tuned_on=len(gaps), tries=(6, 6))
    swapped = {SEEN: REVERSED, REVERSED: SEEN, NOT_SEEN: NOT_SEEN}
    assert other.word == swapped[verdict.word]


def test_what_differs_by_seed_only_is_not_seen() -> None:
    """Unpaired, the same values would be far apart: each seed has its own difficulty."""
    seeds = [10.0, 20.0, 30.0, 40.0, 50.0]
    assert judge(CLAIM, seeds, [seed + 1 for seed in seeds], tuned_on=5, tries=(6, 6)).word == SEEN
    luck = [3.0, -2.0, 2.5, -3.0, 0.5]
    worse = [seed + gap for seed, gap in zip(seeds, luck, strict=True)]
    assert judge(CLAIM, seeds, worse, tuned_on=5, tries=(6, 6)).word == NOT_SEEN


@pytest.mark.parametrize(
    ("seeds", "tuned_on", "tries", "last", "reason"),
    [
        (4, 4, (6, 6), 1.0, "4 seeds"),
        (5, 1, (6, 6), 1.0, "rates tuned on one run"),
        (5, 5, (18, 6), 1.0, "18 tries against 6"),
        (5, 5, (6, 0), 1.0, "tries not recorded"),
        (5, 5, (6, 6), math.inf, "a run diverged"),
        (0, 5, (6, 6), 1.0, "0 seeds"),
    ],
)
def test_open_claims_say_why(
    seeds: int, tuned_on: int, tries: tuple[int, int], last: float, reason: str
) -> None:
    worse = [*[1.0 + 0.01 * i for i in range(seeds - 1)], last][:seeds]
    verdict = judge(CLAIM, [0.0] * seeds, worse, tuned_on, tries)
    assert (verdict.word, verdict.reasons) == (OPEN, [reason])
    assert summary([verdict]) == f"**open** ({reason})"


def test_more_tries_for_the_method_that_ends_above_do_not_matter() -> None:
    gaps = [1.0, 1.1, 0.9, 1.0, 1.2]
    assert judge(CLAIM, [0.0] * 5, gaps, tuned_on=5, tries=(6, 18)).word == SEEN
    assert judge(CLAIM, gaps, [0.0] * 5, tuned_on=5, tries=(6, 18)).word == OPEN


@pytest.mark.parametrize("tries", [(6, 18), (18, 6)])
def test_other_numbers_of_tries_do_not_show_that_there_is_nothing(tries: tuple[int, int]) -> None:
    luck = [3.0, -2.0, 2.5, -3.0, 0.5]
    assert judge(CLAIM, [0.0] * 5, luck, tuned_on=5, tries=tries).word == OPEN


def kept(folder: Path, **record: Any) -> Records:
    (folder / "study").mkdir()
    (folder / "study/study.json").write_text(json.dumps(record))
    return Records(folder)


def test_records_decide(tmp_path: Path) -> None:
    def method(name: str, errors: list[float]) -> dict[str, Any]:
        tries = [{"lr": 0.1}, {"lr": 0.2}]
        values = {"errors": errors, "losses": errors, "tries": tries}
        return {"name": name, "labels": {"sigma": 1, "K": 3}, **values}

    errors = [0.10, 0.11, 0.12, 0.10, 0.11]
    methods = [method("new", errors), method("old", [e + 0.02 for e in errors])]
    records = kept(tmp_path, methods=methods, tuned_on=5)
    verdict = records.verdict(CLAIM)
    assert (verdict.word, verdict.seeds) == (SEEN, 5)
    assert verdict.mean == pytest.approx(2.0), "in points"
    del methods[1]
    (tmp_path / "study/study.json").write_text(json.dumps({"methods": methods}))
    with pytest.raises(ValueError, match="study: 0 methods are old"):
        Records(tmp_path).verdict(CLAIM)


@pytest.mark.parametrize("measure", get_args(Measure))
@pytest.mark.parametrize("failed", range(FEWEST_SEEDS))
def test_a_run_that_diverged_leaves_a_claim_open(
    tmp_path: Path, measure: Measure, failed: int
) -> None:
    def outcome(name: str, loss: float, failed: int | None) -> dict[str, Any]:
        points = [Point(1, loss + seed, 0.1 * loss, 0, training=loss) for seed in range(5)]
        runs = [Run(RunSpec(name, {"sigma": 1}, {"lr": 0.1}, seed)) for seed in range(5)]
        for run, point in zip(runs, points, strict=True):
            run.curve, run.failure = ([], "diverged") if run.seed == failed else ([point], None)
        return Outcome(name, {"sigma": 1}, "", [runs[1], runs[2]], runs).to_dict()

    for name, fails in (("whole", None), ("failed", failed)):
        methods = [outcome("new", 1.0, None), outcome("old", 2.0, fails)]
        (tmp_path / name).mkdir()
        records = kept(tmp_path / name, methods=methods, tuned_on=5)
        verdict = records.verdict(replace(CLAIM, measure=measure))
        assert verdict.seeds == FEWEST_SEEDS
        assert (verdict.word, verdict.reasons) == (
            (SEEN, []) if fails is None else (OPEN, ["a run diverged"])
        )


def test_a_verdict_by_hand_is_overwritten() -> None:
    page = """
## Paper (Author)

| item | paper | state | ours |
|---|---|---|---|
| Table 1 | new is better | repeated small; **seen** | `study` |
| Table 2 | other | **repeated** | `study` |

## Other (Author)

| Table 1 | new is better | repeated small; **seen** | `study` |
"""
    verdict = judge(CLAIM, [1.0] * 5, [0.9, 1.1, 1.0, 0.8, 1.2], tuned_on=5, tries=(6, 6))
    fixed = with_verdicts(page, [verdict])
    assert fixed == page.replace("**seen**", "**not seen**", 1)
    assert with_verdicts(fixed, [verdict]) == fixed
    with pytest.raises(ValueError, match="2 rows"):
        with_verdicts(page.replace("Table 2", "Table 1"), [verdict])


def test_an_item_with_several_verdicts_names_the_methods() -> None:
    seen = judge(CLAIM, [0.0] * 5, [1.0, 1.1, 0.9, 1.0, 1.2], tuned_on=5, tries=(6, 6))
    reversed_ = judge(CLAIM, [1.0, 1.1, 0.9, 1.0, 1.2], [0.0] * 5, tuned_on=5, tries=(6, 6))
    assert summary([seen, seen]) == "**seen**"
    mixed = "**seen**: new at sigma 1 before old; **reversed**: new at sigma 1 before old"
    assert summary([seen, reversed_]) == mixed


def test_the_page_and_the_table_are_written_by_the_command() -> None:
    verdicts = find_verdicts()
    page = PAGE.read_text()
    assert with_verdicts(page, verdicts) == page
    assert TABLE.read_text() == make_table(verdicts)


def test_no_hand_writes_a_verdict() -> None:
    """Verdicts stand in rows of items that have claims, and nowhere else."""
    _, *papers = PAGE.read_text().split("\n## ")
    items = {(claim.paper, claim.item) for claim in CLAIMS}
    found = set()
    for section in papers:
        paper = next(paper for paper, _ in items if section.startswith(paper))
        for line in section.splitlines():
            if re.search(rf"\*\*({SEEN}|{NOT_SEEN}|{REVERSED}|{OPEN})\b", line):
                found.add((paper, line.strip("|").split("|")[0].strip()))
            assert not re.search(r"\bseen\b", re.sub(r"\*\*.*?\*\*", "", line)), line
    assert found == items


def test_the_page_counts_its_rows() -> None:
    head, *papers = PAGE.read_text().split("\n## ")
    counted = {
        row[0]: row[1:4]
        for row in re.findall(r"^\| ([\w-]+) (?:\| (\d+) )(?:\| (\d+) )(?:\| (\d+) )", head, re.M)
    }
    for section in papers:
        states = [
            line.split("|")[3].strip()
            for line in section.splitlines()
            if re.match(r"\| (Fig|Tab|Sec)", line)
        ]
        own = [
            sum(state.startswith("**repeated**") for state in states),
            sum(state.startswith("consistent") for state in states),
            sum(state.startswith("repeated small") for state in states),
        ]
        assert counted[section.split(" ")[0]] == tuple(map(str, own))

"""A few of the faults, the judge, and the published table; all of them: ``make faults``."""

import pytest

from tests.docs.pages import ROOT
from tests.faults.harness import Harness, judge, names
from tests.faults.kinds import FAMILIES, KINDS, Case, cases
from tests.faults.methods import METHODS
from tests.faults.rank import Report
from tests.faults.table import PAGE, RECORDS, page, read_records, totals

FEW = [
    ("has no memory left in a round", "topk, sharded"),
    ("meets a NaN", "topk, bucket"),
    ("overflows under a GradScaler", "LocalRounds, fragments"),
    ("goes back to an older checkpoint of everything", "OneBitAdam"),
    ("leaves a step out", "DiLoCo"),
    ("exchanges something else", "MicroAdam"),
    ("has another learning rate later on", "SAFL"),
    ("has a parameter of the server changed", "SparseLoCo"),
    ("gives its parameters in another order", "FetchSGD"),
    ("has another compressor", "gaussian_sketch"),
    ("sends an older payload again", "CDAdam"),
    ("starts from another model", "low_communication, FSDP"),
]
MORE = [
    ("is killed", "count_sketch"),
    ("comes later than the timeout", "LocalRounds, FSDP"),
    ("is killed", "LocalVarianceAdam, FSDP"),
    ("meets a NaN", "EF21"),
    ("overflows under a GradScaler", "low_communication, FSDP"),
    ("goes back to an older state of the exchange", "srht"),
    ("loads its own state by itself", "topk, hierarchical"),
    ("exchanges again what all have exchanged", "DGC"),
    ("makes its optimizer anew", "Marina"),
    ("has a parameter changed", "ZeroOneAdam"),
    ("has a model of another shape", "FedLAMB"),
    ("sends a flipped bit", "LocalRounds, clients"),
    ("receives a flipped bit", "FedAvg"),
    ("gets another rank's payload in its place", "DeMo"),
]


@pytest.fixture(scope="module")
def harness() -> Harness:
    return Harness()


@pytest.mark.parametrize(
    ("kind", "method"),
    [*FEW, *(pytest.param(*each, marks=pytest.mark.slow) for each in MORE)],
)
def test_a_fault_is_refused_or_recovered_from(harness: Harness, kind: str, method: str) -> None:
    outcome = harness.run(Case(METHODS[method], KINDS[kind]))
    assert outcome.is_good, outcome


def case_of(kind: str) -> Case:
    return Case(METHODS["topk"], KINDS[kind])


def reports_of(case: Case, told: str, error: str = "PeerError") -> dict[int, Report]:
    return {rank: Report(error, told) for rank in range(case.method.ranks)}


@pytest.mark.parametrize("kind", ["has a parameter changed", "has another seed"])
def test_the_judge_accepts_only_errors_that_say_who_and_what(kind: str) -> None:
    case = case_of(kind)
    codes = {0: 0, 1: 0}
    what = "the parameters of" if "parameter" in kind else "seed is"
    good = f"{what} rank {case.culprit}"
    assert judge(case, reports_of(case, good), codes) == "refused"
    assert "name" in judge(case, reports_of(case, f"{what} rank 9"), codes)
    assert "reason" in judge(case, reports_of(case, f"rank {case.culprit}"), codes)
    assert "bare" in judge(case, reports_of(case, good, "RuntimeError"), codes)
    assert "crashed" in judge(case, reports_of(case, good), {0: 0, 1: -6})
    assert "hangs" in judge(case, reports_of(case, good), {0: 0, 1: None})
    finished = {rank: Report(model="same") for rank in range(2)}
    assert "silent divergence" in judge(case, finished, codes)


def test_the_judge_wants_all_to_go_on_alike_after_a_nan() -> None:
    case, codes = case_of("meets a NaN"), {0: 0, 1: 0}
    finished = {rank: Report(model="same") for rank in range(2)}
    assert judge(case, finished, codes) == "recovered"
    assert "apart" in judge(case, finished | {1: Report(model="other")}, codes)
    assert "go on" in judge(case, finished | {1: Report("PeerError", "rank 1")}, codes)


def test_a_message_names_ranks_in_lists_too() -> None:
    assert names("is 4 on ranks 0, 12, 8 on rank 1", 12)
    assert not names("is 4 on ranks 0, 12, 8 on rank 1", 2)


def test_every_case_has_been_tried_and_none_has_failed() -> None:
    records = read_records(RECORDS)
    tried = {(r["fault"], r["method"], r["seed"]) for r in records}
    assert tried == {(c.kind.name, c.method.name, c.seed) for c in cases()}
    assert len(tried) == len(records) >= 1800
    assert {r["verdict"] for r in records} == {"refused", "recovered"}


def test_the_published_tables_are_those_of_the_records() -> None:
    records = read_records(RECORDS)
    assert PAGE.read_text() == page(records)
    assert totals(records) in " ".join((ROOT / "README.md").read_text().split())


def test_every_family_is_among_the_few() -> None:
    few = {kind for kind, _ in FEW}
    for family, kinds in FAMILIES.items():
        assert few & {kind.name for kind in kinds}, family

"""The commands of the studies from end to end, and what they refuse."""

import importlib
import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.lab.outcomes import Advance, Method
from benchmarks.lab.runs import Point, Tuned
from benchmarks.studies.cli import Comparison, Place
from benchmarks.studies.safl.peers import PEERS
from tests.benchmarks.studying import straight

STUDIES = ("safl", "fed_lamb")


def invoke(study: str, *arguments: str) -> Any:
    app = importlib.import_module(f"benchmarks.studies.{study}.__main__").app
    return CliRunner().invoke(app, arguments)


SMALL: dict[str, list[str]] = {
    "safl": [
        *("--quick", "--rounds", "3", "--batch", "4", "--clients", "2", "--ratios", "1/50,0.005"),
        *("--local-steps", "1,2", "--tries", "2", "--seeds", "2", "--points", "3"),
    ],
    "fed_lamb": [
        *("--quick", "--rounds", "3", "--batch", "4", "--clients", "6", "--local-steps", "1,2"),
        *("--tries", "6", "--seeds", "2", "--points", "3", "--task-option", "classes_per_client=4"),
    ],
}
# Three weight decays of FED-LAMB share six tries.
TRIES = {"safl": 2, "fed_lamb": 6}
COUNT = {
    "safl": 2 + 2 * (3 + 1) + sum(2 if p.matches else 1 for p in PEERS.values()),
    "fed_lamb": 2 * 2 * 5,
}


def small(study: str, out: Path) -> list[str]:
    return [*SMALL[study], "--out", str(out)]


@pytest.mark.slow
@pytest.mark.parametrize("study", STUDIES)
def test_a_study_from_end_to_end(study: str, tmp_path: Path) -> None:
    result = invoke(study, *small(study, tmp_path))
    assert result.exit_code == 0, result.output
    assert {path.name for path in tmp_path.iterdir()} == {f"{study}.json", "curves.png"}
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    record = json.loads((tmp_path / f"{study}.json").read_text())
    assert record["complete"]
    assert record["settings"]["seeds"] == 2
    methods = record["methods"]
    assert len(methods) == COUNT[study]
    for method in methods:
        assert TRIES[study] <= len(method["tries"]) <= 2 * TRIES[study], method["name"]
        ends = [curve[-1] for curve in method["curves"]]
        assert len(ends) == 2
        assert method["errors"] == [end["error"] for end in ends]
        assert method["mean_error"] == pytest.approx(statistics.mean(method["errors"]))
        assert method["mean_loss"] == pytest.approx(statistics.mean(e["loss"] for e in ends))
        assert {**method["settings"], "score": ends[0]["validation"]} in method["tries"]
        assert len(method["curves"][0]) == 3
        assert f"{100 * method['mean_error']:.2f}" in result.stdout
        assert f"{method['mean_loss']:.3f}" in result.stdout
        # Seeds are different runs.
        assert method["losses"][0] != method["losses"][1]


@pytest.mark.slow
def test_a_study_repeated_gives_the_same_figures(tmp_path: Path) -> None:
    records = []
    for name in ("first", "second"):
        arguments = small("fed_lamb", tmp_path / name)
        assert invoke("fed_lamb", *arguments, "--seeds", "1").exit_code == 0
        records.append(json.loads((tmp_path / name / "fed_lamb.json").read_text())["methods"])
    assert records[0] == records[1]


def test_an_interrupted_study_goes_on_where_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[tuple[str, float, int]] = []
    interrupts = iter([False, False, False, False, True])

    def method(name: str) -> Method:
        def train(settings: Tuned, seed: int, advance: Advance) -> list[Point]:
            if next(interrupts, False):
                raise KeyboardInterrupt
            made.append((name, settings["lr"], seed))
            return straight(settings["lr"])

        return Method(name, {}, train, start=0.1)

    def conducted(*names: str, points: int = 10) -> None:
        comparison = Comparison(
            [method(name) for name in names],
            rounds=1,
            title="",
            columns=lambda done: {"method": lambda outcome: outcome.name},
            section=lambda outcome: None,
        )
        options = {"seeds": 2, "tries": 2, "methods": names, "points": points}
        comparison(Place("study", options, tmp_path))

    with pytest.raises(Exception, match="130"):
        conducted("first", "second", "third")
    assert len(made) == 4
    assert "study: interrupted, 1 methods finished" in capsys.readouterr().err
    record = json.loads((tmp_path / "study.json").read_text())
    assert not record["complete"]
    assert [method["name"] for method in record["methods"]] == ["first"]
    kept = (tmp_path / "runs.jsonl").read_text()
    conducted("first", points=5)
    assert len(made) == 8, "curves of another number of points are others"
    del made[4:]
    (tmp_path / "runs.jsonl").write_text(kept)
    conducted("first", "second")
    assert len(made) == len(set(made)) == 8
    assert "Going on after 4 runs" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"study.json", "curves.png"}
    record = json.loads((tmp_path / "study.json").read_text())
    assert record["complete"]
    assert [len(m["tries"]) + len(m["curves"]) for m in record["methods"]] == [4, 4]

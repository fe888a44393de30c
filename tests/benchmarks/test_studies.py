"""The commands of the studies from end to end, and what they refuse."""

import importlib
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.studies.cli import Comparison, Place
from benchmarks.studies.safl.peers import PEERS
from comm_hooks.launchers.lab.outcomes import Advance, Method, Point, Settings
from comm_hooks.launchers.lab.tables import make_table
from tests.benchmarks.studying import straight
from tests.launchers.lab.small import write_text

STUDIES = ("safl", "fed_lamb", "local_steps")


def invoke(study: str, *arguments: str) -> Any:
    app = importlib.import_module(f"benchmarks.studies.{study}.__main__").app
    return CliRunner().invoke(app, arguments)


def complaint(study: str, *arguments: str) -> str:
    """Run a study, check that it refuses as it should, and return what it says."""
    result = invoke(study, *arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith(f"{study}: ")
    return result.stderr


BAD: list[tuple[list[str], str]] = [
    (["--task", "digit"], "did you mean 'digits'?"),
    (["--task", "cifar10"], "no data folder was given"),
    (["--task", "cifar10", "--data-dir", "absent"], "there is no folder absent"),
    (["--task", "digits", "--task-option", "model"], "not of the form NAME=VALUE"),
    (["--task", "digits", "--task-option", "modle=mlp"], "did you mean 'model'?"),
    (["--clients", "0"], "--clients must be at least 1, got 0"),
    (["--seeds", "0"], "--seeds must be at least 1, got 0"),
    (["--batch", "-3"], "--batch must be at least 1, got -3"),
    (["--points", "0"], "--points must be at least 1, got 0"),
    (["--local-steps", "1,x"], "--local-steps: 'x' is not an integer"),
    (["--local-steps", "0"], "--local-steps must be at least 1, got 0"),
    (["--device", "gpu"], "--device gpu: cannot be used"),
    (["--threads", "0"], "--threads must be at least 1, got 0"),
    (["--out", "/dev/null/folder"], "--out /dev/null/folder: cannot write there"),
]
BAD_OF: dict[str, list[tuple[list[str], str]]] = {
    "safl": [
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["--tries", "0"], "--tries must be at least 1, got 0"),
        (["--ratios", "0.1,2"], "--ratios: must lie in (0, 1], got 2"),
        (["--ratios", "1/0"], "--ratios: '1/0' is not a number"),
        (["--families", "count_skech"], "did you mean 'count_sketch'?"),
        (["--peers", "fetchsgd"], "did you mean 'fetch_sgd'?"),
        (["--server", "sgd"], "--server: unknown name 'sgd'"),
    ],
    "fed_lamb": [
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["--tries", "0"], "--tries must be at least 1, got 0"),
        (["--participation", "0"], "--participation must lie in (0, 1], got 0"),
        (["--partitions", "contiguous"], "unknown partition 'contiguous'"),
        (["--methods", "fed_lam"], "did you mean 'fed_lamb'?"),
        (["--methods", ""], "there is nothing to compare"),
        (["--clients", "2000"], "cannot be divided over 2000 clients"),
    ],
    "local_steps": [
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--densities", "0"], "--densities: must lie in (0, 1], got 0"),
        (["--lr", "-1"], "--lr must be at least 0, got -1"),
        (["--server-lrs", "one"], "--server-lrs: 'one' is not a number"),
        (["--fragments", "0"], "--fragments must be at least 1, got 0"),
    ],
}


@pytest.mark.parametrize(
    ("study", "arguments", "message"),
    [(study, *case) for study in STUDIES for case in [*BAD, *BAD_OF[study]]],
)
def test_bad_input_gets_one_line(
    study: str,
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = arguments if "--task" in arguments else ["--task", "digits", *arguments]
    assert message in complaint(study, *arguments)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


SMALL: dict[str, list[str]] = {
    "safl": [
        *("--quick", "--rounds", "3", "--batch", "4", "--clients", "2", "--ratios", "1/50,0.005"),
        *("--local-steps", "1,2", "--tries", "2", "--seeds", "2", "--points", "3"),
    ],
    "fed_lamb": [
        *("--quick", "--rounds", "3", "--batch", "4", "--clients", "6", "--local-steps", "1,2"),
        *("--tries", "2", "--seeds", "2", "--points", "3", "--task-option", "classes_per_client=4"),
    ],
    "local_steps": [
        *("--quick", "--steps", "6", "--batch", "2", "--local-steps", "1,4", "--densities", "1/8"),
        *("--seeds", "2", "--points", "3"),
        *("--task-option", "context=32", "--task-option", "width=32"),
    ],
}
PLOTS = {
    "safl": {"error-vs-rounds.png", "error-vs-bytes.png", "sketch-sizes.png"},
    "fed_lamb": {"error-vs-rounds.png"},
    "local_steps": {"loss-vs-bytes.png", "loss-vs-bytes-per-step.png"},
}
# fed_lamb: three weight decays of FED-LAMB, two tries each; local_steps: two server rates.
TRIES: dict[str, Callable[[dict[str, Any]], int]] = {
    "safl": lambda method: 2,
    "fed_lamb": lambda method: 6 if method["name"].startswith("fed_lamb") else 2,
    "local_steps": lambda method: 2 if method["name"] == "top-k deltas" else 1,
}
COUNT = {
    "safl": 2 + 2 * (3 + 1 + sum(p.matches for p in PEERS.values())) + 2,
    "fed_lamb": 2 * 2 * 5,
    "local_steps": 2 + 2 * 2,
}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    write_text(folder)
    return folder


def small(study: str, out: Path, text: Path) -> list[str]:
    data = ["--data-dir", str(text)] if study == "local_steps" else []
    return [*SMALL[study], *data, "--out", str(out)]


@pytest.mark.slow
@pytest.mark.parametrize("study", STUDIES)
def test_a_study_from_end_to_end(study: str, tmp_path: Path, text: Path) -> None:
    result = invoke(study, *small(study, tmp_path, text))
    assert result.exit_code == 0, result.output
    assert {path.name for path in tmp_path.iterdir()} == {f"{study}.json", *PLOTS[study]}
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in PLOTS[study])
    record = json.loads((tmp_path / f"{study}.json").read_text())
    assert record["complete"]
    assert record["settings"]["seeds"] == 2
    methods = record["methods"]
    assert len(methods) == COUNT[study]
    for method in methods:
        assert len(method["tries"]) == TRIES[study](method), method["name"]
        assert [run["seed"] for run in method["runs"]] == [0, 1]
        ends = [run["curve"][-1] for run in method["runs"]]
        assert method["errors"] == [end["error"] for end in ends]
        assert method["mean_error"] == pytest.approx(statistics.mean(method["errors"]))
        assert method["mean_loss"] == pytest.approx(statistics.mean(e["loss"] for e in ends))
        best = min(method["tries"], key=lambda attempt: attempt["loss"])
        assert {k: v for k, v in best.items() if k not in ("loss", "error")} == method["settings"]
        assert best["loss"] == ends[0]["loss"]
        assert len(method["runs"][0]["curve"]) == 3
        assert f"{100 * method['mean_error']:.2f}" in result.stdout or study == "local_steps"
        assert f"{method['mean_loss']:.3f}" in result.stdout
        # Seeds are different runs.
        assert method["losses"][0] != method["losses"][1]


@pytest.mark.slow
def test_a_study_repeated_gives_the_same_figures(tmp_path: Path, text: Path) -> None:
    records = []
    for name in ("first", "second"):
        arguments = small("local_steps", tmp_path / name, text)
        assert invoke("local_steps", *arguments, "--seeds", "1").exit_code == 0
        records.append(json.loads((tmp_path / name / "local_steps.json").read_text())["methods"])
    assert records[0] == records[1]


def test_an_interrupted_study_tells_what_is_finished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def method(name: str) -> Method:
        def train(settings: Settings, seed: int, advance: Advance) -> list[Point]:
            if name == "interrupted":
                raise KeyboardInterrupt
            return straight(0.1)

        return Method(name, {}, train, start=1.0)

    def conducted() -> None:
        comparison = Comparison(
            [method("done"), method("interrupted")],
            rounds=1,
            make_tables=lambda done: [make_table("", ["method"], [[o.name] for o in done])],
            write_plots=lambda done, out: [],
        )
        comparison(Place("study", {"seeds": 1}, tmp_path))

    with pytest.raises(Exception, match="130") as ended:
        conducted()
    assert getattr(ended.value, "exit_code", None) == 130
    assert "study: interrupted, 1 methods finished" in capsys.readouterr().err
    record = json.loads((tmp_path / "study.json").read_text())
    assert not record["complete"]
    assert [method["name"] for method in record["methods"]] == ["done"]

"""What the commands of the studies refuse, with one line and before anything is written."""

import importlib
from pathlib import Path

import pytest

from tests.refusing import refusal

WITH_TASKS = ("safl", "fed_lamb")

OF_TASKS: list[tuple[list[str], str]] = [
    (["--task", "digit"], "did you mean 'digits'?"),
    (["--task", "digits", "--task-option", "model"], "not of the form NAME=VALUE"),
    (["--task", "digits", "--task-option", "modle=mlp"], "did you mean 'model'?"),
    (["--local-steps", "1,x"], "--local-steps: 'x' is not an integer"),
    (["--local-steps", "0"], "--local-steps must be at least 1, got 0"),
    (["--device", "gpu"], "--device gpu: cannot be used"),
    (["--threads", "0"], "--threads must be at least 1, got 0"),
    (["--out", "/dev/null/folder"], "--out /dev/null/folder: cannot write there"),
]
OF_STUDIES: dict[str, list[tuple[list[str], str]]] = {
    "safl": [
        (["--ratios", "0.1,2"], "--ratios: must lie in (0, 1], got 2"),
        (["--ratios", "1/0"], "--ratios: '1/0' is not a number"),
        (["--families", "count_skech"], "did you mean 'count_sketch'?"),
        (["--peers", "fetchsgd"], "did you mean 'fetch_sgd'?"),
        (["--server", "sgd"], "--server: unknown name 'sgd'"),
    ],
    "fed_lamb": [
        (["--participation", "0"], "--participation must lie in (0, 1], got 0"),
        (["--partitions", "dirichlet"], "--partitions: unknown name 'dirichlet'"),
        (["--methods", "fed_lam"], "did you mean 'fed_lamb'?"),
        (["--methods", ""], "there is nothing to compare"),
        (["--clients", "2000"], "cannot be divided over 2000 clients"),
    ],
    "private_optimizers": [
        (["--task", "mnist"], "--task: unknown name 'mnist'"),
        (["--data-dir", "here"], "reads no files of yours"),
        (["--methods", "DP-Adm"], "did you mean 'DP-Adam'?"),
        (["--methods", ""], "there is nothing to compare"),
        (["--sigmas", "1,0"], "sigma must be positive, got 0"),
        (["--max-grad-norm", "-1"], "--max-grad-norm must be positive"),
        (["--batch", "1424"], "there are only 1281 samples"),
        (["--delta", "0.001"], "--delta must lie in (0, 1/1281)"),
        (["--methods", "AdaDPS, TF-IDF"], "needs counts of words: --task verses"),
        (["--public-share", "0.0001"], "none is public: give a larger --public-share"),
        (["--validation", "0.0001"], "is none to tune settings on"),
        (["--validation", "1"], "--validation must lie in (0, 1), got 1"),
    ],
    "private_compressed": [
        (["--schemes", "local:topj"], "did you mean 'local:topk'?"),
        (["--schemes", ""], "there is nothing to compare"),
        (["--optimizers", "Adam"], "--optimizers: unknown name 'Adam'"),
        (["--optimizers", ""], "there is nothing to compare"),
        (["--ranks", "1500"], "1293 samples are not enough for 1500 ranks"),
        (["--ratio", "2"], "--ratio must lie in (0, 1], got 2"),
        (["--sigma", "0"], "sigma must be positive, got 0"),
    ],
    "private_moments": [
        (["--strengths", "0,-1"], "--strengths must be at least 0, got -1"),
        (["--batch", "nan"], "--batch must be positive, got nan"),
        (["--beta2", "1"], "--beta2 must lie in [0, 1), got 1"),
    ],
    "private_toy_regression": [
        (["--noise-multiplier", "0"], "--noise-multiplier must be at least 0.001, got 0"),
        (["--rates", "-1"], "--rates must be at least 0, got -1"),
    ],
    "scale": [
        (["--ranks", "2,3", "--batch", "64"], "--batch 64 cannot be divided over 3 ranks"),
        (["--density", "2"], "density must lie in"),
    ],
    "private_federated": [
        (["--methods", "DP-FedAvgM"], "did you mean 'DP-FedAvg'?"),
        (["--norms", "1,0"], "--norms: must be positive, got 0"),
        (["--clients", "30000"], "cannot be divided over 30000 clients"),
    ],
    "safl_dimension": [(["--size", "2048"], "--size must be at most the smallest of --numels")],
    "convergence": [(["--numel", "1000"], "--numel must be a power of 2, got 1000")],
}
CASES = [
    *((study, *case) for study in WITH_TASKS for case in OF_TASKS),
    *((study, *case) for study, cases in OF_STUDIES.items() for case in cases),
]


@pytest.mark.parametrize(("study", "arguments", "message"), CASES)
def test_bad_input_gets_one_line(
    study: str,
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    if study in WITH_TASKS and "--task" not in arguments:
        arguments = ["--task", "digits", *arguments]
    app = importlib.import_module(f"benchmarks.studies.{study}.__main__").app
    assert message in refusal(app, study, *arguments)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]

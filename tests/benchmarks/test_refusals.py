"""What the commands of the studies refuse, with one line and before anything is written."""

import importlib
from pathlib import Path

import pytest

from tests.refusing import refusal

WITH_TASKS = ("safl", "fed_lamb")

OF_TASKS: list[tuple[list[str], str]] = [
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
OF_STUDIES: dict[str, list[tuple[list[str], str]]] = {
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
    "private_optimizers": [
        (["--task", "mnist"], "--task: unknown name 'mnist'"),
        (["--task", "cifar10"], "no data folder was given"),
        (["--data-dir", "here"], "reads no files of yours"),
        (["--methods", "DP-Adm"], "did you mean 'DP-Adam'?"),
        (["--methods", ""], "--methods is empty"),
        (["--sigmas", "1,0"], "sigma must be positive, got 0"),
        (["--sigmas", "one"], "--sigmas: 'one' is not a number"),
        (["--max-grad-norm", "-1"], "--max-grad-norm must be positive"),
        (["--batch", "1424"], "there are only 1281 samples"),
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--micro-batch", "0"], "--micro-batch must be at least 1, got 0"),
        (["--delta", "0.001"], "--delta must lie in (0, 1/1281)"),
        (["--methods", "AdaDPS, TF-IDF"], "needs counts of words: --task verses"),
        (["--public-share", "0.0001"], "none is public: give a larger --public-share"),
        (["--validation", "0.0001"], "is none to tune settings on"),
        (["--validation", "1"], "--validation must lie in (0, 1), got 1"),
        (["--spend", "8", "--steps", "5"], "--steps and --spend: give one of them"),
        (["--spend", "0.01"], "spends more than epsilon 0.01 in one step"),
        (["--spend", "0"], "--spend must be positive, got 0"),
        (["--device", "gpu"], "--device gpu: cannot be used"),
    ],
    "private_compressed": [
        (["--schemes", "local:topj"], "did you mean 'local:topk'?"),
        (["--schemes", ""], "--schemes or --optimizers is empty"),
        (["--optimizers", "Adam"], "--optimizers: unknown name 'Adam'"),
        (["--optimizers", ""], "--schemes or --optimizers is empty"),
        (["--gloo", "alone"], "--gloo: unknown name 'alone'"),
        (["--ranks", "0"], "--ranks must be at least 1, got 0"),
        (["--ranks", "1500"], "1293 samples are not enough for 1500 ranks"),
        (["--ratio", "2"], "--ratio must lie in (0, 1], got 2"),
        (["--sigma", "0"], "sigma must be positive, got 0"),
        (["--seeds", "0"], "--seeds must be at least 1, got 0"),
        (["--out", "/dev/null/f"], "--out /dev/null/f: cannot write there"),
    ],
    "private_moments": [
        (["--at", "0,5"], "--at must be at least 1, got 0"),
        (["--at", "five"], "--at: 'five' is not an integer"),
        (["--strengths", "0,-1"], "--strengths must be at least 0, got -1"),
        (["--coordinates", "1"], "--coordinates must be at least 2, got 1"),
        (["--sigma", "0"], "--sigma must be positive, got 0"),
        (["--batch", "nan"], "--batch must be positive, got nan"),
        (["--beta2", "1"], "--beta2 must lie in [0, 1), got 1"),
        (["--seed", "-1"], "--seed must be at least 0, got -1"),
    ],
    "private_toy_regression": [
        (["--steps", "0"], "--steps must be at least 1, got 0"),
        (["--noise-multiplier", "0"], "--noise-multiplier must be at least 0.001, got 0"),
        (["--rates", "0.1,x"], "--rates: 'x' is not a number"),
        (["--rates", "-1"], "--rates must be at least 0, got -1"),
        (["--threads", "0"], "--threads must be at least 1, got 0"),
        (["--out", "/dev/null/folder"], "--out /dev/null/folder: cannot write there"),
    ],
    "scale": [
        (["--only", "predict"], "did you mean 'predicted'?"),
        (["--ranks", "2,x"], "--ranks: 'x' is not an integer"),
        (["--ranks", "0"], "--ranks must be at least 1, got 0"),
        (["--ranks", "2,3", "--batch", "64"], "--batch 64 cannot be divided over 3 ranks"),
        (["--steps", "1"], "--steps must be at least 2, got 1"),
        (["--seeds", "0"], "--seeds must be at least 1, got 0"),
        (["--density", "2"], "density is the fraction that is kept"),
        (["--predicted-ranks", "8,12"], "give multiples of 8, got 12"),
        (["--gigabits", "0"], "--gigabits: must be positive, got 0"),
        (["--out", "/dev/null/folder"], "--out /dev/null/folder: cannot write there"),
    ],
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

"""The example scripts run as they are, for a few steps, and go on from what they saved."""

import ast
import importlib.util
import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.docs.runner import _WITHOUT_COMPILER
from tests.torchrun import Torchrun

EXAMPLES = Path(__file__).parents[2] / "examples"
# What a script needs, and how it is told to go on from its checkpoint.
SCRIPTS: dict[str, tuple[str, list[str]]] = {
    "ddp": ("torch", ["--checkpoint", "checkpoint"]),
    "accelerate_loop": ("accelerate", ["--resume"]),
    "trainer": ("transformers", ["--resume"]),
    "lightning_module": ("lightning", ["--resume", "checkpoint-lightning/last.ckpt"]),
    "deepspeed_engine": ("deepspeed", ["--resume"]),
    "fsdp": ("torch", []),
}
LINE = r"held-out loss (\d\.\d+), (\d+) times fewer bytes"


def printed(torchrun: Torchrun, folder: Path, name: str, *arguments: str) -> str:
    """Return what the first command of a script prints, with other arguments."""
    script = EXAMPLES / f"{name}.py"
    module = ast.parse(script.read_text())
    first = next(line for line in (ast.get_docstring(module) or "").splitlines() if ".py" in line)
    program, *options = shlex.split(first)
    options = options[: options.index(f"examples/{name}.py")]
    assert program == "torchrun", first
    command = [str(torchrun.command), *options, str(script), *arguments]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "PYTHONPATH": os.pathsep.join([str(_WITHOUT_COMPILER), str(EXAMPLES)]),
    }
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run(torchrun: Torchrun, folder: Path, name: str, *arguments: str) -> tuple[float, int]:
    """Return the loss and how many times fewer bytes were sent."""
    output = printed(torchrun, folder, name, *arguments)
    found = re.search(LINE, output)
    assert found, output
    return float(found[1]), int(found[2])


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_an_example_runs_and_goes_on(torchrun: Torchrun, tmp_path: Path, name: str) -> None:
    package, resume = SCRIPTS[name]
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}")
    first = resume if name == "ddp" else []
    loss, fewer = run(torchrun, tmp_path, name, "--steps", "6", *first)
    assert 1 < loss < 6
    assert fewer >= 300
    if resume:
        later, _ = run(torchrun, tmp_path, name, "--steps", "12", *resume)
        assert later < loss


@pytest.mark.slow
@pytest.mark.parametrize("method", ["signs", "count_sketch"])
def test_other_methods_of_the_ddp_example(torchrun: Torchrun, tmp_path: Path, method: str) -> None:
    loss, fewer = run(torchrun, tmp_path, "ddp", "--steps", "6", "--method", method)
    assert 1 < loss < 6
    assert fewer >= 15


@pytest.mark.slow
def test_the_profiled_example_shows_where_time_goes(torchrun: Torchrun, tmp_path: Path) -> None:
    output = printed(torchrun, tmp_path, "profiled", "--steps", "2", "--trace", "trace.json")
    for part in ("compress", "send", "wait", "decode"):
        found = re.search(rf"comm_hooks::{part} +\d\.\d per step +([\d.]+) ms per step", output)
        assert found, output
        assert float(found[1]) > 0
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert "comm_hooks::send" in {event["name"] for event in events}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["functorch", "hooks"])
def test_private_fine_tuning_keeps_its_budget(
    torchrun: Torchrun, tmp_path: Path, mode: str
) -> None:
    pytest.importorskip("peft", reason="needs peft")
    few = ["--public-steps", "100", "--steps", "20", "--mode", mode]
    output = printed(torchrun, tmp_path, "private_fine_tuning", *few)
    found = re.search(r"held-out loss ([\d.]+) -> ([\d.]+), epsilon (\d\.\d+)", output)
    assert found, output
    before, after, epsilon = map(float, found.groups())
    assert after < before - 0.03
    assert 7.5 < epsilon <= 8


def test_examples_are_short() -> None:
    scripts = sorted(EXAMPLES.glob("*.py"))
    assert {path.stem for path in scripts} == {*SCRIPTS, "gpt", "profiled", "private_fine_tuning"}
    for path in scripts:
        assert len(path.read_text().splitlines()) <= 120, path.name

"""Files for Slurm and Kubernetes: what a shell and the fields of a TrainJob make of them."""

import os
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from comm_hooks.launchers.launch.schedulers import job_name
from comm_hooks.launchers.main import app
from tests.launchers.launch.commands import complaint, dry_run

SLURM = ["--slurm", "job.sbatch", "--nnodes", "2", "--nproc", "4", "--cpus", "6"]
TARGET = ["train.py", "--name", "it's a $test"]

# trainer.kubeflow.org/v1alpha1, TrainJobSpec.trainer.
TRAINER_FIELDS = {
    "image": str,
    "command": list,
    "args": list,
    "env": list,
    "numNodes": int,
    "numProcPerNode": int,
    "resourcesPerNode": dict,
}


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def write(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["launch", *arguments])
    assert result.exit_code == 0, result.output
    return result.stdout.strip()


def test_slurm_runs_the_batch_file(tmp_path: Path) -> None:
    options = ["--env", "NOTE=a 'b' $c", "--sbatch", "time=01:00:00", "--max-restarts", "2"]
    assert write(*SLURM, *options, "--preflight", *TARGET) == "sbatch job.sbatch"
    # A cluster of two nodes: what sbatch would do, with an srun that tells what it got.
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "scontrol").write_text("#!/bin/sh\nprintf 'gpu-3\\ngpu-7\\n'\n")
    (tools / "srun").write_text('#!/bin/sh\nprintf "%s\\0" "$NOTE" "$@"\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    job = {"SLURM_JOB_ID": "20123", "SLURM_JOB_NODELIST": "gpu-[3,7]", "SLURM_CPUS_PER_TASK": "24"}
    environment = {**os.environ, **job, "PATH": f"{tools}:{os.environ['PATH']}"}
    result = subprocess.run(
        ["bash", "job.sbatch"], env=environment, capture_output=True, text=True, check=True
    )
    note, *arguments, end = result.stdout.split("\0")
    assert note == "a 'b' $c"
    assert end == ""
    assert arguments[:2] == ["--kill-on-bad-exit=1", "--cpus-per-task=24"]
    launch = arguments[arguments.index("launch") :]
    assert launch == [
        *("launch", "--nproc", "4", "--max-restarts", "2", "--preflight", "--head", "gpu-3:20123"),
        *TARGET,
    ]
    requests = [
        line.split("--")[1]
        for line in (tmp_path / "job.sbatch").read_text().splitlines()
        if line.startswith("#SBATCH")
    ]
    assert requests == [
        *("job-name=train", "nodes=2", "ntasks-per-node=1", "cpus-per-task=24"),
        *("gpus-per-node=4", "time=01:00:00"),
    ]


def test_a_shell_can_read_the_batch_file(tmp_path: Path) -> None:
    write(*SLURM, "--cpu", *TARGET)
    subprocess.run(["bash", "-n", "job.sbatch"], check=True)
    text = (tmp_path / "job.sbatch").read_text()
    assert "gpus" not in text
    # Slurm stops looking for options at the first command.
    commands = [i for i, s in enumerate(text.splitlines()) if s and not s.startswith("#")]
    assert max(i for i, s in enumerate(text.splitlines()) if "#SBATCH" in s) < commands[0]


@pytest.mark.skipif(not shutil.which("shellcheck"), reason="shellcheck is not installed")
def test_shellcheck_finds_nothing_in_the_batch_file() -> None:
    write(*SLURM, "--env", "A=b c", "--preflight", "train.py", "--name", "it's")
    result = subprocess.run(["shellcheck", "job.sbatch"], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout


def train_job(*options: str) -> dict[str, Any]:
    command = ["--kubernetes", "job.yaml", "--nnodes", "2", "--nproc", "4", *options]
    assert write(*command, *TARGET) == "kubectl create -f job.yaml"
    job: dict[str, Any] = yaml.safe_load(Path("job.yaml").read_text())
    assert "\n".join(dry_run(*command, *TARGET)) == Path("job.yaml").read_text().rstrip("\n")
    assert set(job) == {"apiVersion", "kind", "metadata", "spec"}
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert set(job["spec"]) == {"runtimeRef", "trainer"}
    assert set(job["spec"]["runtimeRef"]) == {"apiGroup", "kind", "name"}
    for field, value in job["spec"]["trainer"].items():
        assert isinstance(value, TRAINER_FIELDS[field]), field
    assert all(isinstance(word, str) for word in job["spec"]["trainer"]["command"])
    return job


def test_kubernetes_runs_the_train_job() -> None:
    options = ["--env", "NOTE=1", "--env", "YES=yes", "--image", "registry/train:1", "--cpus", "2"]
    job = train_job(*options, "--runtime", "torch-a100")
    assert job["metadata"] == {"name": "train"}
    assert job["spec"]["runtimeRef"]["name"] == "torch-a100"
    assert job["spec"]["trainer"] == {
        "image": "registry/train:1",
        "numNodes": 2,
        "numProcPerNode": 4,
        "command": ["torchrun", *TARGET],
        # Kubernetes takes strings only, and YAML would make others of these.
        "env": [{"name": "NOTE", "value": "1"}, {"name": "YES", "value": "yes"}],
        "resourcesPerNode": {"requests": {"cpu": "8"}, "limits": {"nvidia.com/gpu": 4}},
    }


def test_kubernetes_checks_all_pods_before_it_trains() -> None:
    job = train_job("--preflight", "--config", "my config.json", "--cpu")
    shell, option, line = job["spec"]["trainer"]["command"]
    assert (shell, option) == ("sh", "-c")
    first, second = line.split(" && exec ")
    assert shlex.split(first) == [
        *("torchrun", "-m", "comm_hooks.launchers.preflight", "--config", "my config.json")
    ]
    assert shlex.split(second) == ["torchrun", *TARGET]
    assert "resourcesPerNode" not in job["spec"]["trainer"]


def test_a_file_of_ours_is_written_again_but_no_other(tmp_path: Path) -> None:
    write(*SLURM, *TARGET)
    write(*SLURM, "other.py")
    assert "other.py" in (tmp_path / "job.sbatch").read_text()
    (tmp_path / "job.sbatch").write_text("mine")
    assert "job.sbatch: exists and is not ours" in complaint(*SLURM, *TARGET)
    assert (tmp_path / "job.sbatch").read_text() == "mine"


@given(st.text(min_size=1))
def test_every_script_gives_a_name_that_schedulers_take(target: str) -> None:
    name = job_name(target)
    assert 1 <= len(name) <= 40
    assert name[0].isalpha()
    assert name[-1] != "-"
    assert all(c in "abcdefghijklmnopqrstuvwxyz0123456789-" for c in name)
    assert job_name(name) == name

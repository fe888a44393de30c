"""Runs of a script, as it is and edited, and what they came to."""

import difflib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.third_party.editing import Edit, edited
from benchmarks.third_party.measured import MARK
from benchmarks.third_party.scripts import Script

ROOT = Path(__file__).resolve().parents[2]
_TIMEOUT = 1800  # seconds


@dataclass(frozen=True)
class Outcome:
    """One run.

    Attributes:
        script: its name.
        ours: whether with the edited lines.
        seed: of initial weights and data.
        loss: held out, as the script prints it.
        fewer: how many times fewer bytes than an all-reduce; 1 for the script as it is.
        seconds: from start to end.
        lines: that the edits added or changed.
        commit: of the clone.
        torch: its version.
    """

    script: str
    ours: bool
    seed: int
    loss: float
    fewer: float
    seconds: float
    lines: int
    commit: str
    torch: str


def run(script: Script, *, ours: bool, seed: int, sources: Path, work: Path) -> Outcome:
    """Copy the script with its folder, edit it, prepare its data, and let ranks run it.

    Raises:
        ValueError: if the sources are not there or of another version.
        RuntimeError: if the run fails, or prints no loss.
    """
    clone = sources / script.repository
    path = clone / script.path
    if not path.exists():
        raise ValueError(f"{path} is missing: clone {script.repository} into {sources}")
    folder = work / _slug(script.name) / ("edited" if ours else "unchanged")
    lines = _copied(script, path, folder, ours)
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *("--nproc-per-node", str(script.ranks), "-m", "benchmarks.third_party.measured"),
        *(str(seed), path.name, *script.arguments),
    ]
    environment = {
        **os.environ,
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    started = time.monotonic()
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        timeout=_TIMEOUT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    seconds = time.monotonic() - started
    (folder / f"output-{seed}.txt").write_text(done.stdout)
    losses = re.findall(script.loss, done.stdout)
    counts = [line for line in done.stdout.splitlines() if MARK in line]
    if done.returncode or not losses or (ours and not counts):
        raise RuntimeError(f"{script.name} ended with {done.returncode}:\n{done.stdout[-3000:]}")
    fewer = json.loads(counts[-1].split(MARK)[1])["compression_ratio"] if ours else 1.0
    return Outcome(
        script=script.name,
        ours=ours,
        seed=seed,
        loss=float(losses[-1]),
        fewer=fewer,
        seconds=round(seconds, 1),
        lines=lines if ours else 0,
        commit=_commit(clone),
        torch=_version_of_torch(),
    )


def _copied(script: Script, path: Path, folder: Path, ours: bool) -> int:
    """Copy and edit; return the number of lines that comm-hooks' edits add."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(path.parent, folder, ignore=shutil.ignore_patterns(".git", "assets"))
    added = 0
    for name in {edit.file or path.name for edit in (*script.port, *script.edits)}:
        ported = edited((path.parent / name).read_text(), _of(script.port, name, path), name)
        final = edited(ported, _of(script.edits, name, path), name)
        differences = difflib.ndiff(ported.splitlines(), final.splitlines())
        added += sum(line.startswith("+ ") for line in differences)
        (folder / name).write_text(final if ours else ported)
    script.prepare(folder)
    return added


def _of(edits: Sequence[Edit], name: str, path: Path) -> list[Edit]:
    return [edit for edit in edits if (edit.file or path.name) == name]


def _slug(name: str) -> str:
    return re.sub(r"\W+", "-", name).strip("-").lower()


def _commit(clone: Path) -> str:
    command = ["git", "-C", str(clone), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _version_of_torch() -> str:
    import torch

    return torch.__version__


def record_of(folder: Path, script: Script, *, ours: bool, seed: int) -> Path:
    """Return where a run's outcome is kept."""
    return folder / f"{_slug(script.name)}-{'edited' if ours else 'unchanged'}-{seed}.json"


def saved(outcome: Outcome, path: Path) -> None:
    """Write an outcome."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(outcome), indent=1) + "\n")


def loaded(path: Path) -> Outcome:
    """Read an outcome."""
    return Outcome(**json.loads(path.read_text()))

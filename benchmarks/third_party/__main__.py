"""Train with the scripts of other projects, as they are and with a few edited lines.

    python -m benchmarks.third_party --sources FOLDER      # two hours on 2 cores

FOLDER has clones of karpathy/nanoGPT, pytorch/examples, huggingface/accelerate,
Lightning-AI/pytorch-lightning and microsoft/DeepSpeedExamples, under these names.  The scripts need
the packages of ``benchmarks/third_party/requirements.txt``.  Runs that are recorded in
``benchmarks/results/third_party`` are not repeated.
"""

import difflib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from benchmarks.third_party.measured import MARK
from benchmarks.third_party.scripts import SCRIPTS, Edit, Script

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "benchmarks" / "results" / "third_party"
_TIMEOUT = 1800  # seconds

Outcome = dict[str, Any]
"""A run: script, ours (whether edited), seed, loss, fewer (times fewer bytes), seconds, lines (that
the edits add), commit (of the clone) and torch (its version)."""


def edited(text: str, edits: Sequence[Edit], name: str) -> str:
    """Return the text with the edits made.

    Raises:
        ValueError: if the line of an edit is not found once: the sources are of another version.
    """
    lines = text.splitlines()
    for edit in edits:
        found = [i for i, line in enumerate(lines) if line.strip() == edit.at]
        found = found or [i for i, line in enumerate(lines) if line.strip().startswith(edit.at)]
        if len(found) != 1:
            raise ValueError(
                f"{name} has {len(found)} lines that begin with {edit.at!r}, not one: it is of "
                "another version than that of the page"
            )
        (index,) = found
        indentation = lines[index][: len(lines[index]) - len(lines[index].lstrip())]
        new = [indentation + line for line in edit.new.splitlines()]
        lines[index : index + 1] = [lines[index], *new] if edit.after else new
    return "\n".join(lines) + "\n"


def run(script: Script, *, ours: bool, seed: int, sources: Path, work: Path) -> Outcome:
    """Copy the script with its folder, edit it, prepare its data, and train on several ranks.

    Raises:
        ValueError: if the sources are missing or of another version.
        RuntimeError: if the run fails, or prints no loss.
    """
    clone = sources / script.repository
    path = clone / script.path
    if not path.exists():
        raise ValueError(f"{path} is missing: clone {script.repository} into {sources}")
    folder = work / _slug(script, ours)
    lines = _copy(script, path, folder, ours)
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
    with (folder / "output.txt").open("w+") as file:
        code = subprocess.run(
            command, cwd=folder, env=environment, timeout=_TIMEOUT, stdout=file, stderr=file
        ).returncode
        seconds = time.monotonic() - started
        file.seek(0)
        output = file.read()
    losses = re.findall(script.loss, output)
    counts = [line for line in output.splitlines() if MARK in line]
    if code or not losses or (ours and not counts):
        raise RuntimeError(f"{script.name} ended with {code}:\n{output[-3000:]}")
    head = ["git", "-C", str(clone), "rev-parse", "--short", "HEAD"]
    return {
        "script": script.name,
        "ours": ours,
        "seed": seed,
        "loss": float(losses[-1]),
        "fewer": float(counts[-1].split(MARK)[1]) if ours else 1.0,
        "seconds": round(seconds, 1),
        "lines": lines if ours else 0,
        "commit": subprocess.run(head, capture_output=True, text=True, check=True).stdout.strip(),
        "torch": torch.__version__,
    }


def _copy(script: Script, path: Path, folder: Path, ours: bool) -> int:
    """Copy and edit; return the number of lines that comm-hooks' edits add."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(path.parent, folder, ignore=shutil.ignore_patterns(".git", "assets"))
    added = 0
    for name in {edit.file or path.name for edit in (*script.port, *script.edits)}:
        port, edits = (
            [edit for edit in kind if (edit.file or path.name) == name]
            for kind in (script.port, script.edits)
        )
        ported = edited((path.parent / name).read_text(), port, name)
        final = edited(ported, edits, name)
        differences = difflib.ndiff(ported.splitlines(), final.splitlines())
        added += sum(line.startswith("+ ") for line in differences)
        (folder / name).write_text(final if ours else ported)
    script.prepare(folder)
    return added


def _slug(script: Script, ours: bool) -> str:
    name = re.sub(r"\W+", "-", script.name).strip("-").lower()
    return f"{name}-{'edited' if ours else 'unchanged'}"


def table(outcomes: Sequence[Outcome]) -> str:
    """Return the table of ``docs/frameworks/third_party.md``, in Markdown."""
    lines = [
        "| script | framework | lines | times fewer bytes | seeds | unchanged loss | edited loss |",
        "|---|---|---|---|---|---|---|",
    ]
    for script in SCRIPTS:
        plain, ours = (
            {o["seed"]: o for o in outcomes if o["script"] == script.name and o["ours"] == is_ours}
            for is_ours in (False, True)
        )
        if seeds := sorted(plain.keys() & ours.keys()):
            both = [ours[seed] for seed in seeds]
            fewer = f"{statistics.mean(o['fewer'] for o in both):.0f}"
            losses = (_losses(plain[seed] for seed in seeds), _losses(both))
            cells = (script.name, script.framework, both[0]["lines"], fewer, len(seeds), *losses)
            lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _losses(outcomes: Iterable[Outcome]) -> str:
    losses = [o["loss"] for o in outcomes]
    spread = f" ({min(losses):.3f} to {max(losses):.3f})" if len(losses) > 1 else ""
    return f"{statistics.mean(losses):.3f}{spread}"


def recorded() -> list[Outcome]:
    """Return the recorded runs."""
    return [json.loads(path.read_text()) for path in sorted(RECORDS.glob("*.json"))]


def main(
    sources: Annotated[
        Path, typer.Option(help="The folder of the clones.", exists=True, file_okay=False)
    ],
    only: Annotated[str, typer.Option(help="Part of a script's name.")] = "",
    seeds: Annotated[int, typer.Option(help="Per script and variant.", min=1)] = 3,
) -> None:
    """Make the runs that are missing, and print the table."""
    work = Path(tempfile.mkdtemp(prefix="third-party-"))
    RECORDS.mkdir(exist_ok=True)
    failed = False
    for script in SCRIPTS:
        for seed in range(seeds):
            for ours in (False, True):
                path = RECORDS / f"{_slug(script, ours)}-{seed}.json"
                if only not in script.name or path.exists():
                    continue
                try:
                    found = run(script, ours=ours, seed=seed, sources=sources.resolve(), work=work)
                except RuntimeError as error:
                    failed = True
                    print(error, file=sys.stderr, flush=True)
                    continue
                path.write_text(json.dumps(found, indent=1) + "\n")
                print(path.stem, found["loss"], f"{found['seconds']:.0f} s", flush=True)
    print(table(recorded()))
    raise typer.Exit(int(failed))


if __name__ == "__main__":
    typer.run(main)

"""The audit of scripts: faults are found, correct ones are not accused; its messages."""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import Subset, TensorDataset
from typer.testing import CliRunner, Result

from benchmarks.audit.__main__ import app
from benchmarks.audit.checks.noise import Noise
from benchmarks.audit.script.audit import choose
from benchmarks.audit.script.draws import Plant, plant
from benchmarks.audit.script.noise import judge_noise
from benchmarks.audit.script.observer import Variant
from benchmarks.audit.script.run import Run, _copy_folder
from benchmarks.audit.script.twins import compare
from benchmarks.audit.script.watched import Places
from tests.benchmarks.audit.script_faults import CORRECT, FAULTS, Script, messages_of, written


def run(script: Path, *options: str) -> Result:
    return CliRunner().invoke(app, ["--script", str(script), *options])


# Whole audits


@pytest.mark.slow
def test_a_correct_script_is_not_accused_and_leaves_nothing_behind() -> None:
    with written(CORRECT["checkpoints, saved and loaded"]) as path:
        result = run(path, "--steps", "4", "--json")
        assert [entry.name for entry in path.parent.iterdir()] == ["train.py"]
    assert result.exit_code == 0, result.output
    content = json.loads(result.output)
    assert not content["notes"]
    assert {check["outcome"] for check in content["checks"]} == {"ok"}
    found = {check["name"]: check["found"] for check in content["checks"]}
    assert found["ledger"] == "4 entries"
    # Clipped to C and not beyond: samples were really planted.
    changes = [float(text.split()[3]) for text in found.values() if text.startswith("sums change")]
    assert max(changes) == pytest.approx(1.0, abs=1e-3)


@pytest.mark.slow
def test_a_violation_on_the_command_line() -> None:
    with written(FAULTS["less noise than in the ledger"]) as path:
        result = run(path, "--steps", "8")
    assert result.exit_code == 1, result.output
    assert re.search(r"VIOLATION: the noise has 0\.(79|80|81)\d* times the", result.output)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(name: str) -> None:
    messages, _ = messages_of(FAULTS[name])
    assert any(FAULTS[name].found in message for message in messages), messages


@pytest.mark.slow
@pytest.mark.parametrize("name", CORRECT)
def test_a_correct_script_is_not_accused(name: str) -> None:
    messages, audit = messages_of(CORRECT[name])
    assert not messages
    assert audit is not None


# Scripts that cannot be audited


def test_a_rank_that_dies_is_named_and_not_who_waited_for_it(tmp_path: Path) -> None:
    script = tmp_path / "dies.py"
    script.write_text(
        "import os, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "if dist.get_rank() == 1:\n"
        "    os._exit(9)\n"
        "dist.barrier()\n"
    )
    result = run(script, "--nproc-per-node", "2")
    assert result.exit_code == 2
    assert "on rank 1 with exit code 9" in result.output


@pytest.mark.parametrize(
    ("text", "exit_code", "message"),
    [
        ("import torch\n", 2, "train.py never calls make_private() or private_participation()"),
        ("print(1 / 0)\n", 2, "train.py failed in the run 'as it is': ZeroDivisionError"),
        ("import sys; sys.exit(7)\n", 2, "failed in the run 'as it is': exit code 7"),
        ("import os; os._exit(3)\n", 2, "ended in the run 'as it is' with exit code 3"),
        ("while True: pass\n", 2, "took longer than 4 seconds in the run 'as it is'"),
        (FAULTS["a loader made anew"].text(), 1, "INVALID: train.py:44: DPOptimizer: no drawn"),
    ],
)
def test_scripts_without_an_audit(
    tmp_path: Path, monkeypatch: Any, text: str, exit_code: int, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "train.py"
    path.write_text(text)
    timeout = ("--timeout", "4") if "while" in text else ()
    result = run(path, "--steps", "3", *timeout)
    assert result.exit_code == exit_code, result.output
    assert message in result.output
    assert ("Traceback" in result.output) == ("1 / 0" in text)


# Noise


def noise_of(values: torch.Tensor, names: dict[str, int] | None = None) -> Noise:
    steps = list(range(len(values)))
    parts, end = [], 0
    for name, size in (names or {}).items():
        parts.append((name, end, end + size))
        end += size
    return Noise(values, [f"step {step + 1} at train.py:{step}" for step in steps], steps, parts)


def gaussian(seed: int, steps: int = 12, elements: int = 200) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(steps, elements, generator=generator, dtype=torch.float64)


# Of other noise than that of these examples, one in several thousand would be accused.
@settings(derandomize=True)
@given(st.integers(0, 1 << 32), st.integers(1, 30), st.integers(1, 300))
def test_noise_as_it_should_be_is_not_accused(seed: int, steps: int, elements: int) -> None:
    noise = noise_of(gaussian(seed, steps, elements), {"weight": elements})
    other = noise_of(gaussian(seed + 1, steps, elements))
    assert judge_noise([noise], [other])[0] == []


@settings(derandomize=True)
@given(st.integers(0, 1 << 32))
def test_noise_that_is_missing_or_too_small_somewhere(seed: int) -> None:
    values = gaussian(seed, elements=400)

    def judge(values: torch.Tensor) -> str:
        return "\n".join(judge_noise([noise_of(values, {"weight": 380, "bias": 20})], [])[0])

    assert "the noise has 0." in judge(0.8 * values)
    for part, found in (
        (np.s_[5], "step 6 at train.py:5"),
        (np.s_[:, 380:], "bias"),
        (np.s_[:, 7], "elements 7 to 7"),
    ):
        changed = values.clone()
        changed[part] = 0
        assert found in judge(changed)


@settings(derandomize=True)
@given(st.integers(0, 1 << 32), st.integers(0, 11), st.integers(0, 11))
def test_noise_that_comes_again(seed: int, one: int, other: int) -> None:
    values, independent = gaussian(seed), gaussian(seed + 1)
    if one != other:
        repeated = values.clone()
        repeated[one] = 0.6 * repeated[one] + 0.8 * repeated[other]
        first, second = sorted((f"step {i + 1} at train.py:{i}" for i in (one, other)), key=len)
        (problem,) = judge_noise([noise_of(repeated)], [noise_of(independent)])[0]
        assert first in problem
        assert second in problem
        assert "their difference shows the data" in problem
    independent[other] = values[one]
    (problem,) = judge_noise([noise_of(values)], [noise_of(independent)])[0]
    assert "of a run with other secrets is correlated by 1.00: it follows from a seed" in problem


# Samples


@given(st.integers(0, 19), st.sampled_from(["absent", "huge", "swapped", "not finite"]))
def test_one_sample_alone_is_planted(index: int, kind: Any) -> None:
    inputs, labels = torch.randn(20, 3), torch.arange(20) % 4
    dataset = TensorDataset(inputs.clone(), labels.clone())
    part = Subset(dataset, list(range(19, -1, -1)))
    edit = plant(part, Plant(index, kind))
    place = 19 - index
    for row in range(20):
        sample = edit(index if row == place else -1, dataset[row])
        is_same = torch.equal(sample[0], inputs[row]) and torch.equal(sample[1], labels[row])
        assert is_same == (row != place)
    value, label = dataset[place]
    if kind in ("huge", "swapped"):
        assert torch.equal(value, inputs[place] * 1e6)
    assert bool(value.isnan().all()) == (kind == "not finite")
    assert (label != labels[place]) == (kind in ("absent", "swapped"))


@given(st.sampled_from(["absent", "huge", "swapped", "not finite"]))
def test_samples_that_are_made_when_they_are_read(kind: Any) -> None:
    dataset = [(float(i), i % 3) for i in range(9)]
    edit = plant(dataset, Plant(4, kind))
    assert dataset[4] == (4.0, 1)
    assert edit(3, dataset[3]) == (3.0, 0)
    value, label = edit(4, dataset[4])
    expected = {"absent": 5.0, "huge": 4e6, "swapped": 4e6, "not finite": math.nan}[kind]
    assert value == pytest.approx(expected, nan_ok=True)
    assert label == (1 if kind in ("huge", "not finite") else 2)


@given(st.lists(st.integers(0, 99), unique=True), st.integers(0, 3))
def test_a_plant_in_every_batch_takes_the_last_the_first_and_others(
    drawn: list[int], start: int
) -> None:
    places = [Plant(None, "huge").place(step, drawn) for step in range(start, start + 300)]
    if drawn:
        assert {0, len(drawn) - 1} <= set(places) <= set(range(len(drawn)))
    else:
        assert places == [None] * 300
    for index in (7, *drawn):
        at = drawn.index(index) if index in drawn else None
        assert Plant(index, "huge").place(start, drawn) == at


def test_one_reading_of_a_sample_is_changed() -> None:
    dataset = TensorDataset(torch.ones(9, 2), torch.arange(9))
    edit = plant(dataset, Plant(None, "swapped"))
    values, label = edit(~4, dataset[4])
    assert values.tolist() == [1e6, 1e6]
    assert label != 4
    assert torch.equal(edit(4, dataset[4])[0], torch.ones(2))
    assert torch.equal(dataset.tensors[0], torch.ones(9, 2))


# Twins


def fake_run(
    plant: Plant | None, sums: list[list[float]], *, counts: bool = False, **changes: Any
) -> Run:
    """A run of one rank, in which sample 3 is drawn for the second of three steps."""
    drawn = [[1], [1, 3], [2]]
    releases = [
        {
            "sums": torch.tensor(row),
            "drawn": indices,
            "settings": (1.0, 1.0, 4.0),
            "where": f"train.py:{step}",
            "left_out": int(step >= 1 and plant == Plant(3, "not finite") and not counts),
        }
        for step, (row, indices) in enumerate(zip(sums, drawn, strict=True))
    ]
    events = [
        {
            "kind": "private",
            "who": "DPOptimizer",
            "where": f"train.py:{step}",
            "before": {"buffer mean": changes.get(f"before {step}", "same")},
            "after": {"buffer mean": changes.get(f"after {step}", "same")},
            "releases": step,
            "randomness": "same",
        }
        for step in range(3)
    ]
    units = [(10, 0.1)]
    record = {"releases": releases, "events": events, "units": units}
    return Run(Variant("a run", plant=plant), [record])


CLEAN = [[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]]


@given(st.floats(0, 3), st.integers(0, 2), st.floats(0, 6.28))
def test_sums_may_change_by_c_and_in_the_steps_of_the_sample(
    size: float, step: int, angle: float
) -> None:
    base = fake_run(Plant(3, "not finite"), CLEAN)
    sums = [list(row) for row in CLEAN]
    sums[step][0] += size * math.cos(angle)
    sums[step][1] += size * math.sin(angle)
    changed = fake_run(Plant(3, "huge"), sums)
    found = compare(base, changed, base, "sample")
    is_equal = torch.equal(torch.tensor(sums), torch.tensor(CLEAN))
    if step == 1:
        assert found.largest == pytest.approx(size, abs=1e-6)
        if abs(size - 1) > 1e-3:
            assert bool(found.problems) == (size > 1)
    else:
        assert bool(found.problems) != is_equal


def test_a_sample_that_cannot_be_made_nan_is_no_base_for_others() -> None:
    base = fake_run(Plant(3, "not finite"), CLEAN, counts=True)
    changed = fake_run(Plant(3, "huge"), [CLEAN[0], [2.0, 1.0], CLEAN[2]])
    found = compare(base, changed, base, "sample")
    assert not found.problems
    assert found.largest is None


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("step", [0, 1, 2])
def test_the_model_may_not_change(when: str, step: int) -> None:
    base = fake_run(Plant(3, "absent"), CLEAN)
    changed = fake_run(None, CLEAN, **{f"{when} {step}": "other"})
    (problem,) = compare(base, changed, base, "sample").problems
    assert "buffer mean depends on sample 3: it was changed " in problem
    assert not compare(base, fake_run(None, CLEAN), base, "sample").problems


def test_what_is_planted_is_drawn_early_late_and_never() -> None:
    assert choose(fake_run(None, CLEAN), ranks=1) == (1, 3, 0)


# Processes


def test_the_folder_is_copied_except_for_what_is_large(tmp_path: Path) -> None:
    source = tmp_path / "source"
    (source / "checkpoints").mkdir(parents=True)
    (source / "checkpoints" / "last.pt").write_text("old")
    (source / ".venv").mkdir()
    with (source / "data.bin").open("wb") as file:
        file.truncate(1 << 30)
    target = tmp_path / "target"
    _copy_folder(source, target)
    (target / "checkpoints" / "last.pt").write_text("new")
    assert (source / "checkpoints" / "last.pt").read_text() == "old"
    assert (target / "data.bin").is_symlink()
    assert (target / ".venv").is_symlink()


def test_places_are_lines_of_the_script(tmp_path: Path) -> None:
    assert Places(Path(__file__)).now().startswith("test_script.py:")
    assert Places(tmp_path / "train.py").now() == "train.py"


def test_every_edit_has_its_place() -> None:
    for script in {**FAULTS, **CORRECT}.values():
        compile(script.text(), "train.py", "exec")
    with pytest.raises(AssertionError):
        Script({"nowhere": "pass"}).text()

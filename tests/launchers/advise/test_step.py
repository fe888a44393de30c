"""What is asked about: a model's parameters and the time of its step."""

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from comm_hooks.launchers.advise import Step, measure_step


@given(st.integers(1, 10**8))
def test_a_number_of_parameters_becomes_matrices(numel: int) -> None:
    step = Step.of_numel(numel, milliseconds=1.0)
    assert step.numel == numel
    assert all(dimension > 0 for shape in step.shapes for dimension in shape)
    if numel >= 64 * 32 * 32:
        # Enough to be cut into fragments and buckets, and hardly anything outside of matrices.
        assert len(step.shapes) >= 64
        assert sum(shape[0] for shape in step.shapes if len(shape) == 1) < 0.05 * numel


def test_steps_are_taken_and_timed() -> None:
    model = nn.Linear(3, 2)
    model.bias.requires_grad_(False)
    taken: list[int] = []
    step = measure_step(model, lambda: taken.append(1), repeat=5)
    assert len(taken) == 7
    assert step.shapes == ((2, 3),)
    assert step.milliseconds > 0
    assert step.dtype == "float32"
    assert measure_step(model.bfloat16(), lambda: None).dtype == "bfloat16"


def _step_under_ddp() -> list[float]:
    rank = dist.get_rank()
    model = nn.Linear(4, 4)
    ddp = DistributedDataParallel(model)

    def step() -> None:
        ddp(torch.full((1, 4), float(rank))).sum().backward()

    assert measure_step(ddp, step, repeat=1).shapes == ((4, 4), (4,))
    assert model.weight.grad is not None
    return model.weight.grad[0].tolist()


def test_under_ddp_nothing_is_exchanged(ranks_of) -> None:  # type: ignore[no-untyped-def]
    # Three steps each: an average over ranks would be 1.5 on both.
    assert ranks_of(2).run(_step_under_ddp) == [[0.0] * 4, [3.0] * 4]


def test_a_step_survives_its_file(tmp_path: Path) -> None:
    step = Step(((3, 4), (5,)), 12.5, "bfloat16")
    step.save(tmp_path / "step.json")
    assert Step.load(tmp_path / "step.json") == step


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"shapes": 3}', '{"shapes": [[1]]}', "null"])
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"step\.json: not a step that measure_step"):
        Step.load(path)
    with pytest.raises(ValueError, match=r"other\.json: cannot be read"):
        Step.load(tmp_path / "other.json")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"shapes": []}, "no trainable parameters"),
        ({"milliseconds": 0}, "positive and finite"),
        ({"milliseconds": -1}, "positive and finite"),
        ({"milliseconds": float("nan")}, "positive and finite"),
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"shapes": [[-2, 2]]}, "negative"),
    ],
)
def test_values_that_cannot_be(values: dict[str, object], message: str, tmp_path: Path) -> None:
    path = tmp_path / "step.json"
    good = {"shapes": [[2, 2]], "milliseconds": 1.0, "dtype": "float32"}
    path.write_text(json.dumps({**good, **values}))
    with pytest.raises(ValueError, match=message):
        Step.load(path)
    with pytest.raises(ValueError, match="repeat must be at least 1"):
        measure_step(nn.Linear(2, 2), lambda: None, repeat=0)
    with pytest.raises(ValueError, match="no trainable parameters"):
        measure_step(nn.Identity(), lambda: None)

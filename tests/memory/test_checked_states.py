"""A state that no memory of these settings has saved is refused, and changes nothing."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from comm_hooks import Differences, ErrorFeedback, MomentumCorrection
from comm_hooks.memory import Memory
from comm_hooks.memory.rows import Rows

NUMEL = 300
every_memory = pytest.mark.parametrize(
    "make",
    [
        *(ErrorFeedback, lambda: ErrorFeedback(16), lambda: ErrorFeedback(4)),
        *(Differences, MomentumCorrection),
    ],
)


def used(make: Callable[[], Memory]) -> Memory:
    memory, rows = make(), Rows(("a", "b"), torch.randn(2, NUMEL))
    memory.compensate(rows, torch.ones(2, 1, dtype=torch.bool), 1.0)
    memory.retain(rows, torch.ones(2, 1, dtype=torch.bool), 1.0, key=0)
    return memory


def changed(state: dict[str, torch.Tensor], value: Any) -> dict[str, Any]:
    return {**state, next(iter(state)): value}


@every_memory
@pytest.mark.parametrize("state", [None, [], "state", {0: torch.ones(3)}, torch.ones(3)])
def test_what_is_no_dictionary_of_vectors(make: Callable[[], Memory], state: Any) -> None:
    refuses(make, state)


@every_memory
@pytest.mark.parametrize(
    "value",
    [
        *(None, 1.0, [1.0], torch.ones(2, 3), torch.tensor(1.0)),
        *(torch.ones(NUMEL, device="meta"), torch.ones(NUMEL).to_sparse()),
        torch.ones(NUMEL, dtype=torch.complex64),
    ],
)
def test_a_row_that_is_none(make: Callable[[], Memory], value: Any) -> None:
    refuses(make, changed(used(make).state_dict(), value))


def refuses(make: Callable[[], Memory], state: Any) -> None:
    memory = used(make)
    before = copy.deepcopy(memory.state_dict())
    with pytest.raises(ValueError, match="saved") as refusal:
        memory.load_state_dict(state)
    assert "\n" not in str(refusal.value)
    after = memory.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], row) for name, row in before.items())


@every_memory
def test_a_row_of_another_length_where_lengths_are_known(make: Callable[[], Memory]) -> None:
    memory = used(make)
    state = memory.state_dict()
    memory.check(state, {"a": NUMEL, "b": NUMEL})
    for numels in ({"a": NUMEL}, {"a": NUMEL, "b": NUMEL + 8}):
        with pytest.raises(ValueError, match=r"residual of '.*b' has"):
            memory.check(state, numels)
        with pytest.raises(ValueError, match=r"residual of '.*b' has"):
            memory.merge([state], {}, numels)


@every_memory
def test_a_row_of_another_length_has_no_norm_yet(make: Callable[[], Memory]) -> None:
    memory = used(make)
    memory.load_state_dict({name: row[:64] for name, row in memory.state_dict().items()})
    assert memory.norm() == 0


def test_velocities_and_residuals_only() -> None:
    state = used(MomentumCorrection).state_dict()
    with pytest.raises(ValueError, match="velocities and residuals only, got 'a'"):
        MomentumCorrection().load_state_dict({**state, "a": torch.ones(NUMEL)})

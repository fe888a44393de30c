"""What every memory does: it keeps rows by name, and refuses a state that is none of its own."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from comm_hooks import Differences, ErrorFeedback, Exchange, MomentumCorrection, TopK
from comm_hooks.collectives import Simulated
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


def rows(*names: str, numel: int = NUMEL) -> Rows:
    return Rows(names, torch.zeros(len(names), numel))


def play(memory: Memory, where: Rows, *accept: bool) -> None:
    """Play a round of other vectors in which half of what is asked for is sent.

    Those that are not accepted are not finite.
    """
    accepted = torch.tensor([accept or [True] * len(where.names)]).T
    where.matrix.normal_().masked_fill_(~accepted, torch.nan)
    compensate(memory, where)
    where.matrix.mul_(0.5)
    memory.retain(where, accepted, 1.0, key=0)


def compensate(memory: Memory, where: Rows) -> None:
    residual = memory.compensate(where, torch.ones(len(where.names), 1, dtype=torch.bool), 1.0)
    if residual:
        residual.add_to(where.matrix)


def recall(memory: Memory, where: Rows) -> torch.Tensor:
    """Return what the memory adds to ``where``."""
    where.matrix.zero_()
    compensate(memory, where)
    return where.matrix.clone()


def used(make: Callable[[], Memory]) -> Memory:
    memory = make()
    play(memory, rows("a", "b"))
    return memory


@every_memory
def test_rows_follow_their_names_into_another_layout(make: Callable[[], Memory]) -> None:
    memory, before, after = make(), rows("a", "b", "c"), rows("c", "new")
    play(memory, before)
    stored = recall(memory, before)
    assert torch.equal(recall(memory, rows("b", "a")), stored[[1, 0]])
    assert torch.equal(recall(memory, after), torch.stack([stored[2], torch.zeros(NUMEL)]))
    play(memory, after)
    changed = recall(memory, after)[0]
    assert not torch.equal(changed, stored[2])
    assert torch.equal(recall(memory, before)[2], changed), "a layout that comes back"


@every_memory
def test_state_survives_saving(make: Callable[[], Memory], tmp_path: Path) -> None:
    memory, place = make(), rows("a", "b")
    play(memory, place)
    saved = recall(memory, place)
    torch.save(memory.state_dict(), tmp_path / "state.pt")
    restored = memory.fresh()
    restored.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert restored.parameters_in(restored.state_dict()) == {"a", "b"}
    assert torch.equal(recall(restored, rows("b", "a")), saved[[1, 0]])

    play(memory, place)
    assert not torch.equal(recall(memory, place), saved)
    memory.load_state_dict(restored.state_dict())
    assert torch.equal(recall(memory, place), saved), "a rollback in place"


@every_memory
def test_what_was_loaded_counts_before_its_next_round(make: Callable[[], Memory]) -> None:
    memory = used(make)
    numels = dict.fromkeys(memory.parameters_in(memory.state_dict()), NUMEL)
    restored = memory.fresh()
    restored.load_state_dict(memory.state_dict(), numels)
    assert restored.norm() == memory.norm() > 0
    restored.load_state_dict({}, {})
    assert restored.norm() == 0


@every_memory
def test_rows_that_are_not_accepted_keep_what_they_had(make: Callable[[], Memory]) -> None:
    memory, place = make(), rows("a", "b")
    play(memory, place)
    before = recall(memory, place)
    play(memory, place, True, False)
    after = recall(memory, place)
    assert not torch.equal(after[0], before[0])
    assert torch.equal(after[1], before[1])


@every_memory
def test_another_clients_memory_is_empty(make: Callable[[], Memory]) -> None:
    memory = used(make)
    assert memory.fresh().norm() == memory.for_server().norm() == 0 < memory.norm()


@every_memory
def test_a_copy_is_of_the_same_class(make: Callable[[], Memory]) -> None:
    for memory in (make(), make().for_server()):
        for duplicate in (memory.fresh(), copy.deepcopy(memory)):
            assert type(duplicate) is type(memory)
            assert repr(duplicate) == repr(memory)


@every_memory
def test_exchanges_of_one_memory_share_no_residuals(make: Callable[[], Memory]) -> None:
    memory = make()
    transport = Simulated(1)[0]
    first, second = (Exchange(TopK(density=0.1), memory, transport=transport) for _ in range(2))
    first.average_({"w": torch.randn(64, 64)})
    zeros = torch.zeros(64, 64)
    second.average_({"w": zeros})
    assert not zeros.any()
    assert not memory.state_dict()


@every_memory
def test_vectors_of_another_length_are_refused(make: Callable[[], Memory]) -> None:
    with pytest.raises(ValueError, match=r"residual of 'a' has \d+ elements, but the parameter"):
        recall(used(make), rows("a", numel=700))


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


@every_memory
def test_rows_of_another_type_are_told(make: Callable[[], Memory]) -> None:
    state = {name: row.half() for name, row in used(make).state_dict().items()}
    with pytest.raises(ValueError, match=r"saved residual of '.*a' is torch\.float16, but"):
        make().load_state_dict(state)


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

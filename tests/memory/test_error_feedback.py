"""Error feedback on its own: storage, moves between layouts, refusal of the wrong state."""

import math

import pytest
import torch

from comm_hooks import ErrorFeedback, Exchange, Memory, MomentumCorrection, TopK
from comm_hooks.collectives import Simulated
from comm_hooks.memory.rows import Rows

every_width = pytest.mark.parametrize("bits", [32, 16, 4])
# Of one stored element, relative to the largest of its block.
PRECISION = {32: 0.0, 16: 2.0**-8, 4: 1 / 15}


def rows(*names: str, numel: int = 600) -> Rows:
    return Rows(names, torch.zeros(len(names), numel))


def recall(memory: ErrorFeedback, where: Rows) -> torch.Tensor:
    """Return what the memory adds to ``where``."""
    where.matrix.zero_()
    compensate(memory, where, [True] * len(where.names))
    return where.matrix.clone()


def compensate(memory: ErrorFeedback, where: Rows, active: list[bool], scale: float = 1.0) -> None:
    memory.compensate(where, torch.tensor(active)[:, None], scale).add_to(where.matrix)


def remember(memory: ErrorFeedback, where: Rows, values: torch.Tensor) -> None:
    where.matrix.copy_(values)
    memory.retain(where, torch.ones(len(where.names), 1, dtype=torch.bool), 1.0, key=0)


@every_width
def test_what_is_retained_comes_back(bits: int) -> None:
    memory, place = ErrorFeedback(bits), rows("a", "b")
    values = torch.randn(2, 600)
    remember(memory, place, values)
    error = (recall(memory, place) - values).abs().max()
    assert error <= PRECISION[bits] * values.abs().max()
    assert abs(memory.norm() - values.norm()) <= 0.05 * values.norm()


def test_inactive_rows_are_left_alone() -> None:
    memory, place = ErrorFeedback(), rows("a", "b")
    remember(memory, place, torch.ones(2, 600))
    place.matrix.zero_()
    compensate(memory, place, [False, True])
    assert place.matrix[:, 0].tolist() == [0, 1]


@every_width
@pytest.mark.parametrize("active", [[True, True], [True, False], [False, False]])
def test_old_residuals_fade(bits: int, active: list[bool]) -> None:
    memory, place = ErrorFeedback(bits, decay=0.5), rows("a", "b")
    remember(memory, place, torch.full((2, 600), 4.0))
    place.matrix.fill_(1)
    compensate(memory, place, active)
    assert place.matrix.tolist() == [[3.0 if is_active else 1.0] * 600 for is_active in active]


@every_width
def test_residuals_are_kept_in_unscaled_units(bits: int) -> None:
    memory, place = ErrorFeedback(bits), rows("a")
    place.matrix.fill_(1024)
    memory.retain(place, torch.tensor([[True]]), 1024.0, key=0)
    place.matrix.zero_()
    compensate(memory, place, [True], scale=8.0)
    assert place.matrix.unique().tolist() == [8]


def test_four_bits_cost_about_half_a_byte() -> None:
    memory, place = ErrorFeedback(bits=4), rows("a", numel=1 << 16)
    remember(memory, place, torch.randn(1, 1 << 16))
    assert memory.state_dict()["a"].nbytes <= 0.54 * (1 << 16)


@pytest.mark.parametrize("bits", [8, 0, "4", True])
def test_unknown_storage_is_refused(bits: object) -> None:
    with pytest.raises(ValueError, match="bits must be one of 4, 16, 32"):
        ErrorFeedback(bits)  # type: ignore[arg-type]


@pytest.mark.parametrize("memory", [ErrorFeedback(), ErrorFeedback(bits=4), MomentumCorrection()])
def test_a_residual_that_is_not_finite_is_an_error_where_it_is_looked_at(memory: Memory) -> None:
    """At the first exchange and every so many steps; nobody could get rid of it."""
    exchange = Exchange(
        TopK(0.5, value_bits=32), memory, min_numel=1, verify_every=2, transport=Simulated(1)[0]
    )
    with pytest.warns(UserWarning, match="world size is 1"):
        exchange.average_({"w": torch.randn(8, 8), "v": torch.randn(4, 8)})
    for rows, matrix in exchange.memory._kept._matrices.items():  # type: ignore[union-attr]
        if "v" in rows.names:
            stored = matrix if matrix.dtype == torch.float32 else matrix[:, :4].view(torch.float32)
            stored[0, 0] = math.inf
    exchange.average_({"w": torch.randn(8, 8), "v": torch.randn(4, 8)})
    with pytest.raises(ValueError, match="residual of 'v' is not finite"):
        exchange.average_({"w": torch.randn(8, 8), "v": torch.randn(4, 8)})

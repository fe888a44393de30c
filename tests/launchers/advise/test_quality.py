"""The quality kept: the measurements that count for a training that was not measured."""

import pytest

from comm_hooks.launchers.advise.methods import parse_method
from comm_hooks.launchers.advise.quality import ALL, Cell, kept_by


def cell(
    method: str, ranks: int, tokens: float, batch: int, *kept: float, spread: float = 0.0
) -> Cell:
    shares = {f"task {i}": k for i, k in enumerate(kept)}
    return Cell(method, ranks, tokens, batch, 3, spread, shares, shares)


CELLS = [
    cell("topk", 2, 2.0, 6, 0.8, 0.9, 1.0),
    cell("topk", 2, 20.0, 6, 0.7, 0.9, 1.0),
    cell("topk", 2, 2.0, 32, 1.1, 1.0, 1.2, spread=0.05),
    cell("topk", 4, 2.0, 6, 0.5, 0.6, 0.7),
    cell("topk", 8, 2.0, 6, 1.0),
    cell("sign", 4, 2.0, 6, 1.0, 1.0),
    cell("identity:bits=16", 4, 2.0, 6, 1.0, 1.0, 0.99),
    cell("low_communication", 4, 2.0, 6, 0.87, 0.98, 1.0),
    cell("low_communication:bits=0.3", 4, 2.0, 6, 0.95, 0.97, 1.0),
]


def lowest(method: str, ranks: int) -> float:
    kept = kept_by(parse_method(method), ranks, CELLS)
    return kept.lowest if kept else -1.0


def test_more_ranks_keep_less_so_no_fewer_than_asked_for_stand_for_them() -> None:
    assert lowest("topk", 2) == 0.7  # the worst of all lengths and batches
    assert lowest("topk", 3) == lowest("topk", 4) == 0.5
    assert lowest("topk", 5) == -1.0


def test_one_or_two_tasks_are_no_rule() -> None:
    assert lowest("sign", 4) == -1.0


def test_options_count_however_written() -> None:
    assert lowest("low_communication:bits_per_parameter=0.3", 4) == 0.95
    assert lowest("topk:density=0.5", 2) == -1.0
    assert lowest("all_reduce", 1000) == 1.0


@pytest.mark.parametrize(
    ("bits", "expected"), [(0.08, -1.0), (0.09, 0.87), (0.2, 0.87), (0.3, 0.95), (1.0, 0.95)]
)
def test_a_budget_is_judged_by_the_largest_that_it_covers(bits: float, expected: float) -> None:
    assert lowest(f"low_communication:bits={bits}", 4) == expected


def test_the_range_as_text() -> None:
    assert str(kept_by(parse_method("topk"), 2, CELLS)) == "70 to 120 % ± 5"
    assert str(kept_by(parse_method("topk"), 4, CELLS)) == "50 to 70 %"
    assert str(ALL) == "100 %"

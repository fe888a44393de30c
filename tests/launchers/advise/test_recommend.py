"""The recommended method."""

from comm_hooks.launchers.advise.methods import parse_method
from comm_hooks.launchers.advise.quality import ALL, Cell, Kept
from comm_hooks.launchers.advise.recommend import Row, choose


def row(spec: str, seconds: float, *kept: float) -> Row:
    tasks = {f"task {i}": share for i, share in enumerate(kept)}
    cells = [Cell(spec, 2, 2.0, 6, 1, 0.0, tasks, tasks)]
    share = ALL if spec == "all_reduce" else Kept(cells) if kept else None
    return Row(parse_method(spec), seconds, 0.0, 0.0, share)


def choice(*rows: Row, min_share: float = 0.9) -> str | None:
    chosen = choose(rows, min_share)
    return chosen.method.spec if chosen else None


def test_the_fastest_of_those_that_keep_enough_on_every_task() -> None:
    plain, half = row("all_reduce", 2.0), row("identity", 1.0, 1.0, 0.99)
    fast = row("count_sketch", 0.5, 1.0, 0.8, 1.0)
    assert choice(plain, half, fast) == "identity"
    assert choice(plain, half, fast, min_share=0.75) == "count_sketch"
    assert choice(plain, row("low_communication", 0.5, 1.0)) == "low_communication"
    assert choice(plain) == "all_reduce"
    assert choice(fast) is None


def test_nothing_is_changed_for_a_few_percent() -> None:
    assert choice(row("identity", 1.0, 1.0), row("all_reduce", 1.04)) == "all_reduce"
    assert choice(row("identity", 1.0, 1.0), row("all_reduce", 1.06)) == "identity"


def test_a_method_without_measurement_or_exchange_is_not_recommended() -> None:
    assert choice(row("sign", 0.1), row("none", 0.1, 1.0), min_share=0.01) is None

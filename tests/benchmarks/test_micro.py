"""The small measurements: names, clocks that do not count twice, operations on an accelerator."""

import importlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

from benchmarks.lab.model import GPTConfig
from benchmarks.lab.runs import Settings
from benchmarks.micro import queued
from benchmarks.micro.__main__ import TABLES, main
from benchmarks.micro.checks import CHECKS, Clock, measure, timed_checks
from benchmarks.micro.timing import medians, times_in_turns
from comm_hooks.optim.private.accounting import GaussianEvent, PLDAccountant
from comm_hooks.wire.gathered_header import GatheredHeader
from comm_hooks.wire.stamp import Stamp
from tests.ranks import Ranks

MEASUREMENTS = Path(__file__).parents[2] / "docs" / "measurements.md"


@pytest.mark.parametrize("name", TABLES)
def test_every_table_has_a_module(name: str) -> None:
    if name in ("per_sample_gradients", "private_checks", "distinguishing"):
        pytest.importorskip("opacus")
    assert callable(importlib.import_module(f"benchmarks.micro.{name}").main)


@pytest.mark.parametrize("mode", ["functorch", "hooks"])
def test_private_steps_are_taken_with_and_without_their_checks(mode: str) -> None:
    pytest.importorskip("opacus")
    from benchmarks.micro.private_checks import _steps, _without_checks
    from comm_hooks.optim.private.gradients.alone import AloneCheck

    original = AloneCheck.differentiate
    with mock.patch.object(AloneCheck, "differentiate", autospec=True) as checked:
        checked.side_effect = original
        step = _steps(torch.nn.Linear(8, 10), (8,), mode)
        _without_checks(step)()
        assert not checked.called
        step()
        assert checked.called


def test_an_unknown_table_is_refused() -> None:
    app = typer.Typer()
    app.command()(main)
    result = CliRunner().invoke(app, ["sped"])
    assert result.exit_code == 2
    assert "there is no table 'sped'" in result.stderr


def test_actions_take_turns() -> None:
    log: list[str] = []
    actions = {name: lambda name=name: log.append(name) for name in "ab"}
    times = times_in_turns(actions, rounds=3, warm_up=1)
    assert "".join(log) == "abababab"
    assert [len(own) for own in times.values()] == [3, 3]
    assert medians({"x": [3.0, 1.0, 2.0]}) == {"x": 2.0}


def busy(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_a_check_that_another_calls_is_counted_once() -> None:
    clock = Clock()
    inner = clock.around(lambda: busy(0.02), "inner")

    def outer() -> None:
        busy(0.01)
        inner()

    clock.around(outer, "outer")()
    assert clock.seconds["inner"] == pytest.approx(0.02, rel=0.2)
    assert clock.seconds["outer"] == pytest.approx(0.01, rel=0.2)


def test_clocks_are_put_around_and_taken_away() -> None:
    before = GatheredHeader.write_
    with timed_checks() as clock:
        payload = torch.zeros(1, 64, dtype=torch.uint8)
        GatheredHeader(range(1), 0).write_(payload, Stamp(1, 2), torch.tensor(0.0))
    assert GatheredHeader.write_ is before
    assert set(clock.seconds) == {"headers", "checksums"}


@pytest.mark.slow
def test_shares_of_a_step(ranks_of: Callable[[int], Ranks]) -> None:
    settings = Settings(nproc=2, batch=2, model=GPTConfig(layers=1, width=16, context=16))
    for found in ranks_of(2).run(measure, "topk", settings, 32):
        checks = {name: found[name] for name in CHECKS}
        assert min(checks.values()) > 0
        assert sum(checks.values()) < found["step"]


@pytest.mark.parametrize(("compressor", "collective", "options"), queued.CASES, ids=str)
def test_a_bucket_takes_the_operations_of_the_page(
    compressor: str, collective: str, options: Mapping[str, Any]
) -> None:
    assert queued.row(compressor, collective, options) in MEASUREMENTS.read_text().splitlines()


def test_reading_a_value_is_an_error() -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.empty(3, device="meta").sum().item()


@pytest.mark.parametrize(("rate", "factor"), [(1.0, 1.0), (0.5, 1.0), (1.0, 3.0)])
def test_a_game_proves_at_most_what_holds_and_catches_a_larger_influence(
    rate: float, factor: float
) -> None:
    from benchmarks.micro.distinguishing import measure, proven

    generator = np.random.default_rng(0)

    def play(is_in: bool) -> float:
        return factor * (is_in and generator.random() < rate) + generator.standard_normal()

    claimed = PLDAccountant().epsilon([GaussianEvent(1.0, rate)], 1e-5)
    bound = proven(*measure(play, 8000), rate)
    if factor == 1:
        assert 0.3 * rate * claimed <= bound <= claimed
    else:
        assert bound > 2 * claimed

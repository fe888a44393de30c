"""The whole command, for real: two ranks in network namespaces on capped links."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from benchmarks.bench import __main__ as command
from benchmarks.bench import worker
from benchmarks.lab.model import GPTConfig
from benchmarks.lab.runs import Settings
from benchmarks.netns import why_not

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(why_not()), reason=why_not() or ""),
    pytest.mark.timeout(600),
]

DIVERGING = "bf16+adamw:lr=1e30"
HOOKS = f"{DIVERGING},none,all_reduce,local_adamw:local_steps=3"
CAP = 10e6
STEPS = 4


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of one bench, and what it printed."""
    folder = tmp_path_factory.mktemp("bench")
    data = folder / "text.txt"
    data.write_text("".join(f"{i} bottles of beer on the wall, " for i in range(3000)))
    arguments = ["--rate", "10mbit", "--hooks", HOOKS, "--steps", STEPS, "--timing-steps", 2]
    arguments += ["--quick", "--data", data, "--out", folder / "out"]
    with pytest.MonkeyPatch.context() as patch:
        model = GPTConfig(layers=2, width=64, heads=2, context=16)
        small = Settings(steps=STEPS, warmup=2, eval_every=2, eval_windows=8, model=model)
        patch.setattr(command, "make_settings", lambda *given: small)
        result = CliRunner().invoke(command.app, list(map(str, arguments)))
    assert result.exit_code == 1, result.output
    return folder / "out", result.stdout


@pytest.fixture(scope="module")
def methods(outcome: tuple[Path, str]) -> dict[str, dict[str, Any]]:
    whole = json.loads((outcome[0] / "results.json").read_text())
    assert whole["rates"] == ["none", "10mbit"]
    return {record["spec"]["method"]: record for record in whole["methods"]}


def test_a_method_that_fails_costs_its_own_row_only(
    outcome: tuple[Path, str], methods: dict[str, dict[str, Any]]
) -> None:
    folder, printed = outcome
    assert list(methods) == HOOKS.split(",")
    assert "figures" not in methods[DIVERGING]
    assert methods[DIVERGING]["timings"] == []
    assert f"* {DIVERGING} failed: FloatingPointError: diverged" in " ".join(printed.split())
    assert "FloatingPointError" in (folder / "logs" / "1-bf16+adamw_lr=1e30.log").read_text()
    for name in HOOKS.split(",")[1:]:
        assert "failure" not in methods[name]
        assert [timing["rate"] for timing in methods[name]["timings"]] == ["none", "10mbit"]
        loss = methods[name]["figures"]["loss"]
        assert loss == methods[name]["curve"][-1]["loss"]
        row = next(line for line in printed.splitlines() if line.startswith(f"{name} "))
        assert f" {loss:.3f} " in row


def test_links_are_capped_only_while_they_should_be(methods: dict[str, dict[str, Any]]) -> None:
    unshaped, capped = methods["all_reduce"]["timings"]
    assert capped["moved_bits_per_second"] < CAP < unshaped["moved_bits_per_second"]
    # Whatever the machine does meanwhile, bytes cannot pass faster than that.
    assert capped["ms_per_step"] > 1e3 * 8 * capped["counted_bytes_per_step"] / CAP


def test_what_crosses_is_what_the_method_counts_and_headers(
    methods: dict[str, dict[str, Any]],
) -> None:
    full = methods["all_reduce"]["timings"][1]
    assert full["counted_bytes_per_step"] == methods["all_reduce"]["figures"]["sent_per_step"]
    assert 1.0 < full["interface_bytes_per_step"] / full["counted_bytes_per_step"] < 1.2
    local = methods["local_adamw:local_steps=3"]["timings"][1]
    assert local["period"] == 3
    assert local["interface_bytes_per_step"] > local["counted_bytes_per_step"] > 0
    nothing = methods["none"]["timings"][1]
    assert nothing["counted_bytes_per_step"] == 0
    assert nothing["interface_bytes_per_step"] < 0.01 * full["interface_bytes_per_step"]


def test_all_reduce_is_tuned(methods: dict[str, dict[str, Any]]) -> None:
    for timing in methods["all_reduce"]["timings"]:
        tried = {each["bucket_mb"] for each in timing["candidates"]}
        assert tried == set(worker.BUCKETS_MB)
        assert timing["bucket_mb"] in tried
    for timing in methods["local_adamw:local_steps=3"]["timings"]:
        assert [each["bucket_mb"] for each in timing["candidates"]] == [None]


def test_the_page_is_there(outcome: tuple[Path, str]) -> None:
    folder = outcome[0]
    page = (folder / "results.md").read_text()
    assert all(f"| `{name}` |" in page for name in HOOKS.split(","))


def networks_of(process: int) -> list[str]:
    folders = [Path("/run/netns"), Path("/etc/netns")]
    return [path.name for each in folders if each.exists() for path in each.glob(f"*-{process}-*")]


def test_nothing_of_it_is_left(outcome: tuple[Path, str]) -> None:
    assert not networks_of(os.getpid())


def test_ctrl_c_removes_the_network(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks.bench", "--hooks", "none"]
    command += ["--quick", "--steps", "1000000", "--out", str(tmp_path / "out")]
    with subprocess.Popen(
        command,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # Who runs the tests in the background may have them ignore it.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as bench:
        deadline = time.monotonic() + 120
        while not list(tmp_path.glob("comm-hooks-*/store")):  # the ranks are starting
            assert time.monotonic() < deadline
            assert bench.poll() is None
            time.sleep(0.1)
        assert networks_of(bench.pid)
        bench.send_signal(signal.SIGINT)
        _, errors = bench.communicate(timeout=120)
    assert bench.returncode == 130
    assert errors == "python -m benchmarks.bench: interrupted, 0 of 1 methods finished\n"
    assert not networks_of(bench.pid)
    assert not list(tmp_path.glob("comm-hooks-*"))

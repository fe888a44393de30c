"""Two nodes, each a network namespace behind a link of 100 Mbit/s: launch, check, train, count.

A node here is what a machine is to torchrun and deepspeed: its own interfaces, and no other way to
its peer than the link.
"""

import json
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from benchmarks.netns import Testbed, why_not
from benchmarks.netns.links import call

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "comm_hooks.launchers.main"]
SCRIPT = str(ROOT / "tests/launchers/launch/train.py")
SECONDS = 240.0

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
    pytest.mark.timeout(600),
]


def start(
    bed: Testbed, node: int, arguments: list[str], **variables: str
) -> "subprocess.Popen[str]":
    """Start ``comm-hooks`` on a node that has been told nothing but the arguments."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.lower().endswith(("_proxy", "_socket_ifname"))
    }
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables}
    return bed.start(
        node,
        [*COMMAND, *arguments],
        environment=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(bed: Testbed, *commands: list[str], code: int = 0, **variables: str) -> list[str]:
    """Run a command on each node and return what they print, once all have ended with ``code``."""
    processes = [start(bed, node, c, **variables) for node, c in enumerate(commands)]
    codes = bed.wait(processes, timeout=SECONDS)
    outputs = [process.stdout.read() for process in processes if process.stdout]
    assert codes == [code] * len(commands), "\n".join(outputs)
    return outputs


def check_counts(folder: Path) -> None:
    """Check that two ranks have trained together, and what the link carried for it."""
    found: list[dict[str, Any]] = [
        json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)
    ]
    assert found[0]["replica"] == found[1]["replica"]
    for rank in found:
        assert rank["world_size"] == 2
        assert rank["gloo_interface"] == "eth0"
        assert rank["bytes_sent"] > 1e6
        # Headers and acknowledgements are 6 to 7 percent.
        assert rank["interface_sent"] == pytest.approx(rank["bytes_sent"], rel=0.1)
        assert rank["interface_received"] == pytest.approx(rank["bytes_received"], rel=0.1)


def test_torchrun_on_two_nodes_trains_through_the_link(tmp_path: Path) -> None:
    with Testbed(2, rate="100mbit") as bed:
        command = ["launch", "--nnodes", "2", "--head", bed.addresses[0], "--nproc", "1"]
        outputs = run(bed, *[[*command, "--preflight", SCRIPT, str(tmp_path)]] * 2)
    check_counts(tmp_path)
    assert "--rdzv-conf is_host=1 --local-addr 10.77.0.1" in outputs[0]
    assert "--rdzv-conf is_host=0 --local-addr 10.77.0.2" in outputs[1]
    assert "0 -> 1" in outputs[0]  # the preflight's table of links


@pytest.mark.skipif(not find_spec("deepspeed"), reason="deepspeed is not installed")
def test_deepspeed_on_two_nodes_trains_through_the_link(tmp_path: Path) -> None:
    with Testbed(2, rate="100mbit") as bed:
        command = ["launch", "--nnodes", "2", "--head", bed.addresses[0], "--nproc", "1", SCRIPT]
        run(bed, *[[*command, str(tmp_path), "--deepspeed"]] * 2, DS_ACCELERATOR="cpu")
    check_counts(tmp_path)


def test_the_preflight_names_a_slow_link_and_its_direction_on_all_nodes() -> None:
    with Testbed(3, rate="100mbit") as bed:
        bed.set_rate("10mbit", ranks=[2], direction="up")
        command = ["preflight", "--nnodes", "3", "--head", bed.addresses[0]]
        outputs = run(bed, *[[*command, "--node-rank", str(node)] for node in range(3)], code=1)
    for output in outputs:
        lines = [line for line in output.splitlines() if "waiting for" not in line]
        assert len(lines) == 2
        for target, line in enumerate(lines):
            assert re.search(rf"node 2 \(.*, 10.77.0.3\) -> node {target} .*: slow: ", line)
            rate = float(re.search(r"slow: ([\d.]+) Mbit/s", line)[1])  # type: ignore[index]
            assert 7 < rate < 11


def test_an_unreachable_node_is_named_within_the_time_that_was_given() -> None:
    with Testbed(2) as bed:
        # Node 1 is there, but its link is not.
        call("ip", "-n", bed.switch, "link", "set", "port1", "nomaster")
        command = ["preflight", "--nnodes", "2", "--head", bed.addresses[0], "--timeout", "3"]
        outputs = run(bed, *[[*command, "--node-rank", str(node)] for node in range(2)], code=1)
    assert "node 1 of 2 did not come within 3 s" in outputs[0]
    assert "cannot reach the head at 10.77.0.1:29500 from 10.77.0.2 (eth0): no " in outputs[1]

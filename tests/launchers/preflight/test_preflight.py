"""The command: what each process says and how it ends, alone, with others, and without them."""

import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist
from torch.distributed.elastic.utils.distributed import get_free_port
from typer.testing import CliRunner

from comm_hooks.launchers.main import app
from tests.launchers.launch.commands import forget_launchers
from tests.ranks import Ranks


def preflight(*arguments: str, **environment: str) -> tuple[int, str, str]:
    """Return exit code, standard output and standard error."""
    result = CliRunner().invoke(app, ["preflight", *arguments], env=environment)
    return result.exit_code, result.stdout, result.stderr


def by_hand(node: int, port: int, *options: str) -> tuple[int, str, str]:
    """Run the preflight as one of two nodes, started by hand."""
    head = f"127.0.0.1:{port}"
    return preflight("--nnodes", "2", "--node-rank", str(node), "--head", head, *options)


def on_a_rank(port: int, packages: str) -> tuple[int, str, str]:
    """Run as one of two nodes: the second has a package of its own."""
    rank = dist.get_rank()
    path = mock.patch.object(sys, "path", [packages, *sys.path] if rank else sys.path)
    with path, pytest.MonkeyPatch.context() as environment:
        forget_launchers(environment)  # what earlier tests in this process have set
        return by_hand(rank, port)


def test_one_node_alone_is_described() -> None:
    code, output, errors = preflight("--nproc", "2")
    assert (code, errors) == (0, "")
    assert socket.gethostname() in output
    assert "torch 2" in output
    counts = "nodes: 1, links: 0, processes in a gloo group: 1"
    assert output.splitlines()[-1] == f"Passed: no problem was found ({counts})"


@pytest.mark.slow
def test_a_node_with_another_version_is_named_on_all_nodes(
    tmp_path: Path, ranks_of: Callable[[int], Ranks]
) -> None:
    other = tmp_path / "deepspeed-0.0.1.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: deepspeed\nVersion: 0.0.1\n")
    for code, output, errors in ranks_of(2).run(on_a_rank, get_free_port(), str(tmp_path)):
        assert (code, output) == (1, "")
        (line,) = (x for x in errors.splitlines() if "waiting for" not in x)
        assert line.startswith("comm-hooks preflight: deepspeed differs: ")
        assert line.endswith("0.0.1 on node 1 (" + socket.gethostname() + ", 127.0.0.1)")


def test_a_node_that_does_not_come_is_named(tmp_path: Path) -> None:
    start = time.monotonic()
    code, output, errors = by_hand(0, get_free_port(), "--timeout", "1")
    assert (code, output) == (1, "")
    host = socket.gethostname()
    assert errors == (
        f"comm-hooks preflight: node 1 of 2 did not come within 1 s; here are: 0 ({host})\n"
    )
    assert time.monotonic() - start < 30


def test_a_head_that_cannot_be_reached_is_named() -> None:
    port = get_free_port()
    start = time.monotonic()
    code, output, errors = by_hand(1, port, "--timeout", "1")
    assert (code, output) == (1, "")
    assert errors.splitlines()[-1] == (
        f"comm-hooks preflight: cannot reach the head at 127.0.0.1:{port} from 127.0.0.1 (lo): "
        "connection refused (nothing listens there yet), for 1 s"
    )
    assert time.monotonic() - start < 30


def test_a_port_that_is_in_use_on_the_head_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        code, _, errors = by_hand(0, port, "--timeout", "1")
    assert code == 1
    assert errors == (
        f"comm-hooks preflight: port {port} is in use on this machine: give another one, as in "
        f"--head 127.0.0.1:{port + 1}\n"
    )


@pytest.mark.parametrize(
    ("environment", "complaint"),
    [
        # torchrun in each of four tasks of srun, each on its own.
        (
            {"RANK": "0", "WORLD_SIZE": "1", "SLURM_NTASKS": "4"},
            "SLURM_NTASKS is 4, but the process group has only 1 rank: each process would train",
        ),
        ({"RANK": "0", "WORLD_SIZE": "1", "SLURM_NTASKS": "1"}, ""),
        (
            {"RANK": "0", "WORLD_SIZE": "1", "GLOO_SOCKET_IFNAME": "ib7"},
            "GLOO_SOCKET_IFNAME is ib7, which is no interface of this machine",
        ),
    ],
)
def test_a_rank_finds_out_that_it_is_alone(environment: dict[str, str], complaint: str) -> None:
    where = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(get_free_port())}
    code, output, errors = preflight(**environment, **where)
    assert code == (1 if complaint else 0), errors
    assert complaint in errors
    assert bool(output) == (not complaint)


@pytest.mark.parametrize(
    ("arguments", "environment", "message"),
    [
        (["--nnodes", "2"], {}, "--nnodes 2 needs --head"),
        (["--nnodes", "2", "--node-rank", "2"], {}, "must lie between 0 and 1"),
        (["--nproc", "0"], {}, "--nproc must be at least 1"),
        (["--timeout", "0"], {}, "--timeout must be positive, got 0"),
        (["--min-bandwidth", "-1"], {}, "--min-bandwidth must be positive, got -1"),
        (["--head", "a:b"], {}, "needs HOST or HOST:PORT"),
        (
            ["--nnodes", "2", "--head", "127.0.0.1"],
            {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"},
            "are for starting by hand",
        ),
        (
            [],
            {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"},
            "mpirun started 2 ranks, 1 of them here: give --head",
        ),
    ],
)
def test_bad_input_is_refused(
    arguments: list[str], environment: dict[str, str], message: str
) -> None:
    code, output, errors = preflight(*arguments, **environment)
    assert (code, output) == (2, "")
    assert errors.startswith("comm-hooks preflight: ")
    assert errors.count("\n") == 1
    assert message in errors

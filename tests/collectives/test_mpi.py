"""Exchanges over MPI, with real processes started by mpiexec, equal those over gloo."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from comm_hooks.collectives import MPITransport, Simulated, TorchDistributed
from comm_hooks.collectives.requests import AllGather, AllGatherObject
from tests.collectives.test_torch_distributed import requests
from tests.collectives.training import all_loops
from tests.ranks import RanksOf

ROOT = Path(__file__).parents[2]
# Beside the interpreter if installed as a wheel into an environment that is not active.
MPIEXEC = shutil.which("mpiexec") or shutil.which("mpiexec", path=Path(sys.executable).parent)

pytest.importorskip("mpi4py", reason="needs mpi4py: pip install 'comm-hooks[mpi]'")
needs_mpiexec = pytest.mark.skipif(MPIEXEC is None, reason="needs mpiexec (pip install mpich)")


def launch(
    ranks: int, what: str, *options: str, runner: bool = True
) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        # Open MPI refuses more ranks than cores, and root.
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
        "OMPI_MCA_rmaps_base_oversubscribe": "1",
    }
    script = str(Path(__file__).with_name("mpi_rank.py"))
    python = [sys.executable, *(["-m", "mpi4py"] if runner else [])]
    assert MPIEXEC
    return subprocess.run(
        [MPIEXEC, "-n", str(ranks), *python, script, what, *options],
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def over_mpi(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """What the ranks of one run returned."""
    folder = tmp_path_factory.mktemp("mpi")
    done = launch(request.param, "replies", str(folder))
    assert done.returncode == 0, done.stderr
    assert "waiting forever" not in done.stderr
    return [torch.load(folder / f"{rank}.pt") for rank in range(request.param)]


def over_gloo() -> dict[str, Any]:
    return all_loops(TorchDistributed())


@needs_mpiexec
def test_replies_equal_those_of_a_simulated_world(over_mpi: list[dict[str, Any]]) -> None:
    ranks = len(over_mpi)
    for index in range(3):
        expected = Simulated(ranks)._perform([requests(r, ranks)[index] for r in range(ranks)])
        for rank in range(ranks):
            assert torch.equal(over_mpi[rank]["replies"][index], expected[rank])


@needs_mpiexec
def test_training_over_mpi_equals_training_over_gloo(
    over_mpi: list[dict[str, Any]], ranks_of: RanksOf
) -> None:
    ranks = len(over_mpi)
    expected = ranks_of(ranks).run(over_gloo)
    for own, other in zip(over_mpi, expected, strict=True):
        assert list(own["loops"]) == list(other)
        for name, result in own["loops"].items():
            gloo = other[name]
            # MPI and gloo need not add three numbers in the same order.
            exactly = ranks == 2 or name not in ("identity", "random_k", "OneBitAdam")
            tolerance = {"rtol": 0.0, "atol": 0.0} if exactly else {"rtol": 1e-4, "atol": 1e-5}
            torch.testing.assert_close(result["weights"], gloo["weights"], **tolerance)
            assert result["stats"]["bytes_sent"] == gloo["stats"]["bytes_sent"] > 0


@needs_mpiexec
def test_a_communicator_has_ranks_of_its_own(over_mpi: list[dict[str, Any]]) -> None:
    ranks = len(over_mpi)
    assert over_mpi[0]["subgroup"] == (0, 1, 0.0)
    for rank in range(1, ranks):
        mean = sum(range(1, ranks)) / (ranks - 1)
        assert over_mpi[rank]["subgroup"] == (ranks - 1 - rank, ranks - 1, mean)


@pytest.mark.slow
@needs_mpiexec
def test_an_error_on_one_rank_ends_all() -> None:
    done = launch(3, "raise_on_one_rank")  # a hang runs into launch's timeout
    assert done.returncode != 0
    assert "ValueError: the data of rank 1 are broken" in done.stderr


@pytest.mark.slow
@needs_mpiexec
def test_ranks_configured_differently_all_say_so_and_a_missing_runner_is_warned_of() -> None:
    done = launch(2, "configure_one_rank_otherwise", runner=False)
    assert done.returncode == 0, done.stderr
    for rank in (0, 1):
        assert f"rank {rank}: ranks are configured differently" in done.stdout
    assert "seed is 0 on rank 0, 1 on rank 1" in done.stdout
    assert "python -m mpi4py SCRIPT" in done.stderr


@pytest.fixture
def transport() -> MPITransport:
    """This process, alone."""
    return MPITransport()


def test_tensors_on_accelerators_are_refused(transport: MPITransport) -> None:
    on_gpu: Any = SimpleNamespace(device=torch.device("cuda:1"))  # there need not be such a device
    with pytest.raises(ValueError, match="reads tensors on the CPU only, got one on cuda:1"):
        transport.perform(AllGather(on_gpu))


def test_objects_are_gathered(transport: MPITransport) -> None:
    assert transport.perform(AllGatherObject({"seed": 0})) == [{"seed": 0}]


def test_what_is_no_communicator_is_refused() -> None:
    with pytest.raises(ValueError, match="must be an mpi4py intracommunicator"):
        MPITransport("world")  # type: ignore[arg-type]


def test_without_mpi4py_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ImportError, match=r'pip install "comm-hooks\[mpi\]"'):
        MPITransport()

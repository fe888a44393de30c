"""Real ranks for tests: processes joined by gloo or NCCL, kept alive between tests.

Starting a process costs seconds, most of them for importing torch.  So one set of ranks serves all
tests of a run that need that many, and all ranks are forked from one process that has imported
what they need.  A test that fails or hangs gets its ranks killed; the next one starts new ones.
"""

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

TIMEOUT_SECONDS = 240
# Each process group that a test leaves behind keeps three threads, which wake up now and then.
MOST_THREADS = 60
ROOT = Path(__file__).parents[1]

CONTEXT = multiprocessing.get_context("forkserver")
_preloaded: list[str] = []


def preload(*modules: str) -> None:
    """Import modules once for all ranks; has no effect after the first rank was started."""
    _preloaded.extend(modules)
    CONTEXT.set_forkserver_preload([*_preloaded, "tests.freezing"])


# DDP and torch's optimizers import torch._dynamo, which takes longer than torch itself.
preload("torch._dynamo", "comm_hooks.optim", "hypothesis", "pytest")


def _start_server() -> None:
    """Start what ranks are forked from where the tests are, which it imports from there."""
    here = os.getcwd()
    os.chdir(ROOT)
    try:
        forkserver.ensure_running()
    finally:
        os.chdir(here)


@dataclass
class Outcome:
    """What a rank returned, or the exception that it raised."""

    value: Any = None
    error: BaseException | None = None
    trace: str = ""


class Ranks:
    """``world_size`` processes that run functions together.

    With NCCL all of them share the first GPU.
    """

    def __init__(self, world_size: int, backend: str = "gloo") -> None:
        self.world_size = world_size
        self._store = tempfile.NamedTemporaryFile(prefix="ranks-")  # noqa: SIM115
        self._connections: list[Connection] = []
        self._processes = []
        _start_server()
        for rank in range(world_size):
            connection, remote = CONTEXT.Pipe()
            process = CONTEXT.Process(
                target=_serve,
                args=(rank, world_size, backend, self._store.name, remote),
                daemon=True,
            )
            process.start()
            remote.close()
            self._connections.append(connection)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``function(*args)`` on every rank and return the results in rank order."""
        outcomes = self.outcomes(function, *args)
        for rank, outcome in enumerate(outcomes):
            if outcome.error is not None:
                raise AssertionError(f"rank {rank} failed:\n{outcome.trace}") from outcome.error
        return [outcome.value for outcome in outcomes]

    def outcomes(self, function: Callable[..., Any], *args: Any) -> list[Outcome]:
        """Like :meth:`run`, for tests that expect exceptions."""
        for connection in self._connections:
            connection.send((function, args))
        outcomes: dict[int, Outcome] = {}
        while len(outcomes) < self.world_size:
            pending = [c for i, c in enumerate(self._connections) if i not in outcomes]
            ready = wait(pending, timeout=TIMEOUT_SECONDS)
            if not ready:
                missing = sorted(set(range(self.world_size)) - set(outcomes))
                self.close()
                failed = "".join(
                    f"\nrank {r} failed:\n{o.trace}" for r, o in outcomes.items() if o.error
                )
                raise AssertionError(f"ranks {missing} hang in {function.__name__}{failed}")
            for connection in ready:
                outcomes[self._connections.index(connection)] = connection.recv()
        return [outcomes[rank] for rank in range(self.world_size)]

    @property
    def usable(self) -> bool:
        """Whether all processes live, and are not slowed down by what tests left behind."""
        alive = bool(self._processes) and all(p.is_alive() for p in self._processes)
        return alive and all(
            psutil.Process(p.pid).num_threads() <= MOST_THREADS for p in self._processes
        )

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes = []
        self._store.close()


RanksOf = Callable[[int], Ranks]
"""The fixture ``ranks_of``: a function from a number of ranks to running ranks."""


def _serve(rank: int, world_size: int, backend: str, store: str, connection: Connection) -> None:
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    if "nccl" in backend:
        # NCCL refuses two ranks on one GPU of one host. So each says that it is a host of its own,
        # and they talk over sockets, as nodes do.
        os.environ.update(NCCL_HOSTID=str(rank), NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1")
        torch.cuda.set_device(0)
    dist.init_process_group(
        backend, init_method=f"file://{store}", rank=rank, world_size=world_size
    )
    while True:
        function, args = connection.recv()
        try:
            torch.manual_seed(0)
            connection.send(Outcome(value=function(*args)))
        except BaseException as error:
            connection.send(Outcome(error=error, trace=traceback.format_exc()))

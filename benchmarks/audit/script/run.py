"""Runs of a user's script, each in processes and a folder of its own."""

import functools
import multiprocessing
import os
import runpy
import shutil
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
from torch.distributed.elastic.utils.distributed import get_free_port

from benchmarks.audit.script.observer import Observer, Stopped, Variant
from comm_hooks.launchers.environment import LauncherEnvironment
from comm_hooks.launchers.network import Endpoint, loopback_interface
from comm_hooks.optim.private.errors import PrivacyError

# One process imports torch, and the ranks are forked from it.
_CONTEXT = multiprocessing.get_context("forkserver")
_ROOT = Path(__file__).parents[3]
# Larger entries of the working folder are linked, not copied.
_MOST_COPIED = 64 << 20
_GRACE_SECONDS = 2.0


class ScriptFailed(ValueError):
    """The script did not finish a run.

    Attributes:
        trace: Python's traceback.
        refused: the message of the library, where it refused the script.
    """

    def __init__(self, message: str, trace: str = "", refused: str | None = None) -> None:
        super().__init__(message)
        self.trace, self.refused = trace, refused


_starting = threading.Lock()


@functools.cache
def _started() -> None:
    _CONTEXT.set_forkserver_preload(["torch._dynamo", "benchmarks.audit.script.run"])
    folder = Path.cwd()
    os.chdir(_ROOT)
    try:
        forkserver.ensure_running()
    finally:
        os.chdir(folder)


def _start_server() -> None:
    """Start the process that ranks are forked from in the clone, once.

    It imports from its own folder, and Opacus installs another package named ``benchmarks``.  The
    folder is that of all threads: none may start a rank meanwhile.
    """
    with _starting:
        _started()


@dataclass(frozen=True)
class Job:
    """A script and its settings.

    Attributes:
        script: its path.
        arguments: of the script.
        processes: ranks, as ``torchrun --nproc-per-node``; None for one, without torchrun.
        steps: private steps (or rounds) to observe.
        timeout: seconds for one run.
    """

    script: Path
    arguments: tuple[str, ...] = ()
    processes: int | None = None
    steps: int = 20
    timeout: float = 120.0


@dataclass
class Run:
    """The record of one run.

    Attributes:
        variant: of the run.
        ranks: the records of all ranks; see
            :class:`~benchmarks.audit.script.observer.Observer`.
    """

    variant: Variant
    ranks: list[dict[str, Any]] = field(repr=False)


def run_script(job: Job, variant: Variant, folder: Path, released: Path | None = None) -> Run:
    """Run a script under observation, on all ranks, and wait for its end.

    Args:
        job, variant: the run.
        folder: a new one; the script runs in a copy of the working folder in it.
        released: the folder of the followed run; None to follow none.

    Raises:
        ScriptFailed: if it fails or takes too long.
    """
    workplace = folder / "work"
    _copy_folder(Path.cwd(), workplace)
    count = job.processes or 1
    head = Endpoint("127.0.0.1", get_free_port())
    _start_server()
    processes = [
        _CONTEXT.Process(target=_run, args=(job, variant, folder, released, rank, head))
        for rank in range(count)
    ]
    for process in processes:
        process.start()
    try:
        in_time = _wait_for(processes, job.timeout)
    finally:
        codes = [process.exitcode for process in processes]
        for process in processes:
            process.kill()
            process.join()
    in_run = f"in the run {variant.name!r}"
    files = [folder / f"rank{rank}.pt" for rank in range(count)]
    # Of our own making: tensors, and plain values around them.
    records = [torch.load(f, weights_only=False) if f.exists() else None for f in files]
    on = [f"{in_run} on rank {rank}" if count > 1 else in_run for rank in range(count)]
    # A rank that died comes first: the others failed because of it.
    for rank, (record, code) in enumerate(zip(records, codes, strict=True)):
        if record is None and code is not None:
            output = (folder / f"rank{rank}.log").read_text(errors="replace")
            raise ScriptFailed(
                f"{job.script} ended {on[rank]} with exit code {code}", output[-2000:]
            )
    for rank, record in enumerate(records):
        if record is not None and record["error"]:
            message = f"{job.script} failed {on[rank]}: {record['error']}"
            refused = record["refused"]
            if record["replaced"] and refused is None:
                refused = f"{message}, after it has replaced {', '.join(record['replaced'])}"
            raise ScriptFailed(message, record["trace"], refused)
    if not in_time:
        raise ScriptFailed(
            f"{job.script} took longer than {job.timeout:g} seconds {in_run}: "
            "give a larger --timeout or fewer --steps"
        )
    shutil.rmtree(workplace, ignore_errors=True)
    return Run(variant, [record for record in records if record is not None])


def _wait_for(processes: Sequence[Any], timeout: float) -> bool:
    """Wait until all have ended, or one has failed; return whether that was in time."""
    end = time.monotonic() + timeout
    while running := [p for p in processes if p.exitcode is None]:
        left = end - time.monotonic()
        if left <= 0:
            return any(p.exitcode for p in processes)
        wait([p.sentinel for p in running], timeout=left)
        if any(p.exitcode for p in processes):
            # The others wait for this one in vain.
            end = min(end, time.monotonic() + _GRACE_SECONDS)
    return True


def _run(
    job: Job, variant: Variant, folder: Path, released: Path | None, rank: int, head: Endpoint
) -> None:
    """Run the script as ``__main__`` on one rank, and write its record."""
    log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - as long as the process lives
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    script = job.script.resolve()
    if job.processes is not None:
        _set_environment(rank, job.processes, head)
    torch.set_num_threads(1)
    # Workers of data loaders start as in a process that was not forked from another one.
    multiprocessing.set_start_method(None, force=True)
    observer = Observer(script, variant, job.steps, folder, rank, released)
    os.chdir(folder / "work")
    sys.argv = [str(job.script), *job.arguments]
    sys.path.insert(0, str(script.parent))
    error, trace, refused = "", "", None
    with observer.watching():
        try:
            runpy.run_path(str(script), run_name="__main__")
        except Stopped:
            pass
        except SystemExit as end:
            if end.code:
                error = f"exit code {end.code}"
        except BaseException as raised:
            error = f"{type(raised).__name__}: {raised}".splitlines()[0]
            trace = "".join(traceback.format_exception(raised, limit=-12))
            if isinstance(raised, PrivacyError):
                refused = f"{observer.places.of(raised)}: {raised}"
    record = {**observer.record(), "error": error, "trace": trace, "refused": refused}
    unfinished = folder / f"rank{rank}.tmp"
    torch.save(record, unfinished)
    unfinished.rename(folder / f"rank{rank}.pt")
    sys.stdout.flush()
    # The store is in the first rank's process: keep it alive until all ranks are done.
    files = [folder / f"rank{r}.pt" for r in range(job.processes or 1)]
    until = time.monotonic() + _GRACE_SECONDS
    while not error and time.monotonic() < until and not all(file.exists() for file in files):
        time.sleep(0.01)
    # Without the script's exit handlers: the other ranks may have left.
    os._exit(1 if error else 0)


def _set_environment(rank: int, count: int, head: Endpoint) -> None:
    """Set the variables of torchrun."""
    os.environ |= LauncherEnvironment("torchrun", rank, count, rank, count).variables(head)
    os.environ |= {"GROUP_RANK": "0", "ROLE_RANK": str(rank), "ROLE_WORLD_SIZE": str(count)}
    if interface := loopback_interface():
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def _copy_folder(source: Path, target: Path) -> None:
    """Copy a folder, so that a script overwrites no checkpoint; link large and hidden entries."""
    target.mkdir(parents=True)
    left = _MOST_COPIED
    for entry in sorted(source.iterdir()):
        hidden = entry.name.startswith(".") or entry.name == "__pycache__"
        size = left + 1 if hidden or entry.is_symlink() else _size(entry, left)
        if size > left:
            (target / entry.name).symlink_to(entry.absolute())
            continue
        left -= size
        if entry.is_dir():
            shutil.copytree(entry, target / entry.name, symlinks=True)
        elif entry.is_file():
            shutil.copy2(entry, target / entry.name)


def _size(entry: Path, most: int) -> int:
    """Return the bytes in a file or folder, or a number above ``most``."""
    total = 0
    for path in [entry] if not entry.is_dir() else entry.rglob("*"):
        total += path.stat().st_size + 1024 if path.is_file() else 0
        if total > most:
            break
    return total

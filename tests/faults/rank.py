"""One rank of one case, in a process of its own."""

import hashlib
import os
import traceback
import warnings
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from tests.faults.kinds import Case
from tests.faults.training import TIMEOUT_SECONDS, Training


@dataclass(frozen=True)
class Report:
    """How a rank has ended.

    Attributes:
        error: the type of the exception; empty if there was none.
        told: its message.
        trace: where it arose.
        model: a digest of the parameters.
    """

    error: str = ""
    told: str = ""
    trace: str = ""
    model: str = ""


def keep_store(connection: Connection) -> None:
    """Keep a store, and tell its port."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("process", str(os.getpid()))
    connection.send(store.port)
    connection.recv()


def play(case: Case, rank: int, port: int, prefix: str, connection: Connection) -> None:
    """Run one rank to its end and tell how that was; leave when told to."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    plain = TCPStore("127.0.0.1", port, is_master=False)
    store = PrefixStore(prefix, plain)
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rank,
        world_size=case.method.ranks,
        timeout=timedelta(seconds=TIMEOUT_SECONDS),
    )
    # Or a rank that is refused at once would leave while others are still connecting to it.
    dist.barrier()
    try:
        keeper = int(plain.get("process")) if case.kind.needs_store else 0
        training = _run(case, rank, keeper, connection)
    except Exception as error:
        report = Report(type(error).__name__, str(error), traceback.format_exc())
        connection.send(report)
        return
    connection.send(Report(model=_digest(training.shown())))
    # A rank that is through goes on to something else; its connections stay for a while.
    connection.recv()


def _run(case: Case, rank: int, keeper: int, connection: Connection) -> Training:
    kind, is_culprit = case.kind, rank == case.culprit
    settings = case.method.settings
    # All ranks scale, if any does.
    if kind.settings and (is_culprit or kind.recovers):
        settings = kind.settings(case)
    training = case.method.make(settings)
    training.store_process = keeper
    is_hit = is_culprit or kind.everywhere
    for index in range(case.method.steps):
        if kind.before and (is_hit or kind.prepares) and index == case.step - 2:
            kind.before(training, case)
        if is_hit and index == case.step:
            connection.send("injected")
            if kind.inject:
                kind.inject(training, case)
            if getattr(training, "skipped", False):
                continue
        training.step(index)
        training.poison = 1.0
    training.finish()
    return training


def _digest(parameters: list[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for parameter in parameters:
        digest.update(parameter.numpy().tobytes())
    return digest.hexdigest()[:16]

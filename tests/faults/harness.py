"""Runs cases in processes, and judges how they end."""

import functools
import itertools
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from tests.faults.kinds import NOTHING, Case
from tests.faults.methods import SHARDED
from tests.faults.rank import Report, keep_store, play
from tests.faults.training import SHARDS, TIMEOUT_SECONDS
from tests.ranks import CONTEXT, preload

preload("tests.faults.rank")

GRACE_SECONDS = 15.0
"""How long after an injected fault and two timeouts a rank that is still silent hangs.

Two: one until a collective fails, one for the roll call that follows."""
_START_SECONDS = 60.0
ALIKE = "silent divergence: alike"
"""The verdict on a fault of which no rank has said anything."""
_KINDS_OF_ERRORS = {"ConfigMismatchError", "PayloadError", "PeerError", "ValueError"}


@dataclass(frozen=True)
class Outcome:
    """How a case has ended.

    Attributes:
        fault, method, seed: the case.
        verdict: "refused", "recovered", or the fault of the library.
        seconds: from the fault (or, if that is there from the start, from the start) to the last
            rank's end.
        details: what each rank said, where something is wrong.
    """

    fault: str
    method: str
    seed: int
    verdict: str
    seconds: float
    details: dict[str, str] = field(default_factory=dict)

    @property
    def is_good(self) -> bool:
        return self.verdict in ("refused", "recovered")


class Harness:
    """Runs one case after the other."""

    def __init__(self) -> None:
        # As torchrun does: the store outlives every rank.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._numbers = itertools.count()

    def run(self, case: Case) -> Outcome:
        """Run a case and judge it."""
        ranks = self._play(case)
        verdict = judge(case, ranks.reports, ranks.codes)
        if case.kind.may_do_nothing and verdict == ALIKE:
            undisturbed = self._play(Case(case.method, NOTHING))
            if ranks.reports == undisturbed.reports:
                verdict = "recovered"
        details = {}
        if verdict not in ("refused", "recovered"):
            for rank in range(case.method.ranks):
                report = ranks.reports.get(rank)
                said = f"{report.error}: {report.told}\n{report.trace}" if report else "nothing"
                details[f"rank {rank}"] = f"ended with {ranks.codes.get(rank)}; {said}"
            details["culprit"] = f"rank {case.culprit}, step {case.step}"
        return Outcome(
            case.kind.name,
            case.method.name,
            case.seed,
            verdict,
            round(ranks.seconds, 1),
            details,
        )

    def _play(self, case: Case) -> "_Ranks":
        """Run all ranks of a case to their ends."""
        prefix = f"case {next(self._numbers)}"
        with _store_process() if case.kind.needs_store else nullcontext(self._store.port) as port:
            ranks = _Ranks(case, port, prefix)
            ranks.watch()
        return ranks


@contextmanager
def _store_process() -> Iterator[int]:
    """Keep a store in a process of its own; yield its port."""
    connection, remote = CONTEXT.Pipe()
    process = CONTEXT.Process(target=keep_store, args=(remote,), daemon=True)
    process.start()
    try:
        yield connection.recv()
    finally:
        process.kill()
        process.join()


@functools.cache
def _harness() -> Harness:
    return Harness()


def run(case: Case) -> Outcome:
    """Run a case and judge it, in a process that does so one case after the other."""
    return _harness().run(case)


class _Ranks:
    """The processes of one case.

    Attributes:
        reports: by rank, of those that have ended by themselves.
        codes: with which exit codes; None for those that had to be killed.
        seconds: see :class:`Outcome`.
    """

    def __init__(self, case: Case, port: int, prefix: str) -> None:
        self.reports: dict[int, Report] = {}
        self.codes: dict[int, int | None] = {}
        self.seconds = 0.0
        self._case = case
        self._connections: dict[int, Connection] = {}
        self._processes = {}
        for rank in range(case.method.ranks):
            connection, remote = CONTEXT.Pipe()
            process = CONTEXT.Process(
                target=play, args=(case, rank, port, prefix, remote), daemon=True
            )
            process.start()
            remote.close()
            self._connections[rank], self._processes[rank] = connection, process

    def watch(self) -> None:
        """Wait for all ranks to end, for so long as they may take."""
        since = time.monotonic()
        until = since + _START_SECONDS
        awaited = dict(self._connections)
        while awaited and (remaining := until - time.monotonic()) > 0:
            ready = wait(list(awaited.values()), timeout=remaining)
            for rank in [rank for rank, connection in awaited.items() if connection in ready]:
                try:
                    message = awaited[rank].recv()
                except (EOFError, ConnectionResetError):
                    del awaited[rank]
                    continue
                if message == "injected":
                    since = time.monotonic()
                    until = since + 2 * TIMEOUT_SECONDS + GRACE_SECONDS
                else:
                    self.reports[rank] = message
                    del awaited[rank]
        self.seconds = time.monotonic() - since
        for rank in self.reports:
            if not self.reports[rank].error:
                self._connections[rank].send("leave")
        for rank, process in self._processes.items():
            if rank in awaited:
                process.kill()
            process.join(10)
            if process.exitcode is None:
                process.kill()
                process.join()
                awaited[rank] = self._connections[rank]
            self.codes[rank] = None if rank in awaited else process.exitcode


def judge(case: Case, reports: Mapping[int, Report], codes: Mapping[int, int | None]) -> str:
    """Return "refused", "recovered", or the fault of the library."""
    kind, culprit = case.kind, case.culprit
    for rank in range(case.method.ranks):
        if rank == culprit and not kind.survives:
            continue
        if codes[rank] is None:
            return f"rank {rank} hangs"
        if codes[rank] != 0:
            return f"rank {rank} crashed with {codes[rank]}"
    finished = {rank for rank, report in reports.items() if not report.error}
    all_ranks = set(range(case.method.ranks))
    is_alike = len({reports[rank].model for rank in finished}) == 1
    if kind.recovers and finished < all_ranks:
        return "did not go on"
    if finished == all_ranks:
        if kind.recovers or kind.may_recover:
            return "recovered" if is_alike else "silent divergence: apart"
        return ALIKE if is_alike else "silent divergence: apart"
    others = all_ranks - {culprit}
    # Those that are through are gone for the others, and must be alike.
    through = {culprit} & finished if kind.may_finish else set()
    if finished - through:
        return f"silent divergence: ranks {sorted(finished)} have finished"
    if through and not is_alike:
        return "silent divergence: apart"
    judged = others if not kind.survives else all_ranks
    if case.method.group == SHARDED:
        # All but the culprit's peers meet it in what FSDP sends, and it them.
        judged = others & set(range(culprit % SHARDS, case.method.ranks, SHARDS))
    for rank in sorted(judged - through):
        report = reports[rank]
        if report.error not in _KINDS_OF_ERRORS:
            return f"rank {rank} raised a bare {report.error}"
        if rank == culprit and report.error == "ValueError":
            continue  # its own arguments are wrong, and it knows its rank
        if not any(names(report.told, r) for r in (all_ranks if kind.names_anybody else {culprit})):
            return f"what rank {rank} was told does not name the culprit"
        if not re.search(kind.reason, report.told):
            return f"what rank {rank} was told does not tell the reason"
    return "refused"


def names(told: str, rank: int) -> bool:
    """Return whether a message names a rank.

    Example::

        >>> names("is 1 on ranks 0, 2, 8 on rank 1", 2)
        True
    """
    listed = re.findall(r"(?:rank|shard)s? (\d+(?:, \d+)*)", told)
    return any(str(rank) in numbers.split(", ") for numbers in listed)

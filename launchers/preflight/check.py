"""The preflight itself: everybody tells, links are measured, rank 0 judges, everybody hears it."""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from comm_hooks.launchers.links import make_rounds, nodes_of
from comm_hooks.launchers.preflight.facts import Facts
from comm_hooks.launchers.preflight.links import Link, Listener, send
from comm_hooks.launchers.preflight.meeting import Meeting, MeetingError, prefixed
from comm_hooks.launchers.preflight.problems import (
    find_link_problems,
    find_notes,
    find_problems,
    slow_links,
)

_ROUND_SECONDS = 30.0
_GLOO_SECONDS = 30.0
_MARGIN_SECONDS = 30.0
# What looks slow is measured again.
_STAGES = ("links", "again", "once more")
_ALL_PAIRS_UP_TO = 8


@dataclass(frozen=True)
class Limits:
    """What is accepted.

    Args:
        seconds: how long to wait for processes that have not come.
        measure: whether to measure links.
        bits_per_second: what each link must carry; None to compare links with each other only.
        clock: seconds by which clocks may differ.
    """

    seconds: float
    measure: bool
    bits_per_second: float | None
    clock: float


@dataclass
class Verdict:
    """What rank 0 found; the same on all ranks."""

    problems: list[str]
    notes: list[str] = field(default_factory=list)
    nodes: list[Facts] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)


def check(
    meeting: Meeting,
    facts: Facts,
    listener: Listener | None,
    limits: Limits,
    *,
    interface: str = "",
) -> Verdict:
    """Check all nodes together.

    1. every process tells its facts; rank 0 waits for all, and names those that do not come;
    2. the first process of each node measures links with those of other nodes, in rounds in which
       nobody is busy twice; what looks slow is measured again, up to two times;
    3. if nothing is wrong so far, all processes form a gloo group and sum a tensor, within 30 s;
    4. rank 0 tells the verdict.

    Args:
        meeting: of all processes.
        facts: of this one.
        listener: where this process is reached; None if it has no address.
        limits: what is accepted; those of rank 0 count.
        interface: what GLOO_SOCKET_IFNAME will be for training, if it is not set already.

    Raises:
        MeetingError: if rank 0 is gone.
    """
    meeting.tell("facts", facts.to_json())
    if meeting.rank == 0:
        verdict = _judge(meeting, listener, limits, interface)
        meeting.tell("verdict", asdict(verdict))
    else:
        verdict = _follow(meeting, listener, limits, interface)
    meeting.leave()
    return verdict


def _judge(meeting: Meeting, listener: Listener | None, limits: Limits, interface: str) -> Verdict:
    heard, missing = meeting.hear("facts", range(meeting.size), limits.seconds)
    facts = {rank: Facts.from_json(text) for rank, text in sorted(heard.items())}
    if missing:
        meeting.tell("plan", None)
        came = ", ".join(f"{rank} ({facts[rank].host})" for rank in list(facts)[:8])
        late = f"{meeting.member} {', '.join(map(str, missing[:8]))} of {meeting.size}"
        return Verdict([f"{late} did not come within {limits.seconds:g} s; here are: {came}"])
    leaders = [ranks[0] for ranks in nodes_of([facts[rank].node for rank in sorted(facts)])]
    nodes = [facts[rank] for rank in leaders]
    problems = find_problems(nodes)
    # What only one process of a node can know, such as that it is alone.
    others = [f for rank, f in facts.items() if rank not in leaders]
    problems += [
        f"{other.host}: {complaint}"
        for other in others
        for complaint in other.complaints
        if not any(complaint in problem for problem in problems)
    ]
    peers = [(rank, facts[rank].address, facts[rank].port) for rank in leaders]
    meeting.tell("plan", peers)
    usable = limits.measure and all(node.port for node in nodes)
    rounds = make_rounds(len(nodes), _ALL_PAIRS_UP_TO) if usable else []
    links: list[Link] = []
    for stage in _STAGES:
        links = _better(links, _measure(meeting, listener, peers, rounds, stage))
        doubted = slow_links(nodes, links, limits.bits_per_second)
        pairs = {(min(x.source, x.target), max(x.source, x.target)) for x in doubted}
        rounds = [[pair] for pair in sorted(pairs)]
    problems += find_link_problems(nodes, links, least=limits.bits_per_second, clock=limits.clock)
    meeting.tell("gloo", not problems)
    if not problems:
        problems += _check_gloo(meeting, facts, interface)
    return Verdict(problems, find_notes(nodes), nodes, links)


def _follow(meeting: Meeting, listener: Listener | None, limits: Limits, interface: str) -> Verdict:
    peers = _from_rank_0(meeting, "plan", limits.seconds + _MARGIN_SECONDS)
    if peers is not None:
        if any(rank == meeting.rank for rank, _, _ in peers):
            for stage in _STAGES:
                _measure(meeting, listener, peers, None, stage)
        # Others only wait: measuring takes up to a round's time for each of the rounds.
        patience = _MARGIN_SECONDS + 2 * len(peers) * _ROUND_SECONDS
        if _from_rank_0(meeting, "gloo", patience):
            _try_gloo(meeting, interface)
    told = _from_rank_0(meeting, "verdict", _GLOO_SECONDS + 2 * _MARGIN_SECONDS)
    return Verdict(
        told["problems"],
        told["notes"],
        [Facts(**node) for node in told["nodes"]],
        [Link(**link) for link in told["links"]],
    )


def _from_rank_0(meeting: Meeting, what: str, seconds: float) -> Any:
    heard, missing = meeting.hear(what, [0], seconds)
    if missing:
        raise MeetingError(f"{meeting.member} 0 has not answered for {seconds:g} s")
    return heard[0]


def _measure(
    meeting: Meeting,
    listener: Listener | None,
    peers: Sequence[tuple[int, str, int]],
    rounds: list[list[tuple[int, int]]] | None,
    stage: str,
) -> list[Link]:
    """Measure the links of some rounds; rank 0 says which, and gets all of them back."""
    if meeting.rank == 0:
        meeting.tell(stage, rounds)
    else:
        patience = _MARGIN_SECONDS + 2 * len(peers) * _ROUND_SECONDS
        rounds = _from_rank_0(meeting, stage, patience)
    ranks = [rank for rank, _, _ in peers]
    me = ranks.index(meeting.rank)
    found: list[Link] = []
    for number, pairs in enumerate(rounds or []):
        for low, high in pairs:
            if me in (low, high):
                for source, target in ((low, high), (high, low)):
                    link = Link(source, target)
                    if me == source:
                        found.append(send(link, *peers[target][1:]))
                    elif listener:
                        found.append(listener.receive(link))
        meeting.wait_for_all(f"{stage}/{number}", ranks, _ROUND_SECONDS)
    meeting.tell(f"{stage}-found", [asdict(link) for link in found])
    if meeting.rank:
        return []
    heard, _ = meeting.hear(f"{stage}-found", ranks, _ROUND_SECONDS)
    merged: dict[tuple[int, int], Link] = {}
    for rank, told in heard.items():
        for link in (Link(**fields) for fields in told):
            # The source has the figures; the target speaks for a source that is silent.
            if rank == ranks[link.source]:
                merged[link.source, link.target] = link
            elif link.error:
                merged.setdefault((link.source, link.target), link)
    return [merged[key] for key in sorted(merged)]


def _better(links: list[Link], again: list[Link]) -> list[Link]:
    """Return the links, with the better figures of those that were measured again."""
    found = {(link.source, link.target): link for link in links}
    for link in again:
        pair = link.source, link.target
        found[pair] = max(found.get(pair, link), link, key=lambda link: link.bits_per_second or 0.0)
    return list(found.values())


def _check_gloo(meeting: Meeting, facts: dict[int, Facts], interface: str) -> list[str]:
    """Try on rank 0 and hear from the others; return what went wrong."""
    _try_gloo(meeting, interface)
    heard, silent = meeting.hear("gloo-error", range(meeting.size), _GLOO_SECONDS + 10.0)
    for rank, reason in heard.items():
        if reason:
            where = f"first on rank {rank} ({facts[rank].host})"
            return [
                f"a gloo group of all ranks fails, {where}: {reason}: look at GLOO_SOCKET_IFNAME"
            ]
    return [f"a gloo group of all ranks hangs: nothing from ranks {silent[:8]}"] if silent else []


def _try_gloo(meeting: Meeting, interface: str) -> None:
    """Sum a tensor over all ranks, as training would, and tell what happened."""
    error = None
    told = "GLOO_SOCKET_IFNAME" in os.environ or not interface
    if not told:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    try:
        dist.init_process_group(
            "gloo",
            store=prefixed("gloo", meeting.store),
            rank=meeting.rank,
            world_size=meeting.size,
            timeout=timedelta(seconds=_GLOO_SECONDS),
        )
        try:
            total = torch.ones(1)
            dist.all_reduce(total)
            if total.item() != meeting.size:
                error = f"the sum of {meeting.size} ones is {total.item():g}"
        finally:
            dist.destroy_process_group()
    except RuntimeError as caught:
        error = str(caught).strip().splitlines()[0]
    finally:
        if not told:
            del os.environ["GLOO_SOCKET_IFNAME"]
    meeting.tell("gloo-error", error)

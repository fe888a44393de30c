"""The check of all nodes together: rank 0 collects their facts and sends its verdict to all."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from comm_hooks.launchers.preflight.facts import Facts
from comm_hooks.launchers.preflight.links import Link, Listener, make_rounds, send
from comm_hooks.launchers.preflight.meeting import Meeting
from comm_hooks.launchers.preflight.problems import find_link_problems, find_problems

_ROUND_SECONDS = 30.0
_GLOO_SECONDS = 30.0
_MARGIN_SECONDS = 30.0

Peers = Sequence[tuple[int, str, int]]
"""For each node (rank, address, port) of its first process."""


@dataclass
class Verdict:
    """The result of a check, the same on all ranks; each problem is one line of text."""

    problems: list[str]
    nodes: list[Facts] = field(default_factory=list)
    links: list[Link] = field(default_factory=list)


def check(
    meeting: Meeting,
    facts: Facts,
    listener: Listener | None,
    seconds: float,
    bits_per_second: float | None,
) -> Verdict:
    """Check all nodes together.

    1. every process sends its facts; rank 0 waits for all, and names the missing ones;
    2. the first process of each node measures links with those of two other nodes, in rounds in
       which a node is in one pair at most;
    3. without problems so far, all processes form a gloo group and sum a tensor, within 30 s;
    4. rank 0 sends the verdict.

    Args:
        meeting: the exchange of messages between all processes.
        facts: the facts about this process.
        listener: the TCP port of this process for measurements; None without an address.
        seconds: the longest time to wait for processes.
        bits_per_second: the rate that each link must carry, on rank 0; None to compare links only.

    Raises:
        MeetingError: if rank 0 has ended.
    """
    meeting.tell("facts", asdict(facts))
    if meeting.rank == 0:
        verdict = _judge(meeting, listener, seconds, bits_per_second)
        meeting.tell("verdict", asdict(verdict))
    else:
        verdict = _follow(meeting, listener, seconds)
    meeting.leave()
    return verdict


def _judge(
    meeting: Meeting, listener: Listener | None, seconds: float, bits_per_second: float | None
) -> Verdict:
    heard, missing = meeting.hear("facts", range(meeting.size), seconds)
    facts = {rank: Facts(**told) for rank, told in sorted(heard.items())}
    if missing:
        meeting.tell("peers", None)
        came = ", ".join(f"{rank} ({facts[rank].host})" for rank in list(facts)[:8])
        late = f"{meeting.member} {', '.join(map(str, missing[:8]))} of {meeting.size}"
        return Verdict([f"{late} did not come within {seconds:g} s; here are: {came}"])
    first: dict[str, int] = {}
    for rank, each in facts.items():
        first.setdefault(each.node, rank)
    leaders = list(first.values())
    nodes = [facts[rank] for rank in leaders]
    problems = find_problems(nodes)
    # Problems that other processes of a node found, such as that they are alone.
    problems += [
        f"{other.host}: {complaint}"
        for other in (f for rank, f in facts.items() if rank not in leaders)
        for complaint in other.complaints
        if not any(complaint in problem for problem in problems)
    ]
    measurable = all(node.port for node in nodes)
    peers = [(rank, facts[rank].address, facts[rank].port) for rank in leaders if measurable]
    meeting.tell("peers", peers)
    links = _measure(meeting, listener, peers)
    problems += find_link_problems(nodes, links, bits_per_second)
    meeting.tell("gloo", not problems)
    if not problems:
        problems += _check_gloo(meeting, facts)
    return Verdict(problems, nodes, links)


def _follow(meeting: Meeting, listener: Listener | None, seconds: float) -> Verdict:
    peers: Peers | None = meeting.hear_rank_0("peers", seconds + _MARGIN_SECONDS)
    if peers is not None:
        _measure(meeting, listener, peers)
        patience = _MARGIN_SECONDS + (1 + len(make_rounds(len(peers)))) * _ROUND_SECONDS
        if meeting.hear_rank_0("gloo", patience):
            _try_gloo(meeting)
    told = meeting.hear_rank_0("verdict", _GLOO_SECONDS + 2 * _MARGIN_SECONDS)
    return Verdict(
        told["problems"],
        [Facts(**node) for node in told["nodes"]],
        [Link(**link) for link in told["links"]],
    )


def _measure(meeting: Meeting, listener: Listener | None, peers: Peers) -> list[Link]:
    """Measure links between neighbouring nodes; return all on rank 0, and [] on other ranks."""
    ranks = [rank for rank, _, _ in peers]
    if meeting.rank not in ranks:
        return []
    own = ranks.index(meeting.rank)
    found: list[Link] = []
    for number, pairs in enumerate(make_rounds(len(peers))):
        for low, high in pairs:
            if own in (low, high):
                for source, target in ((low, high), (high, low)):
                    link = Link(source, target)
                    if own == source:
                        found.append(send(link, *peers[target][1:]))
                    elif listener:
                        found.append(listener.receive(link))
        # All go on together, and wait for a late one no longer than this.
        meeting.tell(f"links/{number}", True)
        meeting.hear(f"links/{number}", ranks, _ROUND_SECONDS)
    meeting.tell("links-found", [asdict(link) for link in found])
    if meeting.rank:
        return []
    heard, _ = meeting.hear("links-found", ranks, _ROUND_SECONDS)
    merged: dict[tuple[int, int], Link] = {}
    for rank, told in heard.items():
        for link in (Link(**fields) for fields in told):
            # The source has the figures; the target reports for a silent source.
            if rank == ranks[link.source]:
                merged[link.source, link.target] = link
            elif link.error:
                merged.setdefault((link.source, link.target), link)
    return [merged[key] for key in sorted(merged)]


def _check_gloo(meeting: Meeting, facts: dict[int, Facts]) -> list[str]:
    """Run :func:`_try_gloo` on rank 0, collect the ranks' errors, and return the first, or []."""
    _try_gloo(meeting)
    heard, silent = meeting.hear("gloo-error", range(meeting.size), _GLOO_SECONDS + 10.0)
    for rank, reason in heard.items():
        if reason:
            where = f"first on rank {rank} ({facts[rank].host})"
            return [
                f"a gloo group of all ranks fails, {where}: {reason}: look at GLOO_SOCKET_IFNAME"
            ]
    return [f"a gloo group of all ranks hangs: nothing from ranks {silent[:8]}"] if silent else []


def _try_gloo(meeting: Meeting) -> None:
    """Sum a tensor over all ranks by gloo, and send the error, or None, to all."""
    error = None
    try:
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore("gloo", meeting.store),  # type: ignore[attr-defined]
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
    meeting.tell("gloo-error", error)

"""What ``comm-hooks preflight`` does: find the other processes, check all nodes, say how it is."""

import os
import socket
from dataclasses import dataclass
from pathlib import Path

import typer

from comm_hooks.launchers.environment import (
    LauncherEnvironment,
    check_world_size,
    detect_environment,
)
from comm_hooks.launchers.launch.job import Job
from comm_hooks.launchers.launch.mpi import meeting_point
from comm_hooks.launchers.network import Endpoint, find_route, is_loopback, parse_endpoint
from comm_hooks.launchers.output import complain, refusing, require_positive
from comm_hooks.launchers.preflight.check import Limits, check
from comm_hooks.launchers.preflight.facts import (
    Facts,
    find_complaints,
    find_gpus,
    find_versions,
    gloo_address,
    read_config,
)
from comm_hooks.launchers.preflight.links import Listener
from comm_hooks.launchers.preflight.meeting import Meeting, meet, meet_alone
from comm_hooks.launchers.preflight.report import print_report

_FAILED = 1


def preflight(
    *,
    head: str | None,
    nnodes: int,
    node_rank: int | None,
    nproc: int | None,
    interface: str | None,
    config: Path | None,
    timeout: float,
    links: bool,
    min_bandwidth: float | None,
    max_clock_offset: float,
    local_rank: str | None,
) -> None:
    """Do what ``comm-hooks preflight --help`` says."""
    with refusing("comm-hooks preflight"):
        waits = {"--timeout": timeout, "--max-clock-offset": max_clock_offset}
        require_positive({**waits, "--min-bandwidth": min_bandwidth})
        endpoint = parse_endpoint(head) if head else None
        settings = read_config(config) if config else {}
        party = _find_party(endpoint, nnodes, node_rank, nproc)
    with refusing("comm-hooks preflight", _FAILED):
        facts, listener = _describe(party, interface, settings)
        meeting = _meet(party, facts, timeout)
        least = None if min_bandwidth is None else min_bandwidth * 1e6
        limits = Limits(timeout, links, least, max_clock_offset)
        # comm-hooks launch tells gloo which interface to use; torchrun by itself does not.
        as_launch = party.process.launcher != "torchrun"
        verdict = check(
            meeting, facts, listener, limits, interface=facts.interface if as_launch else ""
        )
        if listener:
            listener.close()
    if party.speaks or meeting.rank == 0:
        for line in verdict.problems:
            complain("comm-hooks preflight", line)
        for line in verdict.notes:
            complain("comm-hooks preflight", f"note: {line}")
    if verdict.problems:
        raise typer.Exit(_FAILED)
    if meeting.rank == 0:
        print_report(verdict.nodes, verdict.links, meeting.size)


@dataclass(frozen=True)
class _Party:
    """Who meets where.

    ``process`` is the launcher's, or no one's where nodes meet by hand; ``speaks`` says whether
    somebody looks at this process's output, and not only at that of rank 0.
    """

    endpoint: Endpoint | None
    rank: int | None
    size: int
    node: str | None
    processes: int | None
    process: LauncherEnvironment
    hosts: bool
    speaks: bool


def _find_party(
    head: Endpoint | None, nnodes: int, node_rank: int | None, nproc: int | None
) -> _Party:
    """Return who meets where: what the launcher says, or what the options do."""
    process = detect_environment(os.environ)
    # Refuses what cannot be, in the words of comm-hooks launch.
    Job((), processes=nproc, nodes=(nnodes, nnodes), node_rank=node_rank)
    if process.launcher is None or (nnodes > 1 and process.launcher == "srun"):
        if nnodes == 1:
            return _Party(None, 0, 1, "0", nproc, LauncherEnvironment(), hosts=True, speaks=True)
        if head is None:
            raise ValueError(f"--nnodes {nnodes} needs --head HOST[:PORT], the same on each node")
        node = None if node_rank is None else str(node_rank)
        hosts = node_rank == 0 if node_rank is not None else find_route(head.host).is_head
        # srun brings all output to one terminal.
        speaks = not process.launcher
        return _Party(
            head, node_rank, nnodes, node, nproc, LauncherEnvironment(), hosts=hosts, speaks=speaks
        )
    if nnodes != 1 or node_rank is not None:
        raise ValueError(
            f"--nnodes and --node-rank are for starting by hand: {process.launcher} started this "
            f"process as rank {process.rank} of {process.world_size}"
        )
    if process.launcher == "torchrun" and "MASTER_ADDR" in os.environ:
        port = int(os.environ.get("MASTER_PORT", Endpoint("").port))
        head = Endpoint(os.environ["MASTER_ADDR"], port)
    agent_hosts = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return _Party(
        meeting_point(head, process),
        process.rank,
        process.world_size,
        process.node,
        process.local_size if nproc is None else nproc,
        process,
        hosts=process.rank == 0 and not agent_hosts,
        # Each node's torchrun has a terminal of its own; others bring all output to one.
        speaks="GROUP_RANK" in os.environ and process.local_rank == 0,
    )


def _describe(
    party: _Party, interface: str | None, settings: dict[str, str]
) -> tuple[Facts, Listener | None]:
    """Return what this process tells, and where it listens."""
    complaints, notes = find_complaints(Path(), dict(os.environ)), []
    address = name = ""
    listener = None
    if party.endpoint:
        try:
            route = find_route(party.endpoint.host, interface)
            address, name = route.address, route.interface
            listener = Listener(address)
        except (ValueError, OSError) as error:
            complaints.append(str(error))
    if party.process.launcher:
        complaints += _alone(party.process)
        default = gloo_address(dict(os.environ))
        if default == "" or (default and is_loopback(default) and not is_loopback(address)):
            found = f"resolves to {default}" if default else "does not resolve"
            notes.append(
                f"the name {socket.gethostname()} {found}, so gloo needs GLOO_SOCKET_IFNAME="
                f"{name} (comm-hooks launch sets it)"
            )
    node = party.node if party.node is not None else address or socket.gethostname()
    facts = Facts(
        node=node,
        host=socket.gethostname(),
        address=address,
        interface=name,
        port=listener.port if listener else 0,
        processes=party.processes,
        versions=find_versions(),
        config=settings,
        gpus=find_gpus(),
        complaints=complaints,
        notes=notes,
    )
    return facts, listener


def _alone(process: LauncherEnvironment) -> list[str]:
    """Return a complaint if the training script would not find the other processes."""
    size = process.world_size
    if process.launcher != "torchrun":
        # RANK is not set: DeepSpeed asks mpi4py, as does anything made for MPI.
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError):
            return []
        size = MPI.COMM_WORLD.Get_size()
    try:
        check_world_size(size)
    except RuntimeError as error:
        return [str(error)]
    return []


def _meet(party: _Party, facts: Facts, seconds: float) -> Meeting:
    if party.endpoint is None:
        return meet_alone()
    return meet(
        party.endpoint,
        party.rank,
        party.size,
        hosts=party.hosts,
        seconds=seconds,
        member="rank" if party.process.launcher else "node",
        origin=f"{facts.address} ({facts.interface})" if facts.address else facts.host,
    )

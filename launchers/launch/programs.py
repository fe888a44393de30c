"""The command lines of torchrun, and of the script in a rank of mpirun."""

import os
import sys
from collections.abc import Mapping

from comm_hooks.launchers.environment import LauncherEnvironment
from comm_hooks.launchers.launch.job import Job
from comm_hooks.launchers.launch.steps import Command, options, program
from comm_hooks.launchers.network import (
    Endpoint,
    Route,
    find_route,
    loopback_interface,
    port_is_taken,
)

_TORCHRUN = ("torchrun", "torch.distributed.run")
_SHARE_NO_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def torchrun_here(job: Job) -> Command:
    """Return the torchrun command of a job on this machine only."""
    interface = None if "GLOO_SOCKET_IFNAME" in os.environ else loopback_interface()
    loopback = {"GLOO_SOCKET_IFNAME": interface} if interface else {}
    return _torchrun(job, ["--standalone"], loopback)


def torchrun_node(job: Job, head: Endpoint, route: Route, job_id: str) -> Command:
    """Return the torchrun command of this node, for a job on several nodes.

    With ``job.node_rank`` the rendezvous is static: nodes keep their order.  Without it is c10d,
    with two settings that torchrun would otherwise guess from the machine's name: whether this node
    hosts the store (if none does, all wait for ever), and the address at which the others find it
    (often 127.0.0.1).

    Args:
        job: the job.
        head: the endpoint of the rendezvous.
        route: the way from this machine to the head.
        job_id: the rendezvous id, the same on all nodes, different for jobs with one endpoint.
    """
    fewest, most = job.nodes
    arguments = ["--nnodes", f"{fewest}:{most}" if job.is_elastic else str(most)]
    if job.node_rank is not None:
        arguments += ["--node-rank", str(job.node_rank)]
        arguments += ["--master-addr", route.head, "--master-port", str(head.port)]
    else:
        # On one machine the second of two nodes finds the store of the first.
        hosts_store = route.is_head and not port_is_taken(route.head, head.port)
        arguments += ["--rdzv-backend", "c10d", "--rdzv-endpoint"]
        arguments += [str(Endpoint(route.head, head.port)), "--rdzv-id", job_id]
        arguments += ["--rdzv-conf", f"is_host={int(hosts_store)}", "--local-addr", route.address]
    return _torchrun(job, arguments, interfaces(job, route))


def _torchrun(job: Job, arguments: list[str], variables: Mapping[str, str]) -> Command:
    # torchrun (of PyTorch 2.13) keeps one store for all attempts: a rank that restarts before
    # another one reads the old address of that one there, and fails or waits for ever.  With this
    # variable the first rank makes a store for each attempt.
    restarts = (job.max_restarts or job.is_elastic) and _SHARE_NO_STORE not in os.environ
    own_stores = {_SHARE_NO_STORE: "1"} if restarts else {}
    counts = {"--nproc-per-node": job.nproc, "--max-restarts": job.max_restarts}
    words = (*program(*_TORCHRUN), *arguments, *options(counts), *job.words("-m"))
    return Command(words, {**variables, **own_stores, **job.variables})


def interfaces(job: Job, route: Route) -> dict[str, str]:
    """Return the variables that make gloo and NCCL use the route's interface.

    Variables of the environment stay unless ``--interface`` is given.

    Raises:
        ValueError: if GLOO_SOCKET_IFNAME is a loopback interface, and the head another machine.
    """
    given = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if not job.interface and given.startswith("lo") and given != route.interface:
        raise ValueError(
            f"GLOO_SOCKET_IFNAME is {given} here, which leads to no other node: unset it, or use "
            f"--interface {route.interface}"
        )
    return {n: route.interface for n in _INTERFACES if job.interface or n not in os.environ}


def rank_of_mpirun(job: Job, process: LauncherEnvironment) -> Command:
    """Return the command of the script in a rank of mpirun, with torch.distributed's variables.

    Raises:
        ValueError: if ranks are on several nodes and the job has no head.
    """
    endpoint = process.meeting_point(job.head)
    variables = process.variables(endpoint)
    if process.local_size < process.world_size:
        route = find_route(endpoint.host, job.interface)
        variables |= {"MASTER_ADDR": route.head, **interfaces(job, route)}
    return Command((sys.executable, *job.words("-m")), {**variables, **job.variables})

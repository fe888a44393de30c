"""The command line of torchrun, for one node or for this one of several."""

import os

from comm_hooks.launchers.launch.job import Job
from comm_hooks.launchers.launch.steps import Command, options, program
from comm_hooks.launchers.network import Endpoint, Route, loopback_interface, port_is_taken

_PROGRAM = ("torchrun", "torch.distributed.run")
_SHARE_NO_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def build_single_node(job: Job) -> Command:
    """Return the command for ranks on this machine only."""
    arguments = [*program(*_PROGRAM), "--standalone"]
    interface = None if "GLOO_SOCKET_IFNAME" in os.environ else loopback_interface()
    loopback = {"GLOO_SOCKET_IFNAME": interface} if interface else {}
    return Command((*arguments, *_rest(job)), {**loopback, **_own_stores(job), **job.variables})


def build_multi_node(job: Job, head: Endpoint, route: Route, job_id: str) -> Command:
    """Return the command for this node of several.

    With ``job.node_rank`` the rendezvous is static: nodes keep their order.  Without it is c10d,
    which is told two things that it would otherwise guess from the machine's name: whether this
    node hosts the store (if no node thinks so, all wait for ever), and under which address the
    others find it (else they may be sent to 127.0.0.1).

    Args:
        job: what to run.
        head: where nodes meet.
        route: how this machine gets there.
        job_id: the same on all nodes; tells jobs at one endpoint apart.
    """
    fewest, most = job.nodes
    nodes = f"{fewest}:{most}" if job.is_elastic else str(most)
    arguments = [*program(*_PROGRAM), "--nnodes", nodes]
    meeting = Endpoint(route.head, head.port)
    if job.node_rank is not None:
        arguments += ["--node-rank", str(job.node_rank)]
        arguments += ["--master-addr", route.head, "--master-port", str(head.port)]
    else:
        # Two nodes of a rehearsal may share one machine: the second finds the store there.
        hosts_store = route.is_head and not port_is_taken(route.head, head.port)
        arguments += ["--rdzv-backend", "c10d", "--rdzv-endpoint", str(meeting)]
        arguments += ["--rdzv-id", job_id, "--rdzv-conf", f"is_host={int(hosts_store)}"]
        arguments += ["--local-addr", route.address]
    variables = {**interfaces(job, route), **_own_stores(job), **job.variables}
    return Command((*arguments, *_rest(job)), variables)


def interfaces(job: Job, route: Route) -> dict[str, str]:
    """Return the variables that make gloo and NCCL use the route's interface.

    What the environment says already stays, unless ``--interface`` says otherwise.

    Raises:
        ValueError: if the environment keeps gloo to this machine, and the head is another one.
    """
    told = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if not job.interface and told.startswith("lo") and told != route.interface:
        raise ValueError(
            f"GLOO_SOCKET_IFNAME is {told} here, which leads to no other node: unset it, or use "
            f"--interface {route.interface}"
        )
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    return {n: route.interface for n in names if job.interface or n not in os.environ}


def _own_stores(job: Job) -> dict[str, str]:
    """Return the variable without which ranks that are started anew do not find each other.

    torchrun (of PyTorch 2.13) keeps one store for all attempts: a rank that is back before another
    reads there where the other one listened before, finds nobody, and fails or waits for ever.
    With this the first rank makes a store for each attempt.
    """
    if not (job.restarts or job.is_elastic) or _SHARE_NO_STORE in os.environ:
        return {}
    return {_SHARE_NO_STORE: "1"}


def _rest(job: Job) -> list[str]:
    counts = {"--nproc-per-node": job.processes, "--max-restarts": job.restarts}
    return [*options(counts), *job.words("-m")]

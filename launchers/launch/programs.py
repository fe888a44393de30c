"""The command lines of torchrun, of the deepspeed launcher and of mpirun."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from comm_hooks.launchers.environment import LauncherEnvironment
from comm_hooks.launchers.launch.job import Host, Job
from comm_hooks.launchers.launch.steps import Command, Step, WriteFile, options, program
from comm_hooks.launchers.network import (
    DEFAULT_PORT,
    Endpoint,
    Route,
    find_route,
    interface_address,
    loopback_interface,
    port_is_taken,
)

DEEPSPEED_ENVIRONMENT = Path("comm_hooks.deepspeed_env")
"""The file with the variables that the deepspeed launcher exports on all nodes."""

_TORCHRUN = ("torchrun", "torch.distributed.run")
_DEEPSPEED = ("deepspeed", "deepspeed.launcher.runner")
_SHARE_NO_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
# pdsh exports only variables that begin with MLFLOW, PYTHON, MV2, UCX and, with CUDA, NCCL.
_CARRIED = ("DS_ACCELERATOR", "OMP_NUM_THREADS", *_INTERFACES)
_UNSAFE = re.compile(r"[\"$`\\]")


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
        ValueError: if the environment keeps gloo to this machine, and the head is another one.
    """
    given = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if not job.interface and given.startswith("lo") and given != route.interface:
        raise ValueError(
            f"GLOO_SOCKET_IFNAME is {given} here, which leads to no other node: unset it, or use "
            f"--interface {route.interface}"
        )
    return {n: route.interface for n in _INTERFACES if job.interface or n not in os.environ}


def deepspeed_here(job: Job) -> list[Step]:
    """Return the deepspeed command of a job on this machine only."""
    return [Command(_deepspeed(job, {"--num_gpus": job.nproc}), job.variables)]


def deepspeed_node(job: Job, hostfile: Path, head: Endpoint, route: Route) -> list[Step]:
    """Return the deepspeed command of this node, for a job that is started by hand on each node."""
    values = {
        "--hostfile": hostfile,
        "--num_gpus": job.nproc,
        "--no_ssh": True,
        "--node_rank": str(job.node_rank),
        "--master_addr": route.head,
        "--master_port": head.port,
    }
    return [Command(_deepspeed(job, values), {**interfaces(job, route), **job.variables})]


def deepspeed_over_ssh(job: Job, hostfile: Path, hosts: list[Host]) -> list[Step]:
    """Return the deepspeed command that starts ranks on all hosts of the hostfile over ssh.

    Variables go into a file that the deepspeed launcher exports on all nodes, together with those
    of the user's own ``.deepspeed_env``, which that file replaces.

    Raises:
        ValueError: for a host without slots, and a value that the launcher would mangle.
    """
    for host in hosts:
        if host.slots is None:
            raise ValueError(
                f"--hostfile {hostfile}: deepspeed needs 'name slots=N' in each line, "
                f"{host.name} has no slots"
            )
    head = job.head
    values = {
        "--hostfile": hostfile,
        "--num_gpus": job.nproc,
        "--master_addr": head and head.host,
        "--master_port": head and head.port != DEFAULT_PORT and head.port,
    }
    arguments = _deepspeed(job, values)
    variables = {name: os.environ[name] for name in _CARRIED if name in os.environ}
    if job.interface:
        interface_address(job.interface)
        variables |= dict.fromkeys(_INTERFACES, job.interface)
    variables |= job.variables
    for name, value in variables.items():
        if _UNSAFE.search(value):
            raise ValueError(
                f"--env {name}: the deepspeed launcher cannot carry quotes, $, ` and \\ to other "
                f"nodes, got {value!r}"
            )
    if not variables:
        return [Command(arguments)]
    lines = (*_user_lines(), *(f"{name}={value}" for name, value in variables.items()))
    command = Command(arguments, {"DS_ENV_FILE": str(DEEPSPEED_ENVIRONMENT)})
    return [WriteFile(DEEPSPEED_ENVIRONMENT, lines), command]


def _deepspeed(job: Job, values: Mapping[str, object]) -> tuple[str, ...]:
    return (*program(*_DEEPSPEED), *options(values), *job.words("--module"))


def _user_lines() -> list[str]:
    """Return the lines of the user's ``.deepspeed_env`` files, which ours replaces."""
    name = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
    lines = []
    for path in (Path.home() / name, Path(name)):
        if path != DEEPSPEED_ENVIRONMENT and path.is_file():
            lines += [line.strip() for line in path.read_text().splitlines() if "=" in line]
    return lines


def mpirun(
    job: Job, family: str, hosts: list[Host], slots: list[int], target: tuple[str, ...]
) -> Command:
    """Return the mpirun command of a job.

    Args:
        job: the job, with the environment variables of the ranks.
        family: ``"mpich"`` (also Intel MPI, MVAPICH), ``"openmpi"``, or ``"mpirun"`` to detect it.
        hosts: the hosts, the head first; empty for this machine.
        slots: the number of ranks on each host, or on this machine.
        target: the command that every rank runs.

    Raises:
        ValueError: if there is no mpirun, or its family is not known.
    """
    places = ",".join(f"{h.name}:{count}" for h, count in zip(hosts, slots, strict=False))
    if (_mpi_family() if family == "mpirun" else family) == "openmpi":
        words = options({"-np": sum(slots), "--host": places})
        words += [w for n, v in job.variables.items() for w in ("-x", f"{n}={v}")]
    else:
        words = options({"-n": sum(slots), "-hosts": places})
        words += [w for n, v in job.variables.items() for w in ("-genv", n, v)]
    return Command(("mpirun", *words, *target))


def _mpi_family() -> str:
    if not shutil.which("mpirun"):
        raise ValueError("--launcher mpirun: there is no mpirun on PATH")
    answer = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=False)
    text = answer.stdout + answer.stderr
    if "Open MPI" in text or "OpenRTE" in text:
        return "openmpi"
    if "HYDRA" in text or "Intel(R) MPI" in text:
        return "mpich"
    raise ValueError(
        f"--launcher mpirun: cannot tell which MPI this is ({text.strip()[:60]!r}): use --launcher "
        "mpich or openmpi"
    )


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

"""Slurm: srun starts ``comm-hooks launch`` on each node, and each of them becomes torchrun."""

import os
from collections.abc import Mapping
from dataclasses import replace

from comm_hooks.launchers.environment import LauncherEnvironment, first_host
from comm_hooks.launchers.launch.job import Job
from comm_hooks.launchers.launch.steps import Command, comm_hooks, options
from comm_hooks.launchers.network import Endpoint

# Two jobs that share a node must not meet at one port.
_FIRST_PORT = 20000
_PORTS = 20000


def srun(job: Job, nodes: int) -> Command:
    """Return the srun command that starts ``comm-hooks launch`` on each node of this allocation."""
    arguments = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
    arguments.append("--kill-on-bad-exit=1")
    if "SLURM_CPUS_PER_TASK" in os.environ:
        arguments.append(f"--cpus-per-task={os.environ['SLURM_CPUS_PER_TASK']}")
    return Command((*arguments, *_launch(job), *job.words("--module")))


def task_of_srun(job: Job, process: LauncherEnvironment, environment: Mapping[str, str]) -> Job:
    """Return the job with the nodes, the node rank and the head that Slurm gives to a task.

    Raises:
        ValueError: if srun started several tasks on a node, each of which would start all ranks.
    """
    if process.local_size > 1:
        raise ValueError(
            f"srun started {process.local_size} tasks on this node, each of which would start "
            "torchrun: use srun --ntasks-per-node=1 and --nproc for the ranks of a node"
        )
    if process.world_size == 1:
        return replace(job, nodes=(1, 1), node_rank=None)
    head = job.head
    if head is None:
        port = _FIRST_PORT + int(environment.get("SLURM_JOB_ID", 0)) % _PORTS
        head = Endpoint(first_host(environment), port)
    node_rank = None if job.max_restarts else process.rank
    return replace(job, nodes=(process.world_size,) * 2, node_rank=node_rank, head=head)


def _launch(job: Job) -> list[str]:
    variables = [w for n, v in job.variables.items() for w in ("--env", f"{n}={v}")]
    values = {
        "--head": job.head,
        "--nproc": job.nproc,
        "--interface": job.interface,
        "--max-restarts": job.max_restarts,
        "--preflight": job.preflight,
    }
    return [*comm_hooks("launch"), *variables, *options(values)]

"""Slurm: the batch file, the srun of an allocation, and what a task of srun knows about its job."""

import os
import shlex
from collections.abc import Mapping
from dataclasses import replace

from comm_hooks.launchers.environment import LauncherEnvironment, first_host
from comm_hooks.launchers.launch.job import Job
from comm_hooks.launchers.launch.steps import Command, options, program
from comm_hooks.launchers.launch.submission import MARK, Submission
from comm_hooks.launchers.network import Endpoint

# Two jobs that share a node must not meet at one port.
_FIRST_PORT = 20000
_PORTS = 20000


def render_batch_file(job: Job, name: str, submission: Submission) -> str:
    """Return a batch file for sbatch.

    One task per node, which is ``comm-hooks launch``: it finds the interface of its own node and
    becomes torchrun, which starts the ranks.

    Raises:
        ValueError: without a number of processes or of cores, or with a range of nodes.
    """
    nodes, processes = job.fixed_size("--slurm")
    if submission.cpus is None:
        raise ValueError(
            "--slurm needs --cpus: cores per process (Slurm gives a task one core if not asked)"
        )
    requests = [
        f"job-name={name}",
        f"nodes={nodes}",
        "ntasks-per-node=1",
        f"cpus-per-task={submission.cpus * processes}",
        *([f"gpus-per-node={processes}"] if job.gpus else []),
        *submission.sbatch,
    ]
    exports = [f"export {name}={shlex.quote(value)}" for name, value in job.variables.items()]
    launch = shlex.join(_launch(replace(job, variables={}, head=None)))
    target = shlex.join(job.words("--module"))
    return "\n".join(
        [
            "#!/bin/bash",
            f"# {MARK}",
            *(f"#SBATCH --{request}" for request in requests),
            "set -euo pipefail",
            *exports,
            "",
            "# All nodes meet at the first one; the port differs between jobs that share a node.",
            'nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")',
            'head="${nodes%%[[:space:]]*}"',
            f'port="$(({_FIRST_PORT} + SLURM_JOB_ID % {_PORTS}))"',
            "",
            "# One task per node, which becomes torchrun; srun does not inherit --cpus-per-task.",
            'srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" \\',
            f'    {launch} --head "$head:$port" {target}',
            "",
        ]
    )


def build_srun(job: Job, nodes: int) -> Command:
    """Return the srun that starts ``comm-hooks launch`` on each node of this allocation."""
    arguments = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
    arguments.append("--kill-on-bad-exit=1")
    if "SLURM_CPUS_PER_TASK" in os.environ:
        arguments.append(f"--cpus-per-task={os.environ['SLURM_CPUS_PER_TASK']}")
    return Command((*arguments, *_launch(job), *job.words("--module")))


def fill_in(job: Job, process: LauncherEnvironment, environment: Mapping[str, str]) -> Job:
    """Return the job with what Slurm tells a task: how many nodes, which one this is, the head.

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
    node_rank = None if job.restarts else process.rank
    return replace(job, nodes=(process.world_size,) * 2, node_rank=node_rank, head=head)


def _launch(job: Job) -> list[str]:
    arguments = [*program("comm-hooks", "comm_hooks.launchers.main"), "launch"]
    for name, value in job.variables.items():
        arguments += ["--env", f"{name}={value}"]
    return arguments + options(
        {
            "--head": job.head,
            "--nproc": job.processes,
            "--interface": job.interface,
            "--max-restarts": job.restarts,
            "--preflight": job.check,
            "--config": job.config,
        }
    )

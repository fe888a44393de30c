"""Slurm and Kubernetes: the job files that they take, and the tasks of srun."""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from comm_hooks.launchers.environment import LauncherEnvironment, first_host
from comm_hooks.launchers.launch.job import Job
from comm_hooks.launchers.launch.steps import Command, comm_hooks, options
from comm_hooks.launchers.network import Endpoint

RUNTIME = "torch-distributed"
"""The name of the runtime that Kubeflow Trainer installs for PyTorch."""

_MARK = "Written by comm-hooks launch"
# Two jobs that share a node must not meet at one port.
_FIRST_PORT = 20000
_PORTS = 20000


@dataclass(frozen=True)
class Submission:
    """The options of ``comm-hooks launch`` about schedulers; ``--help`` describes each.

    Raises:
        ValueError: for options that would be ignored, and for invalid values.
    """

    slurm: Path | None = None
    kubernetes: Path | None = None
    name: str | None = None
    cpus: int | None = None
    cpu: bool = False
    sbatch: Sequence[str] = ()
    image: str | None = None
    runtime: str = RUNTIME

    def __post_init__(self) -> None:
        if self.slurm and self.kubernetes:
            raise ValueError("--slurm and --kubernetes: write one file at a time")
        if self.cpus is not None and self.cpus < 1:
            raise ValueError(f"--cpus must be at least 1, got {self.cpus}")
        if self.name is not None and job_name(self.name) != self.name:
            raise ValueError(
                f"--name {self.name}: needs lower-case letters, digits and '-', as in "
                f"{job_name(self.name)}"
            )
        for line in self.sbatch:
            if line.startswith("-") or not line.strip() or "\n" in line:
                raise ValueError(f"--sbatch {line!r}: write it without dashes, as time=01:00:00")
        for option, given, file in (
            ("--name", self.name is not None, self.file),
            ("--cpus", self.cpus is not None, self.file),
            ("--cpu", self.cpu, self.file),
            ("--sbatch", bool(self.sbatch), self.slurm),
            ("--image", self.image is not None, self.kubernetes),
            ("--runtime", self.runtime != RUNTIME, self.kubernetes),
        ):
            if given and not file:
                raise ValueError(
                    f"{option} would be ignored: it is about the file of --slurm or --kubernetes"
                )

    @property
    def file(self) -> Path | None:
        return self.slurm or self.kubernetes

    def render(self, job: Job) -> str:
        """Return the text of the job file: a batch file for sbatch, or a TrainJob as YAML.

        Raises:
            ValueError: without a number of processes, with a range of nodes, and for options
                without a counterpart in the scheduler.
        """
        option = "--slurm" if self.slurm else "--kubernetes"
        nodes = job.fixed_nodes(option)
        if job.nproc is None:
            raise ValueError(
                f"{option} needs --nproc: processes per node, each with a GPU unless --cpu"
            )
        render = self._batch_file if self.slurm else self._train_job
        return render(job, self.name or job_name(job.target[0]), nodes, job.nproc)

    def write(self, text: str) -> str:
        """Write the job file, and return the command that submits it.

        Raises:
            ValueError: if ``comm-hooks launch`` did not write the existing file, or the file cannot
                be written.
        """
        option, path = "--slurm" if self.slurm else "--kubernetes", self.file
        assert path
        try:
            if path.exists() and _MARK not in path.read_text(errors="replace"):
                raise ValueError(f"{option} {path}: exists and is not ours: give another name")
            path.write_text(text)
        except OSError as error:
            raise ValueError(f"{option} {path}: cannot write it ({error.strerror})") from None
        return f"sbatch {path}" if self.slurm else f"kubectl create -f {path}"

    def _batch_file(self, job: Job, name: str, nodes: int, nproc: int) -> str:
        """Return a batch file with one task per node: ``comm-hooks launch``, to run torchrun."""
        if self.cpus is None:
            raise ValueError(
                "--slurm needs --cpus: cores per process (Slurm gives a task one core if not asked)"
            )
        requests = [
            f"job-name={name}",
            f"nodes={nodes}",
            "ntasks-per-node=1",
            f"cpus-per-task={self.cpus * nproc}",
            *([] if self.cpu else [f"gpus-per-node={nproc}"]),
            *self.sbatch,
        ]
        exports = [f"export {name}={shlex.quote(value)}" for name, value in job.variables.items()]
        launch = shlex.join(_launch(replace(job, variables={}, head=None)))
        target = shlex.join(job.words("--module"))
        return "\n".join(
            [
                "#!/bin/bash",
                f"# {_MARK}",
                *(f"#SBATCH --{request}" for request in requests),
                "set -euo pipefail",
                *exports,
                "",
                "# All nodes meet at the first one; the port differs between jobs on a node.",
                'nodes=$(scontrol show hostnames "$SLURM_JOB_NODELIST")',
                'head="${nodes%%[[:space:]]*}"',
                f'port="$(({_FIRST_PORT} + SLURM_JOB_ID % {_PORTS}))"',
                "",
                "# One task per node, which becomes torchrun; srun does not inherit its cores.",
                'srun --kill-on-bad-exit=1 --cpus-per-task="$SLURM_CPUS_PER_TASK" \\',
                f'    {launch} --head "$head:$port" {target}',
                "",
            ]
        )

    def _train_job(self, job: Job, name: str, nodes: int, nproc: int) -> str:
        """Return a TrainJob of Kubeflow Trainer v2, which sets the rendezvous of torchrun."""
        import yaml

        for option, value in (("--head", job.head), ("--interface", job.interface)):
            if value is not None:
                raise ValueError(
                    f"{option} does not go with --kubernetes: the runtime decides that"
                )
        if job.max_restarts:
            raise ValueError(
                "--max-restarts does not go with --kubernetes: its runtime fixes the order of "
                "nodes, and torchrun's ranks then do not find each other again; let the job start "
                "anew, from a checkpoint"
            )
        command = ["torchrun", *job.words("-m")]
        if job.preflight:
            config = options({"--config": job.config})
            first = ["torchrun", "-m", "comm_hooks.launchers.preflight", *config]
            command = ["sh", "-c", f"{shlex.join(first)} && exec {shlex.join(command)}"]
        resources: dict[str, Any] = {}
        if self.cpus is not None:
            resources["requests"] = {"cpu": str(self.cpus * nproc)}
        if not self.cpu:
            resources["limits"] = {"nvidia.com/gpu": nproc}
        trainer = {
            "image": self.image,
            "numNodes": nodes,
            "numProcPerNode": nproc,
            "command": command,
            "env": [{"name": k, "value": v} for k, v in job.variables.items()],
            "resourcesPerNode": resources,
        }
        group = "trainer.kubeflow.org"
        runtime = {
            "apiGroup": group,
            "kind": "ClusterTrainingRuntime",
            "name": self.runtime,
        }
        document = {
            "apiVersion": f"{group}/v1alpha1",
            "kind": "TrainJob",
            "metadata": {"name": name},
            "spec": {
                "runtimeRef": runtime,
                "trainer": {key: value for key, value in trainer.items() if value},
            },
        }
        return f"# {_MARK}\n{yaml.safe_dump(document, sort_keys=False)}"


def job_name(target: str) -> str:
    """Return a job name for a script that schedulers accept: a DNS label.

    Example::

        >>> job_name("experiments/train_GPT.py")
        'train-gpt'
    """
    stem = Path(target).stem if target.endswith(".py") else target.rsplit(".", 1)[-1]
    name = re.sub(r"[^a-z0-9-]+", "-", stem.lower()).strip("-")
    return name[:40].rstrip("-") if name[:1].isalpha() else f"job-{name}"[:40].rstrip("-")


def srun(job: Job, nodes: int) -> Command:
    """Return the srun command that runs ``comm-hooks launch`` on each node of this allocation."""
    arguments = ["srun", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]
    arguments.append("--kill-on-bad-exit=1")
    if "SLURM_CPUS_PER_TASK" in os.environ:
        arguments.append(f"--cpus-per-task={os.environ['SLURM_CPUS_PER_TASK']}")
    return Command((*arguments, *_launch(job), *job.words("--module")))


def task_of_srun(job: Job, process: LauncherEnvironment, environment: Mapping[str, str]) -> Job:
    """Return the job with the nodes, the node rank and the head from a task's Slurm variables.

    Raises:
        ValueError: if srun started several tasks on a node: each would start all of its ranks.
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
        "--config": job.config,
    }
    return [*comm_hooks("launch"), *variables, *options(values)]

"""Kubernetes: a TrainJob for Kubeflow Trainer v2, which runs torchrun in a pod per node."""

import shlex
from typing import Any

import yaml

from comm_hooks.launchers.launch.job import MARK, Job
from comm_hooks.launchers.launch.steps import options

RUNTIME = "torch-distributed"
"""The runtime that Kubeflow Trainer installs for PyTorch."""


def render_train_job(
    job: Job, name: str, image: str | None, cpus: int | None, runtime: str, check: bool
) -> str:
    """Return a TrainJob as YAML.

    The runtime tells torchrun by ``PET_*`` variables how many nodes there are, which one it is and
    where they meet, so the command only names the script.

    Args:
        job: with ``processes`` and a fixed number of nodes.
        name: of the TrainJob.
        image: with the script and comm-hooks in it; None for the runtime's own.
        cpus: cores for each process; None to request none.
        runtime: the ClusterTrainingRuntime.
        check: whether to run the preflight in all pods first.

    Raises:
        ValueError: without a number of processes, with a range of nodes, and for what a TrainJob
            cannot say.
    """
    nodes = job.fixed_nodes("--kubernetes")
    for option, value in (("--head", job.head), ("--interface", job.interface)):
        if value is not None:
            raise ValueError(f"{option} does not go with --kubernetes: the runtime decides that")
    if job.processes is None:
        raise ValueError(
            "--kubernetes needs --nproc: processes per node, each with a GPU unless --cpu"
        )
    if job.restarts:
        raise ValueError(
            "--max-restarts does not go with --kubernetes: its runtime fixes the order of nodes, "
            "and torchrun's ranks then do not find each other again; let the job start anew, from "
            "a checkpoint"
        )
    resources: dict[str, Any] = {}
    if cpus is not None:
        resources["requests"] = {"cpu": str(cpus * job.processes)}
    if job.gpus:
        resources["limits"] = {"nvidia.com/gpu": job.processes}
    trainer: dict[str, Any] = {
        **({"image": image} if image else {}),
        "numNodes": nodes,
        "numProcPerNode": job.processes,
        "command": _command(job, check),
    }
    if job.variables:
        trainer["env"] = [{"name": k, "value": v} for k, v in job.variables.items()]
    if resources:
        trainer["resourcesPerNode"] = resources
    document = {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": name},
        "spec": {
            "runtimeRef": {
                "apiGroup": "trainer.kubeflow.org",
                "kind": "ClusterTrainingRuntime",
                "name": runtime,
            },
            "trainer": trainer,
        },
    }
    return f"# {MARK}\n{yaml.safe_dump(document, sort_keys=False)}"


def _command(job: Job, check: bool) -> list[str]:
    train = ["torchrun", *job.words("-m")]
    if not check:
        return train
    config = options({"--config": job.config})
    first = ["torchrun", "-m", "comm_hooks.launchers.preflight", *config]
    return ["sh", "-c", f"{shlex.join(first)} && exec {shlex.join(train)}"]

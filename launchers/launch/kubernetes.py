"""Kubernetes: a TrainJob for Kubeflow Trainer v2, which runs torchrun in a pod per node."""

import shlex
from typing import Any

import yaml

from comm_hooks.launchers.launch.job import Job
from comm_hooks.launchers.launch.steps import options
from comm_hooks.launchers.launch.submission import MARK, Submission


def render_train_job(job: Job, name: str, submission: Submission) -> str:
    """Return a TrainJob as YAML.

    The runtime tells torchrun by ``PET_*`` variables how many nodes there are, which one it is and
    where they meet, so the command only names the script.

    Raises:
        ValueError: without a number of processes, with a range of nodes, and for what a TrainJob
            cannot say.
    """
    nodes, processes = job.fixed_size("--kubernetes")
    for option, value in (("--head", job.head), ("--interface", job.interface)):
        if value is not None:
            raise ValueError(f"{option} does not go with --kubernetes: the runtime decides that")
    if job.restarts:
        raise ValueError(
            "--max-restarts does not go with --kubernetes: its runtime fixes the order of nodes, "
            "and torchrun's ranks then do not find each other again; let the job start anew, from "
            "a checkpoint"
        )
    resources: dict[str, Any] = {}
    if submission.cpus is not None:
        resources["requests"] = {"cpu": str(submission.cpus * processes)}
    if job.gpus:
        resources["limits"] = {"nvidia.com/gpu": processes}
    trainer: dict[str, Any] = {
        **({"image": submission.image} if submission.image else {}),
        "numNodes": nodes,
        "numProcPerNode": processes,
        "command": _command(job),
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
                "name": submission.runtime,
            },
            "trainer": trainer,
        },
    }
    return f"# {MARK}\n{yaml.safe_dump(document, sort_keys=False)}"


def _command(job: Job) -> list[str]:
    train = ["torchrun", *job.words("-m")]
    if not job.check:
        return train
    config = options({"--config": job.config})
    first = ["torchrun", "-m", "comm_hooks.launchers.preflight", *config]
    return ["sh", "-c", f"{shlex.join(first)} && exec {shlex.join(train)}"]

"""What the options say about a file for a scheduler."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

RUNTIME = "torch-distributed"
"""The runtime that Kubeflow Trainer installs for PyTorch."""

MARK = "Written by comm-hooks launch"
"""What a file of ours says, so that none of somebody else's is written over."""

_FORBIDDEN = re.compile(r"[^a-z0-9-]+")


@dataclass(frozen=True)
class Submission:
    """The options of ``comm-hooks launch`` that are about schedulers.

    Args:
        slurm, kubernetes: the file to write.
        name: of the job; by default made of the script's.
        cpus: cores for each process.
        cpu: whether to ask for no GPUs.
        sbatch: more for sbatch, each without its dashes, such as ``"time=01:00:00"``.
        image: with the script and comm-hooks in it; None for the runtime's own.
        runtime: the ClusterTrainingRuntime.

    Raises:
        ValueError: for options that would be ignored, or cannot be.
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
        for option, given, home in (
            ("--name", self.name is not None, self.slurm or self.kubernetes),
            ("--cpus", self.cpus is not None, self.slurm or self.kubernetes),
            ("--cpu", self.cpu, self.slurm or self.kubernetes),
            ("--sbatch", bool(self.sbatch), self.slurm),
            ("--image", self.image is not None, self.kubernetes),
            ("--runtime", self.runtime != RUNTIME, self.kubernetes),
        ):
            if given and not home:
                raise ValueError(
                    f"{option} would be ignored: it is about the file of --slurm or --kubernetes"
                )

    @property
    def wanted(self) -> bool:
        return bool(self.slurm or self.kubernetes)

    def write(self, text: str) -> str:
        """Write the file, over an older one of ours, and return the command that submits it.

        Raises:
            ValueError: if something else is there, or nothing can be written.
        """
        option, path = ("--slurm", self.slurm) if self.slurm else ("--kubernetes", self.kubernetes)
        assert path
        try:
            if path.exists() and MARK not in path.read_text(errors="replace"):
                raise ValueError(f"{option} {path}: exists and is not ours: give another name")
            path.write_text(text)
        except OSError as error:
            raise ValueError(f"{option} {path}: cannot write it ({error.strerror})") from None
        return f"sbatch {path}" if self.slurm else f"kubectl create -f {path}"


def job_name(target: str) -> str:
    """Return a name for a job that schedulers accept: a DNS label, made of the script's name.

    Example::

        >>> job_name("experiments/train_GPT.py")
        'train-gpt'
    """
    stem = Path(target).stem if target.endswith(".py") else target.rsplit(".", 1)[-1]
    name = _FORBIDDEN.sub("-", stem.lower()).strip("-")
    return name[:40].rstrip("-") if name[:1].isalpha() else f"job-{name}"[:40].rstrip("-")

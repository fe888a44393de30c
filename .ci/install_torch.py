"""Install PyTorch into the running environment without pulling in CUDA where there is no GPU.

    python .ci/install_torch.py [requirement]

1. a torch that is there already and satisfies ``torch>=2.6`` is kept;
2. with an NVIDIA driver on the machine, pip installs what it finds;
3. without one, pip is first asked what it would install.  If that is a CPU build it is installed;
   if it comes with gigabytes of CUDA packages nothing is, and the message says how to go on.
"""

import importlib.metadata
import json
import shutil
import subprocess
import sys

DEFAULT = "torch==2.13.0"
OLDEST = (2, 6)


def installed_version() -> tuple[int, ...] | None:
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None
    return tuple(int(part) for part in version.split("+")[0].split(".")[:2])


def cuda_packages(requirement: str) -> list[str]:
    """Return the CUDA packages that pip would install for ``requirement``."""
    report = subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--dry-run",
            "--report",
            "-",
            requirement,
        ],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    names = [item["metadata"]["name"].lower() for item in json.loads(report)["install"]]
    return sorted(name for name in names if name.startswith(("nvidia-", "cuda-", "triton")))


def main() -> int:
    requirement = sys.argv[1] if len(sys.argv) > 1 else DEFAULT
    version = installed_version()
    if version is not None and version >= OLDEST:
        return 0
    if not shutil.which("nvidia-smi"):
        unwanted = cuda_packages(requirement)
        if unwanted:
            print(
                f"install_torch: this machine has no NVIDIA driver, but pip would install "
                f"{requirement} with {len(unwanted)} CUDA packages ({', '.join(unwanted[:3])}, "
                f"...: gigabytes). Point pip at PyTorch's index of CPU builds (PIP_EXTRA_INDEX_URL "
                f"and TORCH=torch==2.13.0+cpu; the address is on pytorch.org under 'Get started'), "
                f"or install torch into .venv yourself, and run make again.",
                file=sys.stderr,
            )
            return 2
    return subprocess.run(
        [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", requirement]
    ).returncode


if __name__ == "__main__":
    sys.exit(main())

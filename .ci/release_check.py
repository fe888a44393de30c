"""Build what would be published, install it where nothing else is, and train with it.

    python .ci/release_check.py [requirement for torch]        # make release-check

1. the source archive, and the wheel from it, into ``dist/``; ``twine check --strict``;
2. for each of the two a virtual environment with torch, numpy and that file alone:
   the core imports, its version is right, pip installed torch, numpy and nothing of an extra, the
   laboratory is not there, and ``comm-hooks`` names the extra that it needs;
3. two ranks train ``examples/ddp.py`` there, outside the repository, and say how many times fewer
   bytes they sent;
4. with the extra ``launch``: ``comm-hooks --help`` answers, in less than a second.
"""

import re
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DIST = ROOT / "dist"
# What only extras bring.
EXTRAS = ("accelerate", "deepspeed", "lightning", "matplotlib", "opacus", "psutil", "typer")
HELP_SECONDS = 1.0


def run(*command: object, **options: object) -> str:
    """Return what a command prints, or stop with what it printed."""
    done = subprocess.run(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        **options,  # type: ignore[call-overload]
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))}\n{done.stdout}")
    return str(done.stdout)


def build() -> list[Path]:
    """Return the wheel and the source archive."""
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "build", "--outdir", DIST, ROOT)
    files = sorted(DIST.iterdir())
    run(sys.executable, "-m", "twine", "check", "--strict", *files)
    return files


def check(file: Path, torch: str, folder: Path) -> str:
    """Return what two ranks said that trained with a file in an environment of its own."""
    environment = folder / "environment"
    venv.create(environment, with_pip=True)
    python = environment / "bin/python"
    run(python, ROOT / ".ci/install_torch.py", torch)
    run(python, "-m", "pip", "install", "--quiet", file)

    version = file.name.removesuffix(".tar.gz").split("-")[1]
    printed = "import comm_hooks; print(comm_hooks.__version__, comm_hooks.__file__)"
    found, place = run(python, "-c", printed, cwd=folder).split()
    if found != version or not Path(place).is_relative_to(environment):
        sys.exit(f"{file.name}: version {found} from {place}")
    listed = run(python, "-m", "pip", "list", "--format=freeze")
    if more := [name for name in EXTRAS if re.search(rf"^{name}=", listed, re.MULTILINE)]:
        sys.exit(f"{file.name}: the core brings {', '.join(more)}")
    absent = "import importlib.util; assert not importlib.util.find_spec('benchmarks')"
    run(python, "-c", absent, cwd=folder)
    without = subprocess.run([environment / "bin/comm-hooks"], capture_output=True, text=True)
    if without.returncode != 2 or "comm-hooks[launch]" not in without.stderr:
        sys.exit(f"{file.name}: comm-hooks without its extra: {without.stderr}")

    shutil.copytree(ROOT / "examples", folder / "examples")
    ranks = ["--standalone", "--nproc-per-node", 2]
    script = ["examples/ddp.py", "--steps", 8]
    output = run(environment / "bin/torchrun", *ranks, *script, cwd=folder, timeout=600)
    result = re.search(r"low_communication: .* times fewer bytes", output)
    if not result:
        sys.exit(output)

    run(python, "-m", "pip", "install", "--quiet", f"{file}[launch]")
    command = environment / "bin/comm-hooks"
    run(command, "--help", cwd=folder)
    start = time.perf_counter()
    run(command, "--help", cwd=folder)
    if (seconds := time.perf_counter() - start) > HELP_SECONDS:
        sys.exit(f"{file.name}: comm-hooks --help takes {seconds:.1f} s")
    return f"{result[0]}; --help in {seconds:.1f} s"


def main() -> None:
    torch = sys.argv[1] if len(sys.argv) > 1 else "torch==2.13.0"
    for file in build():
        with tempfile.TemporaryDirectory() as folder:
            print(f"{file.name}: {check(file, torch, Path(folder))}", flush=True)


if __name__ == "__main__":
    main()

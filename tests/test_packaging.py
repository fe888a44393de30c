"""What is distributed: one version everywhere, and a source archive that has all it takes."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import comm_hooks

ROOT = Path(__file__).parents[1]

_BUILD = "from setuptools import build_meta; build_meta.build_sdist('out')"
# Links of the repository, which arrive as folders.
_LINKED = re.compile(r"^(optim|launchers)/")
_NOT_DISTRIBUTED = {".gitignore", "comm_hooks/optim", "comm_hooks/launchers"}


@pytest.fixture(scope="module")
def tracked() -> list[str]:
    if not shutil.which("git") or not (ROOT / ".git").exists():
        pytest.skip("this is no checkout")
    listed = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    # Without what was deleted and not committed yet.
    return [name for name in listed.stdout.splitlines() if (ROOT / name).exists()]


@pytest.fixture(scope="module")
def unpacked(tracked: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source archive of a clean copy of the repository, unpacked."""
    pytest.importorskip("setuptools")
    folder = tmp_path_factory.mktemp("sdist")
    for name in tracked:
        target = folder / "checkout" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, target, follow_symlinks=False)
    environment = {name: v for name, v in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", _BUILD]
    subprocess.run(
        command, cwd=folder / "checkout", env=environment, check=True, capture_output=True
    )
    (archive,) = (folder / "checkout" / "out").iterdir()
    assert archive.name == f"comm_hooks-{comm_hooks.__version__}.tar.gz"
    shutil.unpack_archive(archive, folder)
    return folder / archive.name.removesuffix(".tar.gz")


def test_the_version_is_the_same_everywhere() -> None:
    version = comm_hooks.__version__
    assert re.fullmatch(r"\d+\.\d+\.\d+", version)
    assert f"\n## [{version}] - " in (ROOT / "CHANGELOG.md").read_text()
    assert "\nversion = attr: comm_hooks.__version__\n" in (ROOT / "setup.cfg").read_text()


def test_the_source_archive_has_the_whole_repository(tracked: list[str], unpacked: Path) -> None:
    assert f"\nVersion: {comm_hooks.__version__}\n" in (unpacked / "PKG-INFO").read_text()
    expected = {_LINKED.sub(r"comm_hooks/\1/", name) for name in tracked} - _NOT_DISTRIBUTED
    missing = [name for name in sorted(expected) if not (unpacked / name).is_file()]
    assert not missing


@pytest.mark.slow
def test_tests_run_where_the_source_archive_is_unpacked(unpacked: Path) -> None:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "tests/test_config.py",
            "tests/docs/test_troubleshooting.py",
        ],
        cwd=unpacked,
        env={**os.environ, "PYTHONPATH": str(unpacked)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout

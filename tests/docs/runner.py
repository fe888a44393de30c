"""How the blocks of a page are executed."""

import ast
import contextlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from comm_hooks.optim.private import DPOptimizer
from tests.docs.pages import Block, Page

TIMEOUT_SECONDS = 300
_GRACE_SECONDS = 10
# In which forked ranks write where they hang.
_LAST_WORDS_SECONDS = 3
# DeepSpeed compiles an extension that gloo does not use, for a minute, and if that is interrupted
# it hangs ever after.
_WITHOUT_COMPILER = Path(__file__).parents[1] / "frameworks/deepspeed/without_compiler"
_MARK = "COMM_HOOKS_DOCS_RUN"

# What a page may need that the core does not; where it is missing the page is skipped.
_PACKAGES = {
    "accelerate",
    "deepspeed",
    "lightning",
    "mpi4py",
    "pytorch_lightning",
    "tensorboard",
    "transformers",
    "wandb",
}
_COMMANDS = {"accelerate", "deepspeed", "mpiexec", "mpirun"}


def missing_tools(page: Page) -> list[str]:
    """Return the optional packages and commands that a page needs and that are not there."""
    packages: set[str] = set()
    commands: set[str] = set()
    for block in page.blocks:
        if block.language == "python":
            for node in ast.walk(ast.parse(block.text)):
                names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                names += [a.name for a in node.names] if isinstance(node, ast.Import) else []
                # comm_hooks.frameworks.deepspeed needs deepspeed.
                packages |= {part for name in names for part in name.split(".")} & _PACKAGES
        elif block.is_run:
            commands |= set(re.findall(r"^\s*([\w-]+)", block.text, flags=re.M)) & _COMMANDS
    path = environment()["PATH"]
    return sorted(
        {name for name in packages if importlib.util.find_spec(name) is None}
        | {name for name in commands if shutil.which(name, path=path) is None}
    )


def environment() -> dict[str, str]:
    """Return the environment of commands: this Python first on PATH, no GPU, no network."""
    unreachable = "http://127.0.0.1:9"
    return {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",
        "MPLBACKEND": "Agg",
        "OMP_NUM_THREADS": "1",
        "PIP_NO_INDEX": "1",
        "PYTHONWARNINGS": "",
        "http_proxy": unreachable,
        "https_proxy": unreachable,
        "no_proxy": "localhost,127.0.0.1",
    }


def run_commands(
    block: Block, folder: Path, timeout: float = TIMEOUT_SECONDS, *, tools: Path | None = None
) -> None:
    """Execute a block of commands in a folder, and leave no process behind.

    Args:
        tools: a folder whose commands go before others, unless DeepSpeed is used.

    Raises:
        AssertionError: with the output, if a command fails or takes too long.
    """
    mark = uuid.uuid4().hex
    files = [file.read_text() for file in folder.rglob("*.py")]
    uses_deepspeed = any("deepspeed" in text for text in [block.text, *files])
    variables = environment()
    if uses_deepspeed:
        variables["PYTHONPATH"] = str(_WITHOUT_COMPILER)
    elif tools is not None:
        variables["PATH"] = f"{tools}{os.pathsep}{variables['PATH']}"
    if "python -m benchmarks." in block.text:
        # As in the root of a clone.  Opacus installs a package of this name, too.
        variables["PYTHONPATH"] = str(Path(__file__).parents[2])
    log = folder / ".output"
    with log.open("wb") as output:
        shell = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", block.text],
            cwd=folder,
            env={**variables, _MARK: mark},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | None = shell.wait(timeout)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(mark)
        if status is None:
            time.sleep(_LAST_WORDS_SECONDS)
    told = log.read_text(errors="replace")[-9000:]
    assert status is not None, f"still running after {timeout:g} s:\n{block.text}\n{told}"
    assert status == 0, f"exit status {status}:\n{block.text}\n{told}"


def run_code(blocks: Sequence[Block], page: str, folder: str) -> None:
    """Execute code blocks one after the other, in a process that is rank 0 of one.

    A model takes one hook: where it has one and a block registers another, ``model`` and
    ``ddp_model`` are made anew.  What a block has set up is tried afterwards, since hooks and
    optimizers do most of what they do when they are used.
    """
    names: dict[str, Any] = {
        "__name__": "__main__",
        "torch": torch,
        "DistributedDataParallel": DistributedDataParallel,
        "rank": 0,
    }
    _make_models(names)
    with _inside(folder):
        for block in blocks:
            registers = re.search(r"\bregister(_comm_hook)?\(", block.text) is not None
            if registers and names["ddp_model"]._comm_hooks:
                _make_models(names)
            optimizer = names.get("optimizer")
            # Empty lines before it give the code the line numbers of the page.
            exec(compile("\n" * (block.line - 1) + block.text, page, "exec"), names)
            if registers:
                names["ddp_model"](torch.ones(2, 64)).square().sum().backward()
            made = names.get("optimizer")
            # A private one takes a step for every drawn batch only, and pages show those.
            if made is not optimizer and not isinstance(made, DPOptimizer):
                made.step()


def _make_models(names: dict[str, Any]) -> None:
    names["model"] = nn.Linear(64, 64)
    names["ddp_model"] = DistributedDataParallel(names["model"])


@contextlib.contextmanager
def _inside(folder: str) -> Iterator[None]:
    before = os.getcwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _end(mark: str) -> None:
    """End all processes with this mark in their environment: launchers first, then the rest."""
    for attempt in (signal.SIGTERM, signal.SIGKILL):
        alive = [process for process in psutil.process_iter() if _has(process, mark)]
        for process in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(attempt)
        psutil.wait_procs(alive, timeout=_GRACE_SECONDS)


def _has(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(_MARK) == mark
    except psutil.Error:  # gone, somebody else's, or a zombie
        return False

"""What the interpreter cannot tell: that the compiler takes the kernels, and who imports Triton."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from comm_hooks.kernels.triton import available
from tests.kernels.triton.processes import process


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_kernels_compile(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    with process(TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path)) as run:
        compiled = run("tests.kernels.triton.compiling", "compile_all", 90)
    assert set(compiled) == {
        "_add_gaussian",
        "_transform",
        "_sketch",
        "_unsketch",
        "_encode",
        "_multiply",
        "_decode",
        "_select",
        "_scatter_sum",
    }


@pytest.mark.slow
def test_triton_is_imported_only_where_it_is_used() -> None:
    code = "import sys, comm_hooks.kernels.triton; sys.exit('triton' in sys.modules)"
    assert not subprocess.run([sys.executable, "-c", code], check=False).returncode


def test_not_available_on_the_cpu() -> None:
    assert not available(torch.ones(1, 8))

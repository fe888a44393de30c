"""The documentation site is built without a warning: every reference and directive is right."""

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.pages import ROOT
from tests.docs.runner import environment

_NEEDED = ("sphinx", "myst_parser", "furo")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, _NEEDED)), reason=f"needs {', '.join(_NEEDED)}"
)
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    # A copy, because the pages of the reference are generated beside the others.
    source = shutil.copytree(
        ROOT / "docs", tmp_path / "docs", ignore=shutil.ignore_patterns("_build", "generated")
    )
    done = subprocess.run(
        [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", source, tmp_path / "site"],
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stdout
    exchange = tmp_path / "site/reference/generated/comm_hooks.Exchange.html"
    assert "bit-identical on all ranks" in exchange.read_text()
    # A block's file name is shown, a command's marker is not.
    start = (tmp_path / "site/index.html").read_text()
    assert '<span class="caption-text">train.py</span>' in start
    assert ">run<" not in start

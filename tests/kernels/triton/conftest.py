from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import pytest

from tests.kernels.triton.processes import process

# They import Triton, in the processes that import them.
collect_ignore = ["checks.py", "compiling.py"]


@pytest.fixture(scope="session")
def interpreted() -> Iterator[Callable[..., None]]:
    """Calls a function of checks.py for kernels on the CPU, in Triton's interpreter."""
    if not find_spec("triton"):
        pytest.skip("Triton is not installed")
    with process(TRITON_INTERPRET="1") as run:

        def check(function: str, *args: Any) -> None:
            run("tests.kernels.triton.checks", function, "cpu", *args)

        yield check

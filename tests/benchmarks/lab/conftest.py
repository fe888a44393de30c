from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.lab.tasks import Task, build_task
from tests.benchmarks.lab.small import SMALL


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> Iterator[None]:
    # Models this small are slower on several.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def small(tmp_path: Path) -> Callable[..., Task]:
    """A function from a task's name to a small version of it."""

    def build(name: str, *, clients: int = 2, **overrides: Any) -> Task:
        write, options, _, _ = SMALL[name]
        if write is not None:
            folder = tmp_path / name
            if not folder.exists():
                folder.mkdir()
                write(folder)
            options = {**options, "data_dir": folder}
        return build_task(name, clients=clients, **{**options, **overrides})

    return build

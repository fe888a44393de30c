import gc
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import hypothesis
import numpy as np
import pytest
import torch

from tests.ranks import Ranks
from tests.torchrun import Torchrun

# Where something else keeps a core busy, threads that wait for each other take ten times as long.
torch.set_num_threads(1)

# As in an activated environment: torchrun, deepspeed, mpirun and our own commands are found.
os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"

hypothesis.settings.register_profile(
    "default", deadline=None, max_examples=10, derandomize=True, print_blob=True
)
# Others at every run, for `make test-slow`.
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=200, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_collection_finish() -> None:
    """Spare collections from going through all tests and modules, which stay."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let modules be collected at the end, of which some complain otherwise."""
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _seed() -> None:
    """Draw the same in each test whatever ran before it: workers share tests out as time allows."""
    # torch.manual_seed() also formats three stack traces, for devices that do not exist here.
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed_all(0)
    np.random.seed(0)
    random.seed(0)


@pytest.fixture(scope="session")
def _all_ranks() -> Iterator[dict[int, Ranks]]:
    """Running ranks by number, started once."""
    started: dict[int, Ranks] = {}
    yield started
    for ranks in started.values():
        ranks.close()


@pytest.fixture
def ranks_of(
    _all_ranks: dict[int, Ranks], request: pytest.FixtureRequest
) -> Iterator[Callable[[int], Ranks]]:
    """A function from a number of ranks to running ranks."""
    used: list[int] = []

    def ranks_of(world_size: int) -> Ranks:
        used.append(world_size)
        ranks = _all_ranks.get(world_size)
        if ranks is None or not ranks.usable:
            if ranks is not None:
                ranks.close()
            ranks = _all_ranks[world_size] = Ranks(world_size)
        return ranks

    failures = request.session.testsfailed
    yield ranks_of
    if request.session.testsfailed > failures:
        for world_size in used:
            _all_ranks[world_size].close()


@pytest.fixture(scope="session")
def torchrun(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Torchrun]:
    """A command that does what torchrun does, in processes that need not import torch."""
    torchrun = Torchrun(tmp_path_factory.mktemp("torchrun"))
    yield torchrun
    torchrun.close()

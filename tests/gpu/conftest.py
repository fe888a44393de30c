from collections.abc import Callable, Iterator

import pytest
import torch

from tests.gpu.training import BACKEND
from tests.ranks import Ranks


@pytest.fixture(scope="module")
def nccl_ranks() -> Iterator[Callable[[int], Ranks]]:
    """A function from a number of ranks to running ranks, which share one GPU."""
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    started: dict[int, Ranks] = {}

    def ranks_of(world_size: int) -> Ranks:
        if world_size not in started or not started[world_size].usable:
            started[world_size] = Ranks(world_size, BACKEND)
        return started[world_size]

    yield ranks_of
    for ranks in started.values():
        ranks.close()

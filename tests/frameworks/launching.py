"""The environment of a launcher, for frameworks over ranks that run already."""

import os

import torch.distributed as dist


def launch() -> None:
    """Let a framework believe that torchrun started this rank, which has a process group."""
    rank, world = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="1",  # not used
        RANK=rank,
        LOCAL_RANK=rank,
        WORLD_SIZE=world,
        LOCAL_WORLD_SIZE=world,
        TORCHELASTIC_RUN_ID="none",
    )

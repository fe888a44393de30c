"""A DDP training of two ranks, for the two-node test: python train_ddp.py FOLDER."""

import sys
import warnings
from pathlib import Path

import torch.distributed as dist
from torch import optim
from torch.nn.parallel import DistributedDataParallel

from comm_hooks import register
from comm_hooks.launchers.preflight import check_world_size
from tests.launchers.launch.measured import STEPS, batch, make_model, measure


def main(folder: Path) -> None:
    warnings.filterwarnings("ignore")
    dist.init_process_group("gloo")
    check_world_size()
    model = make_model()
    ddp_model = DistributedDataParallel(model, bucket_cap_mb=1)
    state = register(ddp_model, "topk", density=1 / 8)
    optimizer = optim.SGD(model.parameters(), lr=0.01)

    def steps() -> None:
        for step in range(STEPS):
            ddp_model(batch(step)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    measure(steps, state.stats, model, folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

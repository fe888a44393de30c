"""A training in which rank 1 dies once: python restart_once.py FOLDER; FOLDER/<rank>.txt tells."""

import gc
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from comm_hooks import register


def main(folder: Path) -> None:
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    comes_back = (folder / "died").exists()
    if comes_back and rank == 1:
        time.sleep(3)  # the other looks for it before it is there
    dist.init_process_group("gloo")
    model = DistributedDataParallel(nn.Linear(64, 64))
    register(model, "topk")
    for step in range(4):
        if step == 2 and rank == 1 and not comes_back:
            (folder / "died").touch()
            os._exit(13)
        model(torch.ones(8, 64)).sum().backward()
        model.zero_grad()
    (folder / f"{rank}.txt").write_text(f"attempt {attempt} of {dist.get_world_size()} ranks")
    # DDP's reducer must not be the last to let go of the process group.
    del model
    gc.collect()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))

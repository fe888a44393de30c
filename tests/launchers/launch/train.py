"""A training of two nodes that counts the bytes of its interface: python train.py FOLDER."""

import argparse
import hashlib
import json
import os
import warnings
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.nn.parallel import DistributedDataParallel

from comm_hooks import register
from comm_hooks.launchers.preflight import check_world_size

_DEEPSPEED = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
    "comm_hooks": {"compressor": "topk", "density": 1 / 8},
}


def main(folder: Path, with_deepspeed: bool) -> None:
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(3)))
    if with_deepspeed:
        import deepspeed.ops

        from comm_hooks.frameworks.deepspeed import initialize

        # Would be compiled first, which takes a minute.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        engine, _, _, _ = initialize(model=model, config=_DEEPSPEED)
        replica, backward, step = engine, engine.backward, engine.step
        stats = engine.comm_hooks.stats
    else:
        dist.init_process_group("gloo")
        check_world_size()
        replica = DistributedDataParallel(model, bucket_cap_mb=1)
        stats = register(replica, "topk", density=1 / 8).stats
        backward, step = torch.Tensor.backward, optim.SGD(model.parameters(), lr=0.01).step
    dist.barrier()
    before, said = psutil.net_io_counters(pernic=True)["eth0"], stats()
    for number in range(12):
        torch.manual_seed(1000 * dist.get_rank() + number)
        backward(replica(torch.randn(4, 512)).square().mean())
        step()
        model.zero_grad()
    dist.barrier()
    after, says = psutil.net_io_counters(pernic=True)["eth0"], stats()
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    found = {
        "world_size": dist.get_world_size(),
        "interface_sent": after.bytes_sent - before.bytes_sent,
        "interface_received": after.bytes_recv - before.bytes_recv,
        "bytes_sent": says["bytes_sent"] - said["bytes_sent"],
        "bytes_received": says["bytes_received"] - said["bytes_received"],
        "replica": hashlib.sha256(flat.numpy().tobytes()).hexdigest(),
        "gloo_interface": os.environ.get("GLOO_SOCKET_IFNAME"),
    }
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--deepspeed", action="store_true")
    arguments = parser.parse_args()
    main(arguments.folder, arguments.deepspeed)

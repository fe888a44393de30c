"""What both training scripts of the two-node test report: what the interface saw, what we say."""

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch import nn

STEPS = 12
WIDTH = 512


def make_model() -> nn.Module:
    """A model of several buckets, the same on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))


def batch(step: int) -> torch.Tensor:
    """This rank's own data."""
    generator = torch.Generator().manual_seed(1000 * dist.get_rank() + step)
    return torch.randn(4, WIDTH, generator=generator)


def measure(
    steps: Callable[[], None],
    stats: Callable[[], Mapping[str, float]],
    model: nn.Module,
    folder: Path,
) -> None:
    """Run the steps and write what crossed the interface, what ``stats()`` says, and a digest."""
    dist.barrier()
    before, said = _interface(), stats()
    steps()
    dist.barrier()
    after, says = _interface(), stats()
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    found = {
        "world_size": dist.get_world_size(),
        "interface_sent": after[0] - before[0],
        "interface_received": after[1] - before[1],
        "bytes_sent": says["bytes_sent"] - said["bytes_sent"],
        "bytes_received": says["bytes_received"] - said["bytes_received"],
        "replica": hashlib.sha256(flat.numpy().tobytes()).hexdigest(),
        "gloo_interface": os.environ.get("GLOO_SOCKET_IFNAME"),
    }
    (folder / f"{dist.get_rank()}.json").write_text(json.dumps(found))


def _interface() -> tuple[int, int]:
    counters = psutil.net_io_counters(pernic=True)["eth0"]
    return counters.bytes_sent, counters.bytes_recv

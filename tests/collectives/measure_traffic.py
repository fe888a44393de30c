"""Run exchanges in the present network namespace and print counted and crossed bytes as JSON.

unshare -n python tests/collectives/measure_traffic.py RANKS
"""

import fcntl
import json
import os
import socket
import struct
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from comm_hooks import CountSketch, Exchange, Identity, PermK, Sign, TopK

CASES = [
    (Identity(), "all_reduce"),
    (CountSketch(ratio=0.5), "all_reduce"),
    (Sign(), "all_gather"),
    (TopK(density=0.25), "sharded"),
    (PermK(), "all_gather"),
    (Sign(), "hierarchical"),  # two ranks to a node
]
NUMEL = 2 << 20


def bring_up_loopback() -> None:
    siocsifflags, up_and_running = 0x8914, 0x41
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, siocsifflags, struct.pack("16sH", b"lo", up_and_running))


def crossed() -> int:
    with open("/proc/net/dev") as lines:
        (loopback,) = (line for line in lines if line.strip().startswith("lo:"))
    return int(loopback.split(":")[1].split()[0])


def rank_main(rank: int, ranks: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    for compressor, collective in CASES:
        nodes = {"ranks_per_node": 2} if collective == "hierarchical" else {}
        exchange = Exchange(compressor, collective=collective, **nodes)  # type: ignore[arg-type]
        tensors = {"a": torch.randn(NUMEL // 64, 64), "b": torch.randn(1001)}
        exchange.average_(tensors)  # agrees on the configuration, opens connections
        before_counted = exchange.stats()["bytes_sent"]
        dist.barrier()
        before = crossed()
        dist.barrier()
        for _ in range(3):
            exchange.average_(tensors)
        dist.barrier()
        after = crossed()
        dist.barrier()
        if rank == 0:
            counted = ranks * (exchange.stats()["bytes_sent"] - before_counted)
            case = f"{compressor} {collective}"
            print(json.dumps({"case": case, "counted": counted, "crossed": after - before}))
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    bring_up_loopback()
    number = int(sys.argv[1])
    with tempfile.TemporaryDirectory() as folder:
        # Forked, so that torch is imported once.
        mp.start_processes(rank_main, (number, f"{folder}/store"), number, start_method="fork")

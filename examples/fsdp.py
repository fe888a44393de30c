"""FSDP2: sharded inside each node, rounds of local steps between nodes.

Two nodes of two ranks, here on one machine:

torchrun --standalone --nproc-per-node 4 examples/fsdp.py
"""

import argparse

import torch
import torch.distributed as dist
from gpt import GPT, batch, evaluate, loss_of, text, warm_cosine
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from comm_hooks import replace

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--ranks-per-node", type=int, default=2)
args = parser.parse_args()

device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("nccl" if device == "cuda" else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
shape = (ranks // args.ranks_per_node, args.ranks_per_node)
mesh = init_device_mesh(device, shape, mesh_dim_names=("replicate", "shard"))
data, held_out = text(rank, ranks)

torch.manual_seed(0)
model = GPT().to(device)
for block in model.blocks:
    fully_shard(block, mesh=mesh["shard"])
fully_shard(model, mesh=mesh["shard"])

between_nodes = mesh["replicate"].get_group()
adamw = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
optimizer = replace(model, adamw, total_steps=args.steps, process_group=between_nodes)
schedule = warm_cosine(optimizer, args.steps)

for step in range(args.steps):
    inputs, targets = batch(data, 8, step)
    loss = loss_of(model, inputs.to(device), targets.to(device))
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    if rank == 0 and (step + 1) % 50 == 0:
        print(f"step {step + 1}: loss {loss:.3f}", flush=True)

loss = evaluate(model, held_out.to(device))
if rank == 0:
    fewer = optimizer.stats()["compression_ratio"]
    print(f"held-out loss {loss:.3f}, {fewer:.0f} times fewer bytes between nodes")
dist.barrier()
dist.destroy_process_group()

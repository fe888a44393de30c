"""Plain DDP, and what takes the place of its all-reduce.

torchrun --standalone --nproc-per-node 2 examples/ddp.py --method all_reduce
torchrun --standalone --nproc-per-node 2 examples/ddp.py --method low_communication
"""

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from gpt import GPT, batch, evaluate, loss_of, text, warm_cosine
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from comm_hooks import ErrorFeedback, Exchange, Sign, register, replace, skip_hook
from comm_hooks.checkpoints.rank_files import load_rank_files, save_rank_file
from comm_hooks.optim import LocalVarianceAdam

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument(
    "--method",
    choices=["all_reduce", "none", "low_communication", "signs", "count_sketch"],
    default="low_communication",
)
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--lr", type=float, default=2e-3)
parser.add_argument("--checkpoint", type=Path, help="Folder; a run that is in it goes on.")
args = parser.parse_args()

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
data, held_out = text(rank, ranks)
held_out = held_out.to(device)

torch.manual_seed(0)
model = GPT().to(device)
ddp_model = DistributedDataParallel(model)
if args.method == "signs":  # an exchange in every step, replicas agree bit for bit
    exchange = Exchange(Sign(), ErrorFeedback())
    optimizer = LocalVarianceAdam(model.named_parameters(), exchange, lr=args.lr, weight_decay=0.1)
    state = register(ddp_model, optimizer)
else:
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1
    )
    state = None
    if args.method == "low_communication":  # rounds of local steps
        state = optimizer = replace(ddp_model, optimizer, total_steps=args.steps)
    elif args.method == "none":
        ddp_model.register_comm_hook(None, skip_hook)
    elif args.method != "all_reduce":  # compressed gradients, under any optimizer
        state = register(ddp_model, args.method, ratio=0.05)
schedule = warm_cosine(optimizer, args.steps)

first = 0
if args.checkpoint and (args.checkpoint / "shared.pt").exists():
    shared = torch.load(args.checkpoint / "shared.pt", map_location=device, weights_only=True)
    first = shared["step"]
    model.load_state_dict(shared["model"])
    optimizer.load_state_dict(shared["optimizer"])
    schedule.load_state_dict(shared["schedule"])
    if state:
        load_rank_files(state, args.checkpoint)

started = time.monotonic()
for step in range(first, args.steps):
    inputs, targets = batch(data, 16, step)
    loss = loss_of(ddp_model, inputs.to(device), targets.to(device))
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    schedule.step()
    if rank == 0 and (step + 1) % 50 == 0:
        print(f"step {step + 1}: loss {loss:.3f}", flush=True)

seconds = (time.monotonic() - started) / max(1, args.steps - first)
if args.checkpoint:
    if state:
        save_rank_file(state, args.checkpoint)
    if rank == 0:
        args.checkpoint.mkdir(parents=True, exist_ok=True)
        parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
        content = {name: part.state_dict() for name, part in parts.items()}
        torch.save({**content, "step": args.steps}, args.checkpoint / "shared.pt")

loss = evaluate(ddp_model, held_out)
if rank == 0:
    sent = f", {state.stats()['compression_ratio']:.0f} times fewer bytes" if state else ""
    print(f"{args.method}: held-out loss {loss:.3f}{sent}, {seconds:.3f} s per step")
dist.barrier()
dist.destroy_process_group()

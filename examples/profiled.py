"""Where the time of a step goes: a table, and a trace for ui.perfetto.dev.

torchrun --standalone --nproc-per-node 2 examples/profiled.py --trace trace.json
"""

import argparse
import os

import torch
import torch.distributed as dist
from gpt import GPT, batch, loss_of, text
from torch._C._profiler import _ExperimentalConfig
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile, schedule

from comm_hooks import register

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--method", default="count_sketch", help="A compressor's name.")
parser.add_argument("--steps", type=int, default=10)
parser.add_argument("--trace", help="File to write rank 0's timeline to.")
args = parser.parse_args()

dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
device = torch.device("cpu")
if torch.cuda.is_available():
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
data, _ = text(rank, ranks)
torch.manual_seed(0)
ddp_model = DistributedDataParallel(GPT().to(device))
state = register(ddp_model, args.method)
optimizer = torch.optim.AdamW(ddp_model.parameters(), lr=2e-3)

with profile(
    # The first steps find out about buckets and settings.
    schedule=schedule(wait=2, warmup=1, active=args.steps),
    # On gloo a hook's exchange runs in a thread of its own.
    experimental_config=_ExperimentalConfig(profile_all_threads=True),
) as profiler:
    for step in range(3 + args.steps):
        inputs, targets = batch(data, 16, step)
        loss_of(ddp_model, inputs.to(device), targets.to(device)).backward()
        optimizer.step()
        optimizer.zero_grad()
        profiler.step()

if rank == 0:
    if args.trace:
        profiler.export_chrome_trace(args.trace)
    for event in sorted(profiler.key_averages(), key=lambda event: event.key):
        if event.key.startswith(("comm_hooks::", "Optimizer.step", "ProfilerStep")):
            calls, milliseconds = event.count / args.steps, event.cpu_time_total / 1000 / args.steps
            print(f"{event.key:30} {calls:4.1f} per step {milliseconds:8.2f} ms per step")
dist.destroy_process_group()

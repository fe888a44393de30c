"""DeepSpeed: the JSON asks for rounds of local steps.

torchrun --standalone --nproc-per-node 2 examples/deepspeed_engine.py
deepspeed --num_gpus 2 examples/deepspeed_engine.py
"""

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
from gpt import GPT, batch, evaluate, loss_of, text

from comm_hooks.frameworks.deepspeed import initialize

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--local_rank", type=int, default=-1)
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--checkpoint", default="checkpoint-deepspeed")
parser.add_argument("--resume", action="store_true")
args = parser.parse_args()

config = json.loads(Path(__file__).with_name("deepspeed_config.json").read_text())
config["comm_hooks"]["total_steps"] = args.steps

torch.manual_seed(0)
model = GPT()
engine, _, _, _ = initialize(model=model, config=config)
rank = dist.get_rank()
data, held_out = text(rank, dist.get_world_size())
if args.resume:
    engine.load_checkpoint(args.checkpoint)

for step in range(engine.global_steps, args.steps):
    for micro in range(engine.gradient_accumulation_steps()):
        inputs, targets = batch(data, 8, 2 * step + micro)
        loss = loss_of(engine, inputs.to(engine.device), targets.to(engine.device))
        engine.backward(loss)
        engine.step()
    if rank == 0 and (step + 1) % 50 == 0:
        print(f"step {step + 1}: loss {loss:.3f}", flush=True)

engine.save_checkpoint(args.checkpoint)
loss = evaluate(engine, held_out.to(engine.device))
if rank == 0:
    fewer = engine.comm_hooks.stats()["compression_ratio"]
    print(f"held-out loss {loss:.3f}, {fewer:.0f} times fewer bytes")

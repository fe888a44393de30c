"""Accelerate: mixed precision, accumulation, clipping, a schedule and checkpoints.

torchrun --standalone --nproc-per-node 2 examples/accelerate_loop.py
torchrun --standalone --nproc-per-node 2 examples/accelerate_loop.py --resume
"""

import argparse

import torch
from accelerate import Accelerator
from gpt import CONTEXT, GPT, evaluate, loss_of, text, warm_cosine

from comm_hooks.frameworks.accelerate import register

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--checkpoint", default="checkpoint-accelerate")
parser.add_argument("--resume", action="store_true")
args = parser.parse_args()

accelerator = Accelerator(
    cpu=not torch.cuda.is_available(),
    mixed_precision="bf16",
    gradient_accumulation_steps=2,
    step_scheduler_with_optimizer=False,
)
data, held_out = text(accelerator.process_index, accelerator.num_processes)
rows = data.unfold(0, CONTEXT + 1, CONTEXT)[: 2 * 8 * args.steps]
loader = torch.utils.data.DataLoader(rows, batch_size=8)

torch.manual_seed(0)
model = GPT()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.95), weight_decay=0.1)
schedule = warm_cosine(optimizer, args.steps)
# Each rank has its own text already: the loader is not prepared, which would deal it out again.
model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
rounds = register(accelerator, model, optimizer, total_steps=args.steps)
if args.resume:
    accelerator.load_state(args.checkpoint)

for row in loader:
    row = row.to(accelerator.device)
    with accelerator.accumulate(model):
        accelerator.backward(loss_of(model, row[:, :-1], row[:, 1:]))
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if accelerator.sync_gradients:
            schedule.step()
        optimizer.zero_grad()

accelerator.save_state(args.checkpoint)
loss = evaluate(model, held_out.to(accelerator.device))
fewer = rounds.stats()["compression_ratio"]
accelerator.print(f"held-out loss {loss:.3f}, {fewer:.0f} times fewer bytes")
accelerator.end_training()

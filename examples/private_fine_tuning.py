"""Fine-tune a GPT-2 with LoRA on texts of one person each, padded to each other, privately.

torchrun --standalone --nproc-per-node 2 examples/private_fine_tuning.py
torchrun --standalone --nproc-per-node 2 examples/private_fine_tuning.py --mode hooks
"""

import argparse
import ast
import sysconfig
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from gpt import CONTEXT, batch, text
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from comm_hooks.optim.private import DPAdam, PrivacyEngine

PADDING = 256  # besides the 256 bytes

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--mode", choices=["functorch", "hooks"], default="functorch")
parser.add_argument("--public-steps", type=int, default=300)
parser.add_argument("--steps", type=int, default=100)
parser.add_argument("--epsilon", type=float, default=8.0)
args = parser.parse_args()
warnings.filterwarnings("ignore", "two samples of a batch are equal")  # some docstrings are


def docstrings() -> list[torch.Tensor]:
    """Return the docstrings of Python's standard library, each of another "person", as bytes."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    trees = [ast.parse(path.read_text("utf-8", "replace")) for path in paths]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    found = [ast.get_docstring(n) for n in nodes if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    return [torch.tensor(list(doc.encode()[:CONTEXT])) for doc in found if doc and len(doc) > 1]


def collate(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=PADDING)
    return {"input_ids": ids, "attention_mask": (ids != PADDING).long()}


def loss_function(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return the mean loss of each text's own bytes, (B,): padding neither counts nor is seen."""
    logits = model(**batch).logits[:, :-1]
    targets, counts = batch["input_ids"][:, 1:], batch["attention_mask"][:, 1:]
    losses = nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    return (losses * counts).sum(1) / counts.sum(1).clamp(min=1)


@torch.no_grad()
def held_out_loss(model: nn.Module, rows: list[torch.Tensor]) -> float:
    model.eval()
    loss = loss_function(model, collate(rows)).mean().item()
    model.train()
    return loss


dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
# "eager", since under vmap attention may not look at the values of a mask.
config = GPT2Config(
    vocab_size=257, n_positions=CONTEXT, n_embd=128, n_layer=2, n_head=4, bos_token_id=PADDING,
    eos_token_id=PADDING, pad_token_id=PADDING, attn_implementation="eager",
)  # fmt: skip
model = GPT2LMHeadModel(config)

# 1. Public text: the source code.  Weights from a hub would take this step's place.
public = DistributedDataParallel(model)
ordinary = torch.optim.AdamW(public.parameters(), lr=2e-3)
data, _ = text(rank, ranks)
for step in range(args.public_steps):
    inputs, targets = batch(data, 16, step)
    logits = public(input_ids=inputs).logits
    nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
    ordinary.step()
    ordinary.zero_grad()

# 2. Private text: adapters learn the docstrings.
rows = docstrings()
held_out, people = rows[:200], rows[200:]
torch.manual_seed(1)
model = get_peft_model(model, LoraConfig(r=8, target_modules=["c_attn"], fan_in_fan_out=True))
before = held_out_loss(model, held_out)
engine = PrivacyEngine()
model, optimizer, loader = engine.make_private_with_epsilon(
    module=model,
    optimizer=DPAdam([p for p in model.parameters() if p.requires_grad], lr=3e-3),
    data_loader=DataLoader(people, collate_fn=collate),
    loss_function=loss_function,
    target_epsilon=args.epsilon,
    target_delta=1e-5,
    steps=args.steps,
    sample_rate=0.03,
    expected_batch_size=128,
    max_grad_norm=0.5,
    grad_sample_mode=args.mode,
    micro_batch_size=32,
)
taken = 0
while taken < args.steps:
    for private_batch in loader:
        optimizer.zero_grad()
        optimizer.backward(private_batch)
        optimizer.step()
        taken += 1
        if taken == args.steps:
            break

after, epsilon = held_out_loss(model, held_out), engine.get_epsilon(1e-5)
if rank == 0:
    print(f"{len(people)} texts, held-out loss {before:.3f} -> {after:.3f}, epsilon {epsilon:.2f}")
dist.destroy_process_group()

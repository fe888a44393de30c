"""The Trainer of transformers on a Llama of its own.

torchrun --standalone --nproc-per-node 2 examples/trainer.py
"""

import argparse

import torch
from gpt import CONTEXT, text
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from comm_hooks.frameworks import transformers

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--out", default="checkpoint-trainer")
parser.add_argument("--resume", action="store_true")
args = parser.parse_args()

arguments = TrainingArguments(
    args.out,
    use_cpu=not torch.cuda.is_available(),
    bf16=True,
    max_steps=args.steps,
    per_device_train_batch_size=8,
    gradient_accumulation_steps=2,
    learning_rate=2e-3,
    adam_beta2=0.95,
    weight_decay=0.1,
    lr_scheduler_type="cosine",
    warmup_steps=args.steps // 10,
    max_grad_norm=1.0,
    logging_steps=50,
    save_steps=max(1, args.steps // 2),
    eval_strategy="steps",
    eval_steps=max(1, args.steps // 2),
    report_to=[],
    disable_tqdm=True,
)


def rows_of(data: torch.Tensor) -> list[dict[str, torch.Tensor]]:
    """Return examples of CONTEXT bytes; the model shifts the labels itself."""
    return [{"input_ids": row, "labels": row} for row in data.unfold(0, CONTEXT, CONTEXT)]


data, held_out = text(0, 1)  # the Trainer deals it out
torch.manual_seed(0)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=CONTEXT,
    )
)
trainer = Trainer(
    model,
    arguments,
    train_dataset=rows_of(data),
    eval_dataset=rows_of(held_out[: 64 * CONTEXT]),
)
callback = transformers.register(trainer, total_steps=args.steps)
trainer.train(resume_from_checkpoint=args.resume)
loss = trainer.evaluate()["eval_loss"]
if trainer.is_world_process_zero():
    fewer = callback.state.stats()["compression_ratio"]
    print(f"held-out loss {loss:.3f}, {fewer:.0f} times fewer bytes")

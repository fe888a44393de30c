"""Lightning: a callback that replaces AdamW.

torchrun --standalone --nproc-per-node 2 examples/lightning_module.py
"""

import argparse

import lightning.pytorch as pl
import torch
from gpt import CONTEXT, GPT, loss_of, text, warm_cosine

from comm_hooks.frameworks.lightning import CompressionCallback

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--resume")
args = parser.parse_args()


class Model(pl.LightningModule):
    """A GPT of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = GPT()

    def training_step(self, row: torch.Tensor, index: int) -> torch.Tensor:
        """Return the loss of a micro-batch."""
        return loss_of(self.gpt, row[:, :-1], row[:, 1:])

    def validation_step(self, row: torch.Tensor, index: int) -> None:
        """Log the loss of the model that all ranks share."""
        self.log("held_out", loss_of(self.gpt, row[:, :-1], row[:, 1:]), sync_dist=True)

    def configure_optimizers(self) -> object:
        """Return an AdamW, which the callback replaces, with a schedule."""
        settings = {"lr": 2e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
        optimizer = torch.optim.AdamW(self.parameters(), **settings)
        schedule = warm_cosine(optimizer, args.steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


pl.seed_everything(0, verbose=False)
data, held_out = text(0, 1)  # Lightning deals it out


def loader(part: torch.Tensor) -> torch.utils.data.DataLoader:
    """Return micro-batches of 8 rows."""
    return torch.utils.data.DataLoader(part.unfold(0, CONTEXT + 1, CONTEXT), batch_size=8)


callback = CompressionCallback(total_steps=args.steps)
trainer = pl.Trainer(
    accelerator="auto" if torch.cuda.is_available() else "cpu",
    devices=2,
    strategy="ddp",
    precision="bf16-mixed",
    max_steps=args.steps,
    accumulate_grad_batches=2,
    gradient_clip_val=1.0,
    callbacks=[callback, pl.callbacks.ModelCheckpoint("checkpoint-lightning", "last")],
    limit_val_batches=8,
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
model = Model()
trainer.fit(model, loader(data), ckpt_path=args.resume)
(result,) = trainer.validate(model, loader(held_out), verbose=False)
if trainer.is_global_zero:
    fewer = callback.state.stats()["compression_ratio"]
    print(f"held-out loss {result['held_out']:.3f}, {fewer:.0f} times fewer bytes")

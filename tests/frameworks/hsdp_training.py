"""A small transformer under HSDP, whose nodes see disjoint halves of the data."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from comm_hooks.frameworks.fsdp import compress_all_reduce
from tests.frameworks.hsdp import two_by_two

VOCABULARY, LENGTH = 32, 16


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 32)
        self.positions = nn.Parameter(torch.zeros(LENGTH, 32))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(32, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.positions[: tokens.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for block in self.blocks:
            x = block(x, src_mask=mask, is_causal=True)
        return self.head(x)


def sequences(node: int, seed: int) -> torch.Tensor:
    """Return sequences (16, LENGTH) that count up in steps of 3, by halves of the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    half = VOCABULARY // 2
    first = torch.randint(half, (16, 1), generator=generator)
    return node * half + (first + 3 * torch.arange(LENGTH)) % half


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1]).flatten(0, 1)
    return nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())


def final_loss(method: str, options: dict[str, Any], steps: int) -> dict[str, Any]:
    """Train; return this rank's model's loss on the data of both nodes."""
    mesh = two_by_two()
    torch.manual_seed(0)
    model = Transformer()
    shards = mesh if method == "all_reduce" else mesh["shard"]
    for block in model.blocks:
        fully_shard(block, mesh=shards)
    fully_shard(model, mesh=shards)
    stats: dict[str, float] = {}
    if method not in ("all_reduce", "none"):
        state = compress_all_reduce(model, method, mesh=mesh["replicate"], min_numel=256, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rank = dist.get_rank()
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, sequences(rank // 2, seed=10 * step + rank)).backward()
        optimizer.step()
    if method not in ("all_reduce", "none"):
        stats = state.stats()
    # Before the next forward pass gathers the root's.
    weights = [p.detach().to_local().clone() for p in model.parameters()]  # type: ignore[attr-defined]
    with torch.no_grad():
        losses = [float(loss_of(model, sequences(node, seed=-1 - node))) for node in (0, 1)]
    return {"loss": sum(losses) / 2, "stats": stats, "weights": weights}

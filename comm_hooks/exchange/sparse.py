"""Average sparse gradients (``nn.Embedding(sparse=True)``) exactly, in sparse form."""

import torch

from comm_hooks.collectives.base import completed
from comm_hooks.collectives.requests import AllGather, Round
from comm_hooks.exchange import Exchange
from comm_hooks.wire.stamp import Stamp, digest, refuse_disagreement


def average_sparse(
    exchange: Exchange, gradient: torch.Tensor
) -> torch.futures.Future[torch.Tensor]:
    """Return a completed future of the mean over ranks of a sparse COO gradient.

    1. gather the number of entries, the step and the shape of each rank;
    2. gather indices (int64) and values, padded to the largest number;
    3. add them up in rank order, in float32 at least, and divide by the number of ranks.
    """
    return completed(exchange.transport.run(_round(exchange, gradient.coalesce())))


def _round(exchange: Exchange, gradient: torch.Tensor) -> Round[torch.Tensor]:
    exchange.require_open()
    yield from exchange.agree()
    ranks = exchange.transport.world_size
    indices, values = gradient.indices(), gradient.values()
    stamp = Stamp(digest(tuple(gradient.shape), values.dtype), exchange.step)
    own = torch.tensor([*stamp.words(), values.shape[0]], device=values.device)
    counts_request = AllGather(own.view(torch.uint8))
    found = (yield counts_request).view(torch.int64).tolist()
    refuse_disagreement(
        [row[:-1] for row in found], [f"rank {rank}" for rank in exchange.transport.ranks]
    )
    counts = [row[-1] for row in found]

    missing = max(counts) - values.shape[0]
    padded_indices = torch.cat([indices, indices.new_zeros(indices.shape[0], missing)], dim=1)
    padded_values = torch.cat([values, values.new_zeros(missing, *values.shape[1:])])
    index_nbytes = padded_indices.nbytes
    nbytes = index_nbytes + padded_values.nbytes
    payload = torch.cat(
        [
            padded_indices.view(-1).view(torch.uint8),
            padded_values.reshape(-1).view(torch.uint8),
            # Each rank's indices begin where whole int64 numbers do.
            torch.zeros(-nbytes % 8, dtype=torch.uint8, device=values.device),
        ]
    )
    payload_request = AllGather(payload)
    payloads = yield payload_request
    exchange.count_sent(counts_request.traffic(ranks) + payload_request.traffic(ranks))
    exchange.count_gradients(gradient.numel() * gradient.element_size())

    wide = torch.promote_types(values.dtype, torch.float32)
    total = torch.zeros_like(gradient, dtype=wide)
    for other, entries in zip(payloads, counts, strict=True):
        other_indices = other[:index_nbytes].view(torch.int64).view(padded_indices.shape)
        other_values = other[index_nbytes:nbytes].view(values.dtype).view(padded_values.shape)
        total += torch.sparse_coo_tensor(
            other_indices[:, :entries], other_values[:entries].to(wide), gradient.shape
        )
    mean = (total.coalesce() / ranks).to(values.dtype)
    exchange.note_health(torch.where(mean.values().isfinite().all(), 0.0, torch.nan))
    return mean
